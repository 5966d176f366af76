import unicodedata

import pytest

from runtime.errors import RequestError
from runtime.frontend.splitting import HARD_LENGTH, REST_LENGTH, is_only_punctuation
from runtime.frontend.text import TextFrontend, notices, strip_marker
from runtime.frontend.tokenizer import TextTokenizer
from tests.golden import meta

CLAUSES = [
    "it was the best of times",
    "it was the worst of times",
    "it was the age of wisdom",
    "it was the age of foolishness",
    "it was the epoch of belief",
    "it was the epoch of incredulity",
    "it was the season of Light",
    "it was the season of Darkness",
    "it was the spring of hope",
    "it was the winter of despair",
]


@pytest.fixture(scope="module")
def frontend(qwen: TextTokenizer) -> TextFrontend:
    return TextFrontend(qwen.count)


def letters(text: str) -> list[str]:
    return [char for char in unicodedata.normalize("NFC", text) if char.isalpha()]


# The reference, without its FST back end


def test_official_pieces_equal_the_reference(frontend: TextFrontend) -> None:
    for text, pieces in meta("text_frontend")["normalize_split"]:
        assert frontend.official_pieces(text, fst=False) == pieces, text


def test_official_normalisation_equals_the_reference(frontend: TextFrontend) -> None:
    for text, normalized in meta("text_frontend")["normalize_nosplit"]:
        assert frontend.normalize(text, fst=False) == normalized, text
        assert frontend.transcript(text, "official", normalize=False) == normalized


def test_only_punctuation_equals_the_reference() -> None:
    for text, expected in meta("text_frontend")["is_only_punctuation"]:
        assert is_only_punctuation(text) is expected, text


def test_official_reads_figures_with_fst(frontend: TextFrontend) -> None:
    assert frontend.sentences("他有3个，", "official") == ["他有三个。"]
    assert frontend.sentences("5 ml", "official") == ["five milliliters."]
    assert frontend.sentences("5 ml", "official", normalize=False) == ["five ml."]


def test_official_leaves_a_text_with_a_control_token_alone(frontend: TextFrontend) -> None:
    text = "a<|endofprompt|>3 words. " * 30
    assert frontend.sentences(text, "official") == [text]


def test_a_short_sentence_takes_the_next_one_however_long(frontend: TextFrontend) -> None:
    """Both bounds of spec 2.8 must be passed before a sentence is closed."""
    short, closed, long = "短" * 59 + "。", "满" * 60 + "。", "长" * 50 + "。"
    assert frontend.split(short + long) == [short + long]
    assert frontend.split(closed + long) == [closed, long]
    assert frontend.split(closed + "长" * 18 + "。") == [closed + "长" * 18 + "。"]


# Ours


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hi", ["Hi."]),
        ("好", ["好。"]),
        ("今天 天气 不错 hello world 是的", ["今天天气不错hello world是的。"]),
        ("他说：“你好。”然后走了3.5公里", ["他说：“你好。”然后走了三点五公里。"]),
        ("He said “hello.”", ["He said “hello.”"]),
        ("Roses are red\nViolets are blue,\n\n***\nSo", ["Roses are red. Violets are blue. So."]),
        ("第一行\n第二行\nThen English\n最后", ["第一行。第二行。", "Then English.", "最后。"]),
        ("１２３ＡＢＣ（好）", ["一百二十三ABC好。"]),
        ("안녕하세요 세계", ["안녕하세요 세계."]),
        ("नमस्ते दुनिया।", ["नमस्ते दुनिया।"]),
        ("ありがとう。さようなら", ["ありがとう。さようなら."]),
        ("Für schöne Grüße", ["Für schöne Grüße."]),
        ("a\u00adb\u200bc\x00d", ["abcd."]),
    ],
)
def test_intended_pieces(frontend: TextFrontend, text: str, pieces: list[str]) -> None:
    assert frontend.sentences(text) == pieces


def test_control_tokens_pass_untouched(frontend: TextFrontend) -> None:
    text = "[breath]因为3个人[j][ǐ]予<strong>好评</strong>[laughter]。[HH][AH0][L][OW1]"
    assert frontend.sentences(text) == [
        "[breath]因为三个人[j][ǐ]予<strong>好评</strong>[laughter]。[HH][AH0][L][OW1]。"
    ]
    assert frontend.sentences("[laughter]") == ["[laughter]."]


def test_a_long_run_of_control_tokens_is_cut_between_them(frontend: TextFrontend, qwen: TextTokenizer) -> None:
    pieces = frontend.sentences("[HH][AH0]" * 500)
    assert "".join(pieces).rstrip(".") == "[HH][AH0]" * 500
    assert sum(map(qwen.count, pieces)) == 1001


def test_without_normalisation_figures_stay(frontend: TextFrontend) -> None:
    assert frontend.sentences("I have 5 € at 12:30.", normalize=False) == ["I have 5 € at 12:30."]
    assert frontend.sentences("我有3个", normalize=False) == ["我有3个。"]


def test_transcript_is_one_piece_in_the_same_spelling(frontend: TextFrontend) -> None:
    assert frontend.transcript("I have 3\napples 🙂, [breath] yes") == "I have three apples , [breath] yes"
    assert frontend.transcript(" ") == ""


def test_titles_and_decimals_are_no_sentence_ends(frontend: TextFrontend) -> None:
    long = "word " * 70
    pieces = frontend.sentences(f"{long}Dr. Smith paid 3.5 at example.com there. {long}", normalize=False)
    assert all(not piece.endswith(("Dr.", "3.", "example.")) for piece in pieces)


def test_no_clause_of_a_long_sentence_is_lost(frontend: TextFrontend) -> None:
    spoken = " ".join(frontend.sentences(", ".join(CLAUSES) * 5))
    assert all(spoken.count(clause) == 5 for clause in CLAUSES)


def test_lyrics_are_cut_at_their_lines(frontend: TextFrontend) -> None:
    lines = [f"La la la number {name} is sung" for name in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"]
    pieces = frontend.sentences("\n".join(lines))
    assert len(pieces) > 3
    assert [line for piece in pieces for line in piece.rstrip(".").split(". ")] == lines


@pytest.mark.parametrize(
    "text",
    [
        "word" * 2500,
        "word " * 2000,
        "a," * 5000,
        "字" * 10_000,
        "字。" * 5000,
        "カ" * 10_000,
        "e\u0301" * 5000,
        "ก็" * 5000,
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_ten_thousand_characters_become_short_sentences(
    frontend: TextFrontend, qwen: TextTokenizer, text: str, normalize: bool
) -> None:
    """Trap 68: whatever lacks stops is cut anyway, and nothing is lost or left as an endless sentence."""
    pieces = frontend.sentences(text, normalize=normalize)
    length = len if "字" in text else qwen.count
    assert max(map(length, pieces)) <= HARD_LENGTH + REST_LENGTH
    assert letters("".join(pieces)) == letters(text)


@pytest.mark.parametrize(
    "text", ["", " \n\t ", "...", "！！！", "$", "😀😀", "👨\u200d👩\u200d👧 🇩🇪", "***\n---", "\u200b\ufeff"]
)
@pytest.mark.parametrize("fidelity", ["intended", "official"])
def test_nothing_to_speak_is_told(frontend: TextFrontend, text: str, fidelity: str) -> None:
    """Trap 68."""
    with pytest.raises(RequestError, match="nothing to speak"):
        frontend.sentences(text, fidelity)


def test_emoji_are_dropped_and_reported(frontend: TextFrontend) -> None:
    text = "🙂 Hello 👋🏽 there → you at 20℃, 🙂 ok"
    assert frontend.sentences(text) == ["Hello there you at twenty degrees Celsius, ok."]
    assert notices(text) == ["not spoken, as there is no reading for them: 🙂 👋 🏽 →"]
    assert notices("Nothing odd: 20°C, 5 €, №5.") == []


def test_kanji_beside_kana_are_warned_of() -> None:
    assert notices("東京へ行きます") == ["the model reads kanji as Chinese; write Japanese in katakana"]
    assert (
        notices("東京都庁舎") == [] and "kanji" in notices("東京都庁舎", language="ja")[0]
    )  # without kana it must be told
    assert notices("トウキョウ") == notices("东京") == []


@pytest.mark.parametrize(
    "text", ["[pause 2s] a", '<break time="3s"/> a', "{pause} a", "a ...... b", "a<b>3</b>", "a\\n \" 3'", "\ue000a"]
)
@pytest.mark.parametrize("fidelity", ["intended", "official"])
def test_markup_and_odd_signs_never_crash(frontend: TextFrontend, text: str, fidelity: str) -> None:
    assert "a" in "".join(frontend.sentences(text, fidelity))


# The marker (trap 69)


def test_a_pasted_prefix_is_removed(frontend: TextFrontend) -> None:
    """Trap 69."""
    pasted = "You are a helpful assistant.<|endofprompt|>Hello."
    assert strip_marker(pasted) == "Hello."
    assert strip_marker("Hello.") == "Hello."
    assert frontend.sentences(pasted) == ["Hello."]
    assert frontend.transcript(pasted) == "Hello."


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("a<|endofprompt|>b<|endofprompt|>c", r"<\|endofprompt\|> more than once"),
        ("a<|im_start|>b", r"<\|im_start\|>"),
        ("<|endofprompt|>b <|something|>", r"<\|something\|>"),
    ],
)
def test_another_control_token_is_named(text: str, token: str) -> None:
    """Trap 69."""
    with pytest.raises(RequestError, match=token):
        strip_marker(text)


@pytest.mark.parametrize("text", ["a＜|endofprompt|＞b", "a<|endof\u200bprompt|>b", "a<｜endofprompt｜>b"])
def test_a_disguised_marker_does_not_reach_the_model(frontend: TextFrontend, text: str) -> None:
    """Trap 69: cleaning may make a marker of what was none, so it is looked for afterwards."""
    assert frontend.sentences(text) == ["b."]

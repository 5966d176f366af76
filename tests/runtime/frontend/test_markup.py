"""Marks between the words: pauses, tags, inline pronunciations and the word list."""

import re
import time
from pathlib import Path

import pytest

from runtime.errors import RequestError
from runtime.frontend.markup import MOST_WORDS, apply_words, cut_at_pauses, load_words, parse_words
from runtime.frontend.text import Piece, TextFrontend, notices
from runtime.frontend.tokenizer import SPECIAL_TOKENS, TextTokenizer


@pytest.fixture(scope="module")
def frontend(qwen: TextTokenizer) -> TextFrontend:
    return TextFrontend(qwen.count)


@pytest.mark.parametrize(
    ("mark", "seconds"),
    [
        ("[pause 1.5s]", 1.5),
        ("[pause 2]", 2.0),
        ("[pause 1,5 s]", 1.5),
        ("[pause .5s]", 0.5),
        ("[PAUSE: 250ms]", 0.25),
        ("[pause=3 seconds]", 3.0),
        ("[pause 1秒]", 1.0),
        ("［pause 1.5s］", 1.5),
        ('<break time="1.5s"/>', 1.5),
        ("<break time='500ms' />", 0.5),
        ("<break time=2s>", 2.0),
        ('<break time="1s"></break>', 1.0),
        ("<break time=“1s”/>", 1.0),
        ("[pause 0.05s]", 0.05),
        ("[pause 10s]", 10.0),
    ],
)
def test_a_pause_is_cut_out_of_the_text(frontend: TextFrontend, mark: str, seconds: float) -> None:
    pieces = frontend.pieces(f"First word {mark} second word")
    assert pieces == [Piece("First word.", "First word"), Piece("second word.", "second word", seconds)]


@pytest.mark.parametrize("fidelity", ["intended", "official"])
@pytest.mark.parametrize("split", [True, False])
def test_pauses_stand_at_the_start_at_the_end_and_in_a_row(frontend: TextFrontend, fidelity: str, split: bool) -> None:
    text = "[pause 1s]One.[pause 2s] . [pause 500ms]\n两个[pause 3s]"
    first, second = frontend.pieces(text, fidelity, split=split)
    assert (first.pause_before_seconds, second.pause_before_seconds, second.pause_after_seconds) == (1.0, 2.5, 3.0)
    assert "pause" not in first.text + second.text and first.pause_after_seconds == 0


def test_a_short_rest_is_not_glued_over_a_pause(frontend: TextFrontend) -> None:
    assert len(frontend.pieces("word " * 70 + "[pause 1s] Yes.")) > len(frontend.pieces("word " * 70 + " Yes."))


@pytest.mark.parametrize("mark", ["[pause]", "[pause soon]", "<break/>", '<break strength="weak"/>', "[pause 1 2]"])
def test_a_pause_without_a_length_is_told(mark: str) -> None:
    with pytest.raises(RequestError, match=re.escape(mark) + " has no length"):
        cut_at_pauses(f"a {mark} b")


@pytest.mark.parametrize("mark", ["[pause 0s]", "[pause 49ms]", "[pause 10.1s]", '<break time="1000s"/>'])
def test_a_pause_out_of_bounds_is_told(mark: str) -> None:
    with pytest.raises(RequestError, match=r"0\.05 to 10 s"):
        cut_at_pauses(f"a {mark} b")


def test_pauses_in_one_place_have_a_bound(frontend: TextFrontend) -> None:
    frontend.pieces("a" + "[pause 10s]" * 6 + "b")
    with pytest.raises(RequestError, match="60 s"):
        frontend.pieces("a" + "[pause 10s]" * 7 + "b")


def test_a_text_of_pauses_has_nothing_to_speak(frontend: TextFrontend) -> None:
    with pytest.raises(RequestError, match="nothing to speak"):
        frontend.pieces("[pause 1s]")


def test_other_pause_marks_and_tags_are_not_read_and_told(frontend: TextFrontend) -> None:
    text = 'Wait {pause} here <emphasis level="strong">now</emphasis> {break 2s} <b>go</b>'
    assert frontend.sentences(text) == ["Wait here now go."]
    (told,) = notices(text)
    assert all(tag in told for tag in ("{pause}", '<emphasis level="strong">', "</b>", "[pause 1.5s]"))
    assert notices(text, fidelity="official") == []  # there they are text
    assert notices('a [pause 1s] b <break time="1s"/>') == []


@pytest.mark.parametrize(
    ("text", "spoken"), [("a < 3", "a less than three."), ("x<4 and y>5", None), ("a {b} c", None)]
)
def test_what_is_no_tag_stays(frontend: TextFrontend, text: str, spoken: str | None) -> None:
    pieces = frontend.sentences(text)
    assert pieces == [spoken] if spoken else len("".join(pieces)) > len(text)


@pytest.mark.parametrize(
    ("text", "spoken"), [("Wait...... what?", "Wait... what?"), ("等等......好", "等等……好。"), ("嗯。。。。", "嗯……")]
)
def test_dots_are_no_words(frontend: TextFrontend, text: str, spoken: str) -> None:
    assert frontend.sentences(text) == [spoken]


def test_inline_pronunciations_reach_the_model_as_tokens(frontend: TextFrontend, qwen: TextTokenizer) -> None:
    text = "他是[h][áng][zh][ǎng]。 Say [HH][AH0][L][OW1] [laughter]"
    spoken = " ".join(frontend.sentences(text))
    ids = qwen.encode(spoken)
    for token in ("[h]", "[áng]", "[ǎng]", "[HH]", "[AH0]", "[OW1]", "[laughter]"):
        assert token in spoken and qwen.id_of(token) in ids
    assert notices(text) == []


def test_what_looks_like_a_sound_of_the_model_is_told(frontend: TextFrontend) -> None:
    assert notices("Ha [laugh] [foo3] [1] [breath]") == [
        "read as words, as the model has no such sound: [laugh] [foo3]"
    ]
    assert "[laugh]" in frontend.sentences("Ha [laugh]")[0]


def test_a_writing_that_the_model_does_not_know_is_told() -> None:
    (told,) = notices("สวัสดีครับ and שלום")
    assert "Thai" in told and "Hebrew" in told
    assert notices("Grüße, привет, 안녕하세요, こんにちは 5 μm π") == []


# The word list


@pytest.mark.parametrize(
    ("words", "text", "spoken"),
    [
        ({"pytorch": "pie torch"}, "PyTorch, PYTORCH!", "pie torch, pie torch!"),
        ({"US": "U S"}, "The US tells us.", "The U S tells us."),
        ({"cat": "kitty"}, "concatenate cat cats cat_x cat.", "concatenate kitty cats cat_x kitty."),
        ({"PyTorch": "派拓"}, "用PyTorch写。", "用派拓写。"),
        ({"行长": "[h][áng][zh][ǎng]"}, "他是行长吗", "他是[h][áng][zh][ǎng]吗"),
        ({"New": "old", "New York": "the city"}, "New York is New", "the city is old"),
        ({"a": "b", "b": "c"}, "a b", "b c"),
        ({"B": "bee", "laughter": "haha"}, "[B] B [laughter] <laughter>", "[B] bee [laughter] <laughter>"),
        ({"C++": "C plus plus"}, "C++ and C+", "C plus plus and C+"),
        ({"Ue\u0301": "x"}, "U\u00e9", "x"),
        ({}, "as it was", "as it was"),
    ],
)
def test_words_get_their_readings(words: dict[str, str], text: str, spoken: str) -> None:
    assert apply_words(text, words) == spoken


def test_words_come_before_figures_are_read(frontend: TextFrontend) -> None:
    words = {"E100": "E one hundred", "km/h": "klicks", "重庆": "[ch][óng][q][ìng]"}
    texts = [piece.text for piece in frontend.pieces("E100 at 5 km/h. 重庆。", words=words)]
    assert "E one hundred at five klicks" in texts[0] and "[ch][óng]" in "".join(texts)


def test_a_word_may_be_called_pause(frontend: TextFrontend) -> None:
    pieces = frontend.pieces("A pause [pause 1s] here", words={"pause": "break"})
    assert pieces == [Piece("A break.", "A pause"), Piece("here.", "here", 1.0)]


def test_the_transcript_is_read_with_the_same_words(frontend: TextFrontend) -> None:
    assert frontend.transcript("I use [pause 1s] PyTorch", words={"PyTorch": "pie torch"}) == "I use pie torch"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"a": " "}, "neither may be empty"),
        ({"a" * 101: "b"}, "100 characters"),
        ({"a": "<|endofprompt|>"}, "control token"),
        ({"a": "[pause 1s]"}, "no pause"),
        ({f"w{i}": "x" for i in range(MOST_WORDS + 1)}, "2001 words"),
    ],
)
def test_a_word_list_that_cannot_be_used_is_told(words: dict[str, str], told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)):
        apply_words("text", words)


def test_a_full_word_list_is_quick() -> None:
    words = {f"word{i}x": "reading" for i in range(MOST_WORDS)}
    began = time.perf_counter()
    apply_words("word7 some words of a text without any of the list. " * 200, words)
    assert time.perf_counter() - began < 2


def test_word_lists_are_read_as_lines_or_json(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("# names\nPyTorch = pie torch\n\n重庆=[ch][óng][q][ìng]\nPyTorch = pie\n", encoding="utf-8-sig")
    assert load_words(path) == {"PyTorch": "pie", "重庆": "[ch][óng][q][ìng]"}
    path.write_text('{"PyTorch": "pie torch"}', encoding="utf-8")
    assert load_words(path) == {"PyTorch": "pie torch"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"PyTorch\n", "line 1"),
        (b"a = b\n = c", "line 2"),
        (b'{"a": 1}', "no text"),
        (b'{"a": "b"', "no JSON"),
        (b'{"a":' * 10_000, "no JSON"),
        ("ü = y".encode("latin-1"), "UTF-8"),
        (b"#" * (2**20 + 1), "1024 KiB"),
    ],
)
def test_a_broken_word_list_is_told(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=told):
        load_words(path)
    with pytest.raises(RequestError, match=r"none\.txt"):
        load_words(tmp_path / "none.txt")


def test_every_special_token_passes_the_tag_rule(frontend: TextFrontend) -> None:
    for token in SPECIAL_TOKENS:
        if "|" not in token:
            assert frontend.sentences(f"Word {token} word.") == [f"Word {token} word."]
    with pytest.raises(RequestError):
        parse_words("no sign")

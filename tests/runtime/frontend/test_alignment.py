"""What was written stands beside what is spoken."""

import time

import pytest

from runtime.frontend.alignment import written_parts
from runtime.frontend.text import TextFrontend
from runtime.frontend.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def frontend(qwen: TextTokenizer) -> TextFrontend:
    return TextFrontend(qwen.count)


def test_each_sentence_keeps_its_own_words(frontend: TextFrontend) -> None:
    text = (
        "It costs 5 euros. [pause 1s] 你好，我有3个苹果。End at 10:30 p.m. [pause 1s] PyTorch (v2.1) is <b>nice</b> 🙂!"
    )
    pieces = frontend.pieces(text, words={"PyTorch": "pie torch"})
    assert [piece.written for piece in pieces] == [
        "It costs 5 euros.",
        "你好，我有3个苹果。End at 10:30 p.m.",
        "PyTorch (v2.1) is <b>nice</b> 🙂!",
    ]


@pytest.mark.parametrize(
    ("sentence", "stop"),
    [
        ("Dr. Smith paid $3.50 for item no. 12", "."),
        ("我有3个苹果和5个梨，共8元", "。"),
        ("On 5/6/2020 at 5 pm it was 20 °C and <3 m wide", "!"),
    ],
)
def test_every_sign_is_in_one_part_and_borders_lie_at_sentence_ends(
    frontend: TextFrontend, sentence: str, stop: str
) -> None:
    text = " ".join([sentence + stop] * 40)
    parts = [piece.written for piece in frontend.pieces(text)]
    assert len(parts) > 3 and " ".join(parts) == text
    assert all(part.startswith(sentence[:4]) and part.endswith(stop) for part in parts)


def test_lines_and_what_is_not_spoken_stay_with_their_neighbours(frontend: TextFrontend) -> None:
    lines = [f"This is line number {n} of the song\n***" for n in range(30)]
    parts = [piece.written for piece in frontend.pieces("\n".join(lines))]
    assert "\n".join(parts).split() == "\n".join(lines).split()
    assert len(parts) > 1


def test_a_part_is_found_for_words_that_have_nothing_in_common() -> None:
    assert written_parts("a b c", ["x y.", "z."]) in (["a b c", ""], ["", "a b c"])
    assert written_parts("", ["x."]) == [""]
    assert written_parts("one", ["one.", "two.", "three."])[0] == "one"


@pytest.mark.parametrize("text", ["word " * 10_000, "我有3个苹果，" * 4000, "a b. " * 10_000])
def test_a_book_is_aligned_in_no_time(frontend: TextFrontend, text: str) -> None:
    texts = frontend.sentences(text, normalize=False)
    began = time.perf_counter()
    parts = written_parts(text, texts)
    assert time.perf_counter() - began < 3 and all(parts)

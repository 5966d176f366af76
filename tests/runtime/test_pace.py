"""How long a text takes to say, and when speech does not fit it."""

import pytest

from runtime import RequestError, SpeechRequest, SpokenSentence, expected_seconds
from runtime.pace import fits


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("希望你以后能够做的比我还好呦。", 3.5),  # of the prompt clip, as it was read
        (
            "And so, my fellow Americans, ask not what your country can do for you, "
            "ask what you can do for your country.",
            11.0,
        ),
        ("", 0.0),
    ],
)
def test_real_readings_fit_their_estimate(text: str, seconds: float) -> None:
    assert fits(seconds, expected_seconds(text))


def test_pronunciations_and_speed_count() -> None:
    assert expected_seconds("[h][áng]") == pytest.approx(0.2)
    assert expected_seconds("word " * 20, speed=2) == expected_seconds("word " * 20) / 2


@pytest.mark.parametrize("expected", [3.0, 8.0, 20.0])
def test_half_the_words_or_all_of_them_twice_are_noticed(expected: float) -> None:
    assert fits(expected, expected) and not fits(0.3 * expected, expected) and not fits(2.4 * expected, expected)


def test_a_sentence_is_judged_once_it_is_complete() -> None:
    sentence = SpokenSentence("text", 5.0, 24_000, samples=24_000)
    assert not sentence.odd_length
    sentence.complete = True
    assert sentence.odd_length
    sentence.samples = 5 * 24_000
    assert not sentence.odd_length


def test_a_plan_is_what_is_spoken_afterwards(engine, voice):
    request = SpeechRequest(
        reference=voice, text="It costs 5 euros. [pause 1s] 你好 PyTorch [pause 2s]", words={"PyTorch": "pie torch"}
    )
    plan = engine.plan(request)
    speech = engine.prepare(request)
    assert [(each.text, each.pause_before_seconds) for each in plan.sentences] == [
        (each.text, each.pause_before_seconds) for each in speech.sentences
    ]
    assert "five euros" in plan.sentences[0].text and "pie torch" in plan.sentences[1].text
    assert plan.expected_seconds == pytest.approx(sum(each.expected_seconds for each in speech.sentences) + 3.0)
    assert plan.mode is request.mode and plan.warnings == speech.warnings


def test_a_plan_tells_what_cannot_be_spoken(engine, voice):
    for wrong in ({"text": "..."}, {"text": "a", "instruction": "word " * 100}, {"text": "a", "speed": 9.0}):
        with pytest.raises(RequestError):
            engine.plan(SpeechRequest(reference=voice, **wrong))
    assert engine.plan(SpeechRequest(reference=voice, source=voice)).expected_seconds == pytest.approx(1.2)

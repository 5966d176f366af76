"""What the front end lays out for each mode, and where the two fidelities part."""

import dataclasses

import pytest
import torch

from runtime import AudioClip, EngineSettings, Mode, RequestError, SpeechRequest
from runtime.frontend.prepare import Frontend
from runtime.frontend.tokenizer import TextTokenizer

PREFIX = "You are a helpful assistant.<|endofprompt|>"
TEXT = "Good morning, dear neighbours."


@pytest.fixture(scope="module")
def frontend(tiny_checkpoint):
    return Frontend(tiny_checkpoint, EngineSettings(), torch.device("cpu"))


@pytest.fixture(scope="module")
def official(tiny_checkpoint):
    return Frontend(tiny_checkpoint, EngineSettings(fidelity="official"), torch.device("cpu"))


@pytest.fixture(scope="module")
def encode(tiny_checkpoint):
    return TextTokenizer(tiny_checkpoint.text_folder).encode


def prepare(frontend, voice, **fields):
    return frontend.prepare(SpeechRequest(**{"reference": voice, "text": TEXT} | fields))


def only(speech):
    (sentence,) = speech.sentences
    return sentence.prompt


def test_zero_shot_reads_prefix_transcript_text_and_the_reference_tokens(frontend, voice, encode):
    speech = prepare(frontend, voice, transcript="A clip.")
    prompt = only(speech)
    assert prompt.text_tokens.tolist() == encode(PREFIX + "A clip.") + encode(TEXT)
    assert torch.equal(prompt.speech_tokens, speech.reference.speech_tokens)
    assert (prompt.min_tokens, prompt.max_tokens) == (2 * len(encode(TEXT)), 20 * len(encode(TEXT)))


def test_instruct_puts_the_instruction_before_the_marker(frontend, voice, encode):
    prompt = only(prepare(frontend, voice, instruction="Please speak slowly."))
    instruction = "You are a helpful assistant. Please speak slowly.<|endofprompt|>"
    assert prompt.text_tokens.tolist() == encode(instruction) + encode(TEXT)
    assert len(prompt.speech_tokens) == 0


def test_cross_lingual_limits_count_after_the_marker(frontend, voice, encode):
    prompt = only(prepare(frontend, voice))
    assert prompt.text_tokens.tolist() == encode(PREFIX) + encode(TEXT)
    assert (prompt.min_tokens, prompt.max_tokens) == (2 * len(encode(TEXT)), 20 * len(encode(TEXT)))


@pytest.mark.parametrize("text", ["Go.", "Stop.", "好。"])
def test_a_single_syllable_may_take_two_seconds_at_most(frontend, official, voice, encode, text):
    """Input 8. The limit of the reference counts text tokens, of which even so short a text has several."""
    prompt = only(prepare(frontend, voice, text=text, transcript="A clip."))
    assert prompt.min_tokens < prompt.max_tokens == min(50, 20 * len(encode(text)))
    assert only(prepare(official, voice, text=text, transcript="A clip.")).max_tokens == 20 * len(encode(text))


def test_official_cross_lingual_is_one_piece_whose_prefix_counts(official, voice, encode):
    text = " ".join([TEXT] * 20) + " 305 pears"
    prompt = only(prepare(official, voice, text=text))
    assert prompt.text_tokens.tolist() == encode(PREFIX + text)
    assert prompt.max_tokens == 20 * len(encode(PREFIX + text))


def test_official_leaves_the_transcript_as_it_is(official, voice, encode):
    prompt = only(prepare(official, voice, transcript="I have 2 pears"))
    assert prompt.text_tokens.tolist()[: len(encode(PREFIX + "I have 2 pears"))] == encode(PREFIX + "I have 2 pears")


def test_intended_normalises_and_splits_cross_lingual_text(frontend, voice, encode):
    speech = prepare(frontend, voice, text=" ".join([TEXT] * 20) + " I have 305 pears.")
    assert len(speech.sentences) > 1
    assert "three hundred" in speech.sentences[-1].text
    for sentence in speech.sentences:
        assert sentence.prompt.text_tokens.tolist()[: len(encode(PREFIX))] == encode(PREFIX)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": PREFIX + TEXT},
        {"transcript": PREFIX + "A clip."},
        {"instruction": "Please speak slowly.<|endofprompt|>"},
        {"instruction": "You are a helpful assistant. Please speak slowly.<|endofprompt|>"},
    ],
)
def test_a_marker_that_the_user_brings_is_not_doubled(frontend, voice, fields):
    """Trap 69."""
    pasted = only(prepare(frontend, voice, **fields))
    plain = only(
        prepare(frontend, voice, **{k: v.replace(PREFIX, "").replace("<|endofprompt|>", "") for k, v in fields.items()})
    )
    assert pasted.text_tokens.tolist() == plain.text_tokens.tolist()
    assert pasted.text_tokens.tolist().count(frontend._tokenizer.end_of_prompt) == 1


@pytest.mark.parametrize("field", ["text", "transcript", "instruction"])
def test_two_markers_are_refused(frontend, voice, field):
    """Trap 69."""
    with pytest.raises(RequestError, match="endofprompt"):
        prepare(frontend, voice, **{field: "a<|endofprompt|>b<|endofprompt|>c"})


def test_tokens_and_mel_of_a_reference_are_aligned(frontend, voice):
    for seconds in (0.6, 1.0, 1.03):
        clip = AudioClip(voice.samples[: int(seconds * voice.sample_rate)], voice.sample_rate)
        reference = prepare(frontend, clip).reference
        assert len(reference.mel) == 2 * len(reference.speech_tokens) > 0
        assert reference.speaker.shape == (192,)


def test_voice_conversion_aligns_unless_official(frontend, official, voice):
    """Spec 9.21."""
    clip = AudioClip(voice.samples[:15000], voice.sample_rate)  # 31 frames, 16 tokens
    fields = {"text": "", "source": voice}
    assert len(prepare(frontend, clip, **fields).reference.mel) == 30
    untouched = prepare(official, clip, **fields).reference
    assert (len(untouched.mel), len(untouched.speech_tokens)) == (31, 16)


def test_a_voice_is_prepared_once(frontend, voice):
    """Trap 63 has its own tests beside the cache; here: the cache is in use."""
    first = prepare(frontend, voice).reference
    assert prepare(frontend, dataclasses.replace(voice, samples=voice.samples.copy()), text="Other.").reference is first
    assert prepare(frontend, AudioClip(voice.samples * 0.9, voice.sample_rate)).reference is not first


def test_the_callers_array_is_not_kept(frontend, voice):
    """Trap 64."""
    mine = voice.samples.copy()
    before = prepare(frontend, AudioClip(mine, voice.sample_rate)).reference.mel.clone()
    mine[:] = 0.5
    assert torch.equal(prepare(frontend, voice).reference.mel, before)


def test_mode_follows_from_what_is_given(voice):
    assert SpeechRequest(reference=voice, text=TEXT).mode is Mode.CROSS_LINGUAL
    assert SpeechRequest(reference=voice, text=TEXT, transcript=" ").mode is Mode.CROSS_LINGUAL
    assert SpeechRequest(reference=voice, text=TEXT, transcript="A clip.").mode is Mode.ZERO_SHOT
    assert SpeechRequest(reference=voice, source=voice).mode is Mode.CONVERSION

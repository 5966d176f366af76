"""What the flow remembers: never a word of sound changes by it, and its memory is bounded."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import Tensor

from runtime.frontend.reference_cache import clip_key
from runtime.stage1.decoder import Stage1
from runtime.stage1.past import Past, PastBlock, StreamBudget, VoiceCache
from runtime.types import AudioClip, PreparedReference
from tests import golden
from tests.runtime.stage1.tiny_flow import prepared, tiny_flow, tiny_solver, tiny_stage1

CLOSE = {"atol": 1e-5, "rtol": 0}  # asked for: 1e-3


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return golden.load("stream_io")["token"][0].long()


@pytest.fixture(scope="module")
def reference() -> PreparedReference:
    io = golden.load("stream_io")
    return prepared(io["prompt_token"], io["prompt_feat"], io["embedding"])


def another(reference: PreparedReference, name: str) -> PreparedReference:
    return dataclasses.replace(reference, speaker=reference.speaker.flip(0), mel=reference.mel.flip(0), key=name)


def hops(stage1: Stage1, voice: PreparedReference, tokens: Tensor, keep: bool = False) -> list[Tensor]:
    """The mels of two hops and of the end."""
    state = stage1.open(voice)
    ends = [(48, False), (98, False), (120, True)]
    return [stage1.new_mel(state, tokens[:end], is_last=is_last, keep=keep) for end, is_last in ends]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for mel, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mel, other, **CLOSE)


def prompt_bytes(frames: int = 50) -> int:
    return tiny_solver(tiny_flow()).past_bytes(frames)


def past(frames: int) -> Past:
    return Past(tuple(PastBlock(torch.zeros(1, 1, 2, 50, 8), torch.zeros(1, 2, 2, 0, 4)) for _ in range(frames // 50)))


def test_hops_of_a_known_voice_equal_those_of_an_unknown_one(reference: PreparedReference, tokens: Tensor) -> None:
    plain, forgetful, stage1 = tiny_stage1(estimator="torch"), tiny_stage1(voice_kv_bytes=0), tiny_stage1()
    expected = hops(plain, reference, tokens)
    for _ in range(2):
        assert_same(hops(stage1, reference, tokens), expected)
        assert_same(hops(forgetful, reference, tokens), expected)
    assert (stage1.voices.hits, stage1.voices.misses, len(stage1.voices)) == (3, 1, 1)
    assert forgetful.voices.hits == len(forgetful.voices) == len(plain.voices) == 0


def test_the_full_last_chunk_reads_everything_again(reference: PreparedReference, tokens: Tensor) -> None:
    stage1 = tiny_stage1()
    hops(stage1, reference, tokens)
    asked = stage1.voices.hits + stage1.voices.misses
    stage1.new_mel(stage1.open(reference), tokens, is_last=True)
    assert stage1.voices.hits + stage1.voices.misses == asked


def test_a_last_chunk_under_the_chunk_mask_uses_what_is_kept(reference: PreparedReference, tokens: Tensor) -> None:
    expected = hops(tiny_stage1("chunked", estimator="torch"), reference, tokens)
    stage1 = tiny_stage1("chunked")
    assert_same(hops(stage1, reference, tokens), expected)
    assert stage1.voices.hits == 2


@pytest.mark.parametrize("budget", [1, prompt_bytes() - 1])
def test_a_voice_that_does_not_fit_is_computed_again(reference: PreparedReference, tokens: Tensor, budget: int) -> None:
    """Trap 45: same sound to the bit, no failure, and it can be seen."""
    stage1 = tiny_stage1(voice_kv_bytes=budget)
    for mel, kept in zip(hops(stage1, reference, tokens), hops(tiny_stage1(), reference, tokens), strict=True):
        assert torch.equal(mel, kept)
    assert stage1.voices.refusals == stage1.voices.misses == 2
    assert stage1.voices.num_bytes == stage1.voices.hits == 0


def test_voices_that_push_each_other_out_between_hops_sound_the_same(
    reference: PreparedReference, tokens: Tensor
) -> None:
    """Trap 66, and interleaved streams: there is room for one voice, and three take turns."""
    voices = [reference, another(reference, "second"), another(reference, "third")]
    voices[2] = dataclasses.replace(voices[2], speaker=reference.speaker)
    plain, stage1 = tiny_stage1(estimator="torch"), tiny_stage1(voice_kv_bytes=prompt_bytes())
    expected = [hops(plain, voice, tokens) for voice in voices]
    states = [stage1.open(voice) for voice in voices]
    for turn, (end, is_last) in enumerate([(48, False), (98, False), (120, True)]):
        for state, mels in zip(states, expected, strict=True):
            mel = stage1.new_mel(state, tokens[:end], is_last=is_last)
            torch.testing.assert_close(mel, mels[turn], **CLOSE)
    assert stage1.voices.evictions == 5 and len(stage1.voices) == 1
    assert stage1.voices.num_bytes == prompt_bytes()


@pytest.mark.parametrize(("prompt", "frames"), [(1, 0), (3, 0), (27, 0), (28, 50), (52, 50), (53, 100), (87, 150)])
def test_only_blocks_that_no_generated_token_reaches_are_kept(
    reference: PreparedReference, tokens: Tensor, prompt: int, frames: int
) -> None:
    """The last three tokens of the prompt look into the text."""
    voice = PreparedReference(
        speech_tokens=reference.speech_tokens.repeat(3)[:prompt],
        mel=reference.mel.repeat(3, 1)[: 2 * prompt],
        speaker=reference.speaker,
        key="short",
    )
    stage1, plain = tiny_stage1(), tiny_stage1(estimator="torch")
    end = 25 + -prompt % 25
    for text in (tokens, tokens.flip(0)):
        mel = stage1.new_mel(stage1.open(voice), text[: end + 3], is_last=False)
        torch.testing.assert_close(mel, plain.new_mel(plain.open(voice), text[: end + 3], is_last=False), **CLOSE)
    assert stage1.voices.num_bytes == (prompt_bytes(frames) if frames else 0)
    assert stage1.voices.hits == (1 if frames else 0)


def test_a_mel_shorter_than_its_tokens_is_not_remembered_beyond_its_end(
    reference: PreparedReference, tokens: Tensor
) -> None:
    """Voice conversion may bring such a prompt, whose last frames are already speech."""
    voice = dataclasses.replace(reference, mel=reference.mel[:49], key="49 frames")
    stage1 = tiny_stage1()
    hops(stage1, voice, tokens)
    assert not len(stage1.voices)


def test_a_broken_solve_leaves_nothing_behind(reference: PreparedReference, tokens: Tensor) -> None:
    flow = tiny_flow()
    flow.estimator.proj_out.bias[3] = torch.nan
    stage1 = tiny_stage1(flow=flow)
    with pytest.raises(Exception, match="NaN"):
        stage1.new_mel(stage1.open(reference), tokens[:48], is_last=False)
    assert not len(stage1.voices)


def test_one_changed_sample_is_another_voice(voice: AudioClip) -> None:
    """Trap 63: the key under which a past is kept is that of the samples, not of the words."""
    changed = voice.samples.copy()
    changed[100] += 1e-3
    assert clip_key(voice, "model") != clip_key(AudioClip(changed, voice.sample_rate), "model")
    assert clip_key(voice, "model") != clip_key(voice, "another model")


def test_the_least_recently_used_voice_goes_first() -> None:
    cache = VoiceCache(3 * past(50).num_bytes)
    for name in "abc":
        cache.put(name, past(50))
    assert cache.get("a") is not None
    cache.put("d", past(50))
    assert cache.get("b") is None and all(cache.get(name) for name in "acd")
    assert cache.num_bytes == cache.limit_bytes and cache.evictions == 1


def test_room_is_made_before_a_past_is_computed() -> None:
    cache = VoiceCache(2 * past(50).num_bytes)
    cache.put("a", past(50))
    cache.put("b", past(50))
    assert cache.make_room(past(50).num_bytes) and len(cache) == 1
    assert not cache.make_room(past(150).num_bytes) and len(cache) == 1


def test_a_voice_solved_twice_at_once_is_kept_once() -> None:
    cache = VoiceCache(1000 * past(50).num_bytes)
    cache.put("a", past(50))
    cache.put("a", past(50))
    assert cache.num_bytes == past(50).num_bytes


def test_a_voice_pushed_out_is_freed() -> None:
    cache = VoiceCache(past(50).num_bytes)
    first = past(50)
    cache.put("a", first)
    gone = weakref.ref(first)
    del first
    cache.put("b", past(50))
    gc.collect()
    assert gone() is None


# Hops of one stream


def test_a_stream_that_hops_again_solves_its_new_frames_alone(
    reference: PreparedReference, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage1, solved = tiny_stage1("chunked"), []
    solve = stage1._solver.solve
    monkeypatch.setattr(
        stage1._solver, "solve", lambda pieces: solved.extend(piece.frames for piece in pieces) or solve(pieces)
    )
    found = hops(stage1, reference, tokens, keep=True)
    assert solved == [50, 100, 100, 50]  # the prompt, two hops, and an end under the chunk mask
    monkeypatch.undo()
    assert_same(found, hops(tiny_stage1("chunked", estimator="torch"), reference, tokens))


@pytest.mark.parametrize("rooms", [1, 150, 250])
def test_streams_that_do_not_fit_are_computed_again(reference: PreparedReference, tokens: Tensor, rooms: int) -> None:
    """Trap 45. There is room for no hop, for the first only, and for the first of one stream beside another's."""
    expected = hops(tiny_stage1(estimator="torch"), reference, tokens)
    stage1 = tiny_stage1(stream_kv_bytes=prompt_bytes(rooms))
    states = [stage1.open(reference) for _ in range(2)]
    for turn, (end, is_last) in enumerate([(48, False), (98, False), (120, True)]):
        for state in states:
            mel = stage1.new_mel(state, tokens[:end], is_last=is_last, keep=True)
            torch.testing.assert_close(mel, expected[turn], **CLOSE)
            assert stage1.streams.num_bytes <= stage1.streams.limit_bytes
    assert stage1.streams.refusals > 0 and stage1.streams.num_bytes == 0


def test_a_stream_that_ends_or_is_dropped_gives_back_its_share(reference: PreparedReference, tokens: Tensor) -> None:
    stage1 = tiny_stage1()
    ended, dropped = stage1.open(reference), stage1.open(reference)
    for state in (ended, dropped):
        stage1.new_mel(state, tokens[:48], is_last=False, keep=True)
    assert stage1.streams.num_bytes == 2 * prompt_bytes(100)  # the voice's own 50 are counted with it
    stage1.new_mel(ended, tokens, is_last=True)
    assert ended.past is None and stage1.streams.num_bytes > 0
    gone = weakref.ref(dropped.past)
    del state, dropped
    gc.collect()
    assert gone() is None and stage1.streams.num_bytes == 0


def test_a_share_may_grow_only_beside_those_of_others() -> None:
    """It grows by what is new: the blocks of the past stay where they are."""

    class Owner:
        pass

    budget, owner = StreamBudget(100), Owner()
    other = Owner()
    assert budget.claim(owner, 40) and budget.claim(other, 30) and budget.claim(owner, 70) and budget.num_bytes == 100
    assert not budget.claim(owner, 71) and budget.num_bytes == 100
    budget.release(owner)
    budget.release(owner)
    assert budget.num_bytes == 30

"""Streams through the vocoder, with the plain modules and with windows laid end to end."""

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from runtime.errors import GenerationError
from runtime.stage1.hift import HiFT
from runtime.stage1.noise import NoiseBank
from runtime.stage1.vocoder import HiFTRunner, MelChunk, PlainHiFT, Vocoder, packed_runner
from tests import golden
from tests.runtime.stage1 import tiny_hift


@pytest.fixture(scope="module")
def bank() -> NoiseBank:
    return NoiseBank(torch.device("cpu"))


RUNNERS: dict[str, Callable[[HiFT], HiFTRunner]] = {
    "plain": PlainHiFT,
    "packed": lambda hift: packed_runner(hift, torch.device("cpu")),
}


@pytest.fixture(scope="module")
def vocoder(bank: NoiseBank) -> Vocoder:
    return Vocoder(tiny_hift.hift(), bank)


@pytest.fixture(scope="module")
def lively(bank: NoiseBank) -> Vocoder:
    return Vocoder(tiny_hift.lively_hift(), bank)


@pytest.fixture(scope="module", params=RUNNERS)
def either(request: pytest.FixtureRequest, bank: NoiseBank) -> Vocoder:
    hift = tiny_hift.lively_hift()
    return Vocoder(hift, bank, RUNNERS[request.param](hift))


def whole(vocoder: Vocoder, mel: Tensor) -> Tensor:
    return vocoder.decode(vocoder.open(), mel, is_last=True)


def stream(vocoder: Vocoder, mel: Tensor, ends: Iterable[int]) -> list[Tensor]:
    """Chunks of a stream that is cut at the given frames; the last end has to be the last frame."""
    state, start, chunks = vocoder.open(), 0, []
    for end in ends:
        chunks.append(vocoder.decode(state, mel[:, start:end], is_last=False))
        start = end
    chunks.append(vocoder.decode(state, mel[:, start:], is_last=True))
    return chunks


def assert_same(chunks: list[Tensor], expected: Tensor) -> None:
    torch.testing.assert_close(torch.cat(chunks), expected, atol=1e-5, rtol=0)


def test_whole_utterance_matches_the_reference(vocoder: Vocoder) -> None:
    fixture = golden.load("hift_io")
    torch.testing.assert_close(whole(vocoder, fixture["mel"][0]), fixture["wav_final"][0], atol=1e-4, rtol=0)
    begun = vocoder.decode(vocoder.open(), fixture["mel"][0], is_last=False)
    torch.testing.assert_close(begun, fixture["wav_stream"][0], atol=1e-4, rtol=0)


def test_chunks_have_the_lengths_of_the_reference_and_join_to_its_samples(vocoder: Vocoder) -> None:
    fixture, chunked = golden.load("hift_io"), golden.meta("hift")["cases"]["chunked"]
    state, start, chunks = vocoder.open(), 0, []
    for end in chunked["mel_ends"]:
        is_last = end == chunked["mel_ends"][-1]
        chunks.append(vocoder.decode(state, fixture["mel"][0, :, start:end], is_last=is_last))
        start = end
    assert [len(chunk) for chunk in chunks] == chunked["emitted"]
    torch.testing.assert_close(torch.cat(chunks), fixture["wav_final"][0], atol=1e-4, rtol=0)


def test_official_stream_is_met_chunk_by_chunk(vocoder: Vocoder) -> None:
    fixture = golden.load("stream_io")
    chunks = stream(vocoder, fixture["first_request.final_mel"][0], (90, 190))
    for index, chunk in enumerate(chunks):
        expected = fixture[f"first_request.chunk{index}"][0] / 32767  # kept in 16 bits
        torch.testing.assert_close(chunk, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("hop", [1, 2, 5, 8, 9, 13, 29, 50, 100])
def test_any_hop_gives_the_whole(lively: Vocoder, hop: int) -> None:
    """Trap 50: f0 history, phase, noise and left context go on across the border."""
    frames = 80 + hop
    mel = tiny_hift.mel(frames)
    assert_same(stream(lively, mel, range(hop, frames, hop)), whole(lively, mel))


@pytest.mark.parametrize("hop", [9, 50, 100])
def test_windows_end_to_end_give_the_whole_too(either: Vocoder, hop: int) -> None:
    frames = 80 + hop
    mel = tiny_hift.mel(frames)
    assert_same(stream(either, mel, range(hop, frames, hop)), whole(either, mel))


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_the_whole(lively: Vocoder, seed: int) -> None:
    draw = random.Random(seed)
    frames = draw.randrange(1, 250)
    mel = tiny_hift.mel(frames, seed)
    ends = sorted(draw.choices(range(frames + 1), k=draw.randrange(1, 12)))  # empty chunks among them
    assert_same(stream(lively, mel, ends), whole(lively, mel))


def test_pitch_of_the_lively_net_moves_as_in_song(lively: Vocoder) -> None:
    """Guards the tests above: with a flat or silent f0 they would prove little."""
    (f0,) = lively._runner.pitch([tiny_hift.mel(140)], [True])
    assert f0.min() < 20 and f0.max() > 400


@pytest.mark.parametrize("frames", range(13))
@pytest.mark.parametrize("left", [0, 1, 3, 5])
def test_short_utterances_and_short_ends(lively: Vocoder, frames: int, left: int) -> None:
    """Trap 49: fewer than 8 frames, or none, in the last chunk, and utterances shorter than the look-ahead."""
    mel = tiny_hift.mel(frames)
    first, last = stream(lively, mel, [max(0, frames - left)])
    assert len(first) == max(0, frames - left - 8) * 480
    assert len(first) + len(last) == frames * 480
    if frames:
        assert_same([first, last], whole(lively, mel))


def together(vocoder: Vocoder, mels: list[Tensor], hop: int) -> list[list[Tensor]]:
    """Chunks of streams that hop at the same time until each has ended."""
    states, chunks = [vocoder.open() for _ in mels], [[] for _ in mels]
    for start in range(0, max(mel.shape[1] for mel in mels), hop):
        live = [index for index, state in enumerate(states) if not state.is_finished]
        outcomes = vocoder.decode_together(
            [
                MelChunk(
                    states[index], mels[index][:, start : start + hop], is_last=start + hop >= mels[index].shape[1]
                )
                for index in live
            ]
        )
        for index, samples in zip(live, outcomes, strict=True):
            assert isinstance(samples, Tensor)
            chunks[index].append(samples)
    return chunks


def signal_to_noise_db(samples: Tensor, expected: Tensor) -> float:
    noise = (samples - expected).square().mean().clamp(min=1e-20)
    return float(10 * torch.log10(expected.square().mean() / noise))


@pytest.mark.parametrize("hop", [20, 64])
def test_streams_in_company_sound_as_alone(either: Vocoder, hop: int) -> None:
    """Trap 52: rows of one call have their own lengths, ends, phases and places in the noise."""
    mels = [tiny_hift.mel(frames, seed) for seed, frames in enumerate((60, 95, 41, 5, 129, 20, 13, 8, 9))]
    for mel, heard in zip(mels, together(either, mels, hop), strict=True):
        alone = stream(either, mel, range(hop, mel.shape[1], hop))
        assert [len(chunk) for chunk in heard] == [len(chunk) for chunk in alone]
        assert signal_to_noise_db(torch.cat(heard), torch.cat(alone)) > 80


def test_order_and_company_of_a_call_do_not_matter(either: Vocoder) -> None:
    mels = [tiny_hift.mel(frames, seed) for seed, frames in enumerate((30, 45, 12, 70))]
    forth = together(either, mels, hop=25)
    back = together(either, mels[::-1], hop=25)[::-1]
    for one, other in zip(forth, back, strict=True):
        assert signal_to_noise_db(torch.cat(one), torch.cat(other)) > 80


def test_a_row_without_numbers_ends_alone(either: Vocoder) -> None:
    """Trap 43: the same call gives its neighbours what they get without it, and so does the next call."""
    mels = [tiny_hift.mel(40, seed) for seed in range(3)]
    broken = mels[1].clone()
    broken[:, 10:] = float("nan")
    calls = []
    for middle in (broken, mels[1]):
        chunks = [MelChunk(either.open(), mel, is_last=True) for mel in (mels[0], middle, mels[2])]
        calls.append(either.decode_together(chunks))
    first, error, last = calls[0]
    assert isinstance(error, GenerationError) and "not numbers" in str(error)
    assert torch.equal(first, calls[1][0]) and torch.equal(last, calls[1][2])
    assert calls[1][1].isfinite().all()


def test_streams_take_turns_without_meeting(lively: Vocoder) -> None:
    mels = [tiny_hift.mel(frames, seed) for seed, frames in enumerate((60, 95, 41))]
    states, chunks = [lively.open() for _ in mels], [[] for _ in mels]
    for start in range(0, 100, 20):
        for mel, state, heard in zip(mels, states, chunks, strict=True):
            if not state.is_finished:
                is_last = start + 20 >= mel.shape[1]
                heard.append(lively.decode(state, mel[:, start : start + 20], is_last=is_last))
    for mel, heard in zip(mels, chunks, strict=True):
        assert torch.equal(torch.cat(heard), torch.cat(stream(lively, mel, range(20, mel.shape[1], 20))))


def test_a_long_stream_keeps_a_short_window(vocoder: Vocoder) -> None:
    state, kept = vocoder.open(), vocoder.context_frames + vocoder.delay_frames
    for _ in range(12):
        vocoder.decode(state, tiny_hift.mel(25), is_last=False)
        assert state.mel.shape[1] <= kept
        assert len(state.source) <= kept * 480
    assert state.frames == 300


def test_making_a_vocoder_leaves_the_module_as_it_was(bank: NoiseBank) -> None:
    """Spec 5.5: the reference turns its f0 net into float64 for good."""
    hift = tiny_hift.hift()
    whole(Vocoder(hift, bank), tiny_hift.mel(20))
    after = hift.state_dict()
    assert after.keys() == tiny_hift.weights().keys()
    assert all(torch.equal(after[name], value) for name, value in tiny_hift.weights().items())
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in hift.parameters())


def test_same_samples_in_each_run(lively: Vocoder) -> None:
    """Trap 51: nothing is drawn, so nothing depends on what ran before."""
    mel = tiny_hift.mel(30)
    first = whole(lively, mel)
    torch.rand(7)
    assert torch.equal(whole(lively, mel), first)


def test_mel_that_is_no_number_ends_the_stream_with_a_named_error(vocoder: Vocoder) -> None:
    """Trap 54."""
    mel = tiny_hift.mel(30)
    mel[40, 20] = float("nan")
    with pytest.raises(GenerationError, match="not numbers"):
        whole(vocoder, mel)
    assert whole(vocoder, tiny_hift.mel(30)).isfinite().all()


def test_loud_samples_are_cut_and_counted(vocoder: Vocoder) -> None:
    """Trap 54; the fixture's share of clipped samples is known."""
    expected = golden.load("hift_io")
    state = vocoder.open()
    samples = torch.cat(
        [
            vocoder.decode(state, expected["mel"][0, :, :25], is_last=False),
            vocoder.decode(state, expected["mel"][0, :, 25:], is_last=True),
        ]
    )
    assert samples.abs().max() == pytest.approx(0.99)
    share = golden.meta("hift")["cases"]["wav"]["fraction_at_clamp"]
    assert state.clipped == round(share * samples.numel()) > 0


def test_half_precision_mel_is_widened_at_the_door(vocoder: Vocoder) -> None:
    mel = tiny_hift.mel(20).bfloat16()
    assert whole(vocoder, mel).dtype == torch.float32
    assert torch.equal(whole(vocoder, mel), whole(vocoder, mel.float()))

"""Stage 1 as its caller meets it: what it accepts, what it refuses and how it says so.

Trap 26: a reference holds its own length and nothing is padded on the way to the flow; `test_solver.py` covers masks.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.checkpoint import Checkpoint
from runtime.config import LMConfig, MelConfig, ModelConfig, QwenConfig, RasConfig
from runtime.errors import CheckpointError, GenerationError
from runtime.settings import EngineSettings
from runtime.stage1.base import build_stage1
from runtime.stage1.decoder import Stage1
from runtime.stage1.solver import Piece, Solved
from runtime.stage1.state import Chunk
from runtime.types import PreparedReference
from tests import golden
from tests.runtime.stage1 import tiny_hift
from tests.runtime.stage1.tiny_flow import (
    CPU,
    flow_config,
    flow_weights,
    prepared,
    tiny_flow,
    tiny_stage1,
)


@pytest.fixture(scope="module")
def stage1() -> Stage1:
    return tiny_stage1()


@pytest.fixture(scope="module")
def reference() -> PreparedReference:
    io = golden.load("stream_io")
    return prepared(io["prompt_token"], io["prompt_feat"], io["embedding"])


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return golden.load("stream_io")["token"][0].long()


def spoken(stage1: Stage1, reference: PreparedReference, tokens: Tensor) -> Tensor:
    return stage1.decode(stage1.open(reference), tokens, is_last=True)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_a_short_segment_is_spoken_whole(
    stage1: Stage1, reference: PreparedReference, tokens: Tensor, count: int
) -> None:
    """Traps 35 and 49: fewer tokens than the look-ahead, fewer frames than the vocoder's delay, or none."""
    samples = spoken(stage1, reference, tokens[:count])
    assert samples.shape == (960 * count,) and samples.dtype == torch.float32 and samples.device == CPU


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_chunk_within_the_lookahead_is_silent_and_harmless(
    stage1: Stage1, reference: PreparedReference, tokens: Tensor, count: int
) -> None:
    """Traps 35 and 49."""
    state = stage1.open(reference)
    assert not len(stage1.decode(state, tokens[:count], is_last=False))
    assert torch.equal(stage1.decode(state, tokens[:20], is_last=True), spoken(stage1, reference, tokens[:20]))


def test_a_last_chunk_without_new_tokens_flushes_the_vocoder(
    stage1: Stage1, reference: PreparedReference, tokens: Tensor
) -> None:
    state = stage1.open(reference)
    first = stage1.decode(state, tokens[:48], is_last=False)
    rest = stage1.decode(state, tokens[:45], is_last=True)
    assert len(first) == (90 - 8) * 480 and len(rest) == 8 * 480


@pytest.mark.parametrize("illegal", [-1, 6561, 6760])
def test_a_token_outside_the_codebook_never_reaches_the_table(
    stage1: Stage1, reference: PreparedReference, tokens: Tensor, illegal: int
) -> None:
    """Trap 27, last line of defence: the engine filters such tokens before."""
    broken = torch.cat((tokens[:10], torch.tensor([illegal])))
    with pytest.raises(GenerationError, match=str(illegal)):
        spoken(stage1, reference, broken)
    with pytest.raises(GenerationError, match=str(illegal)):
        stage1.open(dataclasses.replace(reference, speech_tokens=broken))


@pytest.mark.parametrize(
    "missing",
    [
        {"mel": torch.empty(0, 80)},
        {"mel": torch.zeros(60, 79)},
        {"mel": torch.zeros(1, 60, 80)},
        {"speaker": torch.empty(0)},
        {"speaker": torch.zeros(1, 192)},
        {"speech_tokens": torch.empty(0, dtype=torch.long)},
    ],
)
def test_a_missing_part_of_the_voice_is_an_error(
    stage1: Stage1, reference: PreparedReference, missing: dict[str, Tensor]
) -> None:
    """Trap 24: never silently the voice of nobody."""
    with pytest.raises(GenerationError, match="shape"):
        stage1.open(dataclasses.replace(reference, **missing))


def test_bfloat16_conditioning_is_cast_once_at_the_door(
    stage1: Stage1, reference: PreparedReference, tokens: Tensor
) -> None:
    """Trap 23."""
    half = dataclasses.replace(reference, mel=reference.mel.bfloat16(), speaker=reference.speaker.bfloat16())
    widened = dataclasses.replace(half, mel=half.mel.float(), speaker=half.speaker.float())
    assert torch.equal(spoken(stage1, half, tokens[:20]), spoken(stage1, widened, tokens[:20]))


def test_the_shared_voice_is_not_written_to(stage1: Stage1, reference: PreparedReference, tokens: Tensor) -> None:
    before = reference.mel.clone()
    spoken(stage1, reference, tokens[:10])
    assert torch.equal(reference.mel, before)


def test_a_segment_beyond_the_noise_is_refused_with_numbers(stage1: Stage1, reference: PreparedReference) -> None:
    """Trap 44. What fits is known beforehand, so that the engine can split."""
    room = stage1.capacity_tokens(reference)
    assert room == 7500 - 30
    state = stage1.open(reference)
    with pytest.raises(GenerationError, match=rf"{room + 1} speech tokens .* 15000 frames; {room} fit"):
        stage1.decode(state, torch.zeros(room + 1, dtype=torch.long), is_last=True)


def test_a_cut_off_the_grid_is_refused(stage1: Stage1, reference: PreparedReference, tokens: Tensor) -> None:
    """Trap 34: half a block would sound other than in one pass."""
    with pytest.raises(GenerationError, match=r"multiple of 25 tokens .* not at 55"):
        stage1.decode(stage1.open(reference), tokens[:28], is_last=False)


@pytest.mark.parametrize("extra", [-3, -1, 1, 3])
def test_a_prompt_that_is_not_aligned_shifts_what_is_generated(
    stage1: Stage1, reference: PreparedReference, tokens: Tensor, extra: int
) -> None:
    """Voice conversion by the reference's own rule: frames are counted behind the prompt mel (spec 9.21)."""
    mel = torch.cat((reference.mel, reference.mel))[: 60 + extra]
    voice = dataclasses.replace(reference, mel=mel, key=f"{extra} frames more")
    assert len(spoken(stage1, voice, tokens)) == (240 - extra) * 480
    state = stage1.open(voice)
    assert not len(stage1.decode(state, tokens[:3], is_last=False))
    parts = [stage1.decode(state, tokens[:48], is_last=False), stage1.decode(state, tokens, is_last=True)]
    assert sum(map(len, parts)) == (240 - extra) * 480


def test_chunked_attention_at_the_end_is_asked_for_and_told(reference: PreparedReference, tokens: Tensor) -> None:
    """Trap 46."""
    official, causal = tiny_stage1(), tiny_stage1("chunked")
    assert official.describe()["attention of the last chunk"] == "full"
    assert "not the official" in causal.describe()["attention of the last chunk"]
    full, chunked = (part.new_mel(part.open(reference), tokens, is_last=True) for part in (official, causal))
    assert (full - chunked).abs().max() > 0.01


def test_nan_in_the_mel_ends_the_segment_by_name(reference: PreparedReference, tokens: Tensor) -> None:
    """Trap 54; NaN in the waveform is the vocoder's part."""
    flow = tiny_flow()
    flow.estimator.proj_out.bias[3] = torch.nan
    with pytest.raises(GenerationError, match="the flow gave NaN"):
        spoken(tiny_stage1(flow=flow), reference, tokens[:10])


def test_one_broken_voice_leaves_the_next_alone(stage1: Stage1, reference: PreparedReference, tokens: Tensor) -> None:
    before = spoken(stage1, reference, tokens[:20])
    with pytest.raises(GenerationError):
        spoken(stage1, dataclasses.replace(reference, speaker=torch.full((192,), torch.nan)), tokens[:20])
    assert torch.equal(spoken(stage1, reference, tokens[:20]), before)


def test_chunks_of_several_segments_are_solved_together_and_fail_apart(
    stage1: Stage1, reference: PreparedReference, tokens: Tensor
) -> None:
    """Trap 52: finals and hops, long, short and empty ones, and two that cannot be."""
    wanted = [(tokens, True), (tokens[:48], False), (tokens[:0], True), (tokens[:2], False), (tokens[:7], True)]
    bad = dataclasses.replace(reference, speaker=torch.full((192,), torch.nan), key="bad")
    chunks = [Chunk(stage1.open(reference), some, is_last) for some, is_last in wanted]
    chunks.insert(1, Chunk(stage1.open(reference), torch.tensor([6561]), True))
    chunks.insert(3, Chunk(stage1.open(bad), tokens, True))
    outcomes = stage1.decode_together(chunks)
    failures = [outcomes.pop(3), outcomes.pop(1)]
    assert all(isinstance(failure, GenerationError) for failure in failures)
    for outcome, (some, is_last) in zip(outcomes, wanted, strict=True):
        alone = stage1.decode(stage1.open(reference), some, is_last=is_last)
        assert isinstance(outcome, Tensor) and outcome.shape == alone.shape
        if len(alone):
            assert (outcome - alone).square().mean() < 1e-4 * alone.square().mean()  # 40 dB; float32 phase (spec 5.2)


def test_a_solve_that_fails_ends_only_those_it_fails_for_alone(
    reference: PreparedReference, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What breaks a group, say for want of memory, may be one long piece."""
    stage1 = tiny_stage1()
    solve = stage1._solver.solve

    def scarce(pieces: list[Piece]) -> list[Solved]:
        if sum(piece.frames for piece in pieces) > 150:
            raise torch.OutOfMemoryError("out of memory")
        return solve(pieces)

    monkeypatch.setattr(stage1._solver, "solve", scarce)
    lengths = (20, 100, 30)
    outcomes = stage1.decode_together([Chunk(stage1.open(reference), tokens[:count], True) for count in lengths])
    assert isinstance(outcomes[1], torch.OutOfMemoryError)
    for count, outcome in ((20, outcomes[0]), (30, outcomes[2])):
        assert isinstance(outcome, Tensor) and torch.equal(outcome, spoken(tiny_stage1(), reference, tokens[:count]))


def test_new_voices_of_a_group_are_solved_together_and_each_once(
    reference: PreparedReference, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage1, solved = tiny_stage1(), []
    solve = stage1._solver.solve
    monkeypatch.setattr(stage1._solver, "solve", lambda pieces: solved.append(len(pieces)) or solve(pieces))
    voices = [dataclasses.replace(reference, key=name) for name in ("a", "b", "a")]
    broken = dataclasses.replace(reference, key="c", mel=torch.full_like(reference.mel, torch.nan))
    chunks = [Chunk(stage1.open(voice), tokens[:48], False) for voice in (*voices, broken)]
    outcomes = stage1.decode_together(chunks)
    assert solved == [3, 3]
    assert all(isinstance(outcome, Tensor) for outcome in outcomes[:3]) and "NaN" in str(outcomes[3])
    assert len(stage1.voices) == 2


def model_config() -> ModelConfig:
    qwen = QwenConfig(512, 64, 128, 2, 4, 2, 1024, 1e6, 1e-6)
    return ModelConfig(
        sample_rate=24_000,
        token_rate=25,
        speaker_dim=192,
        chunk_tokens=25,
        lm=LMConfig(qwen, 6561, 200, RasConfig(0.8, 25, 10, 0.1)),
        flow=flow_config(),
        hift=tiny_hift.config(),
        mel=MelConfig(1920, 480, 1920, 80, 24_000, 0.0, None),
        silent_tokens=frozenset(),
    )


def test_stage1_is_built_from_a_folder_as_the_settings_say(
    tmp_path: Path, stage1: Stage1, reference: PreparedReference, tokens: Tensor
) -> None:
    save_file(flow_weights(), tmp_path / "flow.safetensors")
    save_file(tiny_hift.weights(), tmp_path / "hift.safetensors")
    checkpoint = Checkpoint(tmp_path, model_config(), "llm", "")
    built = build_stage1(checkpoint, EngineSettings(), CPU)
    assert built.describe() == stage1.describe()
    expected = spoken(stage1, reference, tokens[:20])
    assert torch.equal(spoken(built, reference, tokens[:20]), expected)
    half = build_stage1(checkpoint, EngineSettings(flow_precision="bfloat16"), CPU)
    assert half.describe()["flow precision"] == "bfloat16"
    assert spoken(half, reference, tokens[:20]).shape == expected.shape


def test_a_checkpoint_of_another_noise_shape_is_refused(tmp_path: Path) -> None:
    config = model_config()
    other = dataclasses.replace(config, hift=dataclasses.replace(config.hift, harmonics=4))
    with pytest.raises(CheckpointError, match="5 harmonics"):
        build_stage1(Checkpoint(tmp_path, other, "llm", ""), EngineSettings(), CPU)

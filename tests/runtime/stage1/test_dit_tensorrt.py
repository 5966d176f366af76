"""TensorRT as the flow's estimator, over a stand-in that computes the exported graph from raw addresses."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.errors import EngineUnavailable, GenerationError
from runtime.settings import EngineSettings
from runtime.stage1 import tensorrt_load
from runtime.stage1.base import build_solver
from runtime.stage1.decoder import Stage1
from runtime.stage1.dit_tensorrt import TensorRTEstimator, TensorRTSolver, groups
from runtime.stage1.noise import NoiseBank
from runtime.stage1.solver import Piece, PlainSolver
from runtime.stage1.tensorrt_load import check_numbers, check_released, check_tensorrt, open_estimator
from runtime.stage1.tensorrt_plan import ALONE, OWN, RELEASED, Graph, Profile
from tests import golden
from tests.runtime.stage1.tensorrt_stand_in import NotedStreams, StandIn, run_onnx
from tests.runtime.stage1.tiny_flow import CPU, prepared, tiny_flow, tiny_vocoder

STEPS, RATE, BINS = 3, 0.7, 80
Opened = tuple[TensorRTEstimator, StandIn, NotedStreams]


@pytest.fixture
def opened(tmp_path: Path, tiny_onnx: Path, released_onnx: Path) -> Callable[..., Opened]:
    """An estimator whose plan was built of a real export."""

    def make(graph: Graph = OWN) -> Opened:
        trt, streams = StandIn(run_onnx), NotedStreams()
        onnx = tiny_onnx if graph.streams else released_onnx
        estimator = open_estimator(trt, tiny_flow().estimator, onnx, graph, BINS, tmp_path, "stand-in", streams)
        return estimator, trt, streams

    return make


def piece(frames: int, chunked: bool = False, seed: int = 0) -> Piece:
    generator = torch.Generator().manual_seed(1000 * seed + frames)
    noise, mu, cond = torch.randn(3, BINS, frames, generator=generator)
    return Piece(noise, mu, cond, torch.randn(BINS, generator=generator), chunked)


def through(estimator: TensorRTEstimator, pieces: list[Piece]) -> list[Tensor]:
    with torch.inference_mode():
        return [solved.mel for solved in TensorRTSolver(estimator, STEPS, RATE, CPU).solve(pieces)]


def in_torch(pieces: list[Piece]) -> list[Tensor]:
    with torch.inference_mode():
        return [solved.mel for solved in PlainSolver(tiny_flow().estimator, STEPS, RATE).solve(pieces)]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_solve_gives_the_mel_of_torch_and_binds_once(opened: Callable[..., Opened], chunked: bool) -> None:
    """T2: six inputs and one output are told once; each step then is one run."""
    estimator, trt, _ = opened()
    one = piece(131, chunked)
    assert worst(through(estimator, [one]), in_torch([one])) < 1e-4
    assert len(trt.named("set_tensor_address")) == 7
    assert len(trt.named("execute_async_v3")) == STEPS


def test_binding_once_changes_no_bit(opened: Callable[..., Opened]) -> None:
    """Against a solve that goes through the protocol of estimators, which binds at each step."""
    estimator, trt, _ = opened()
    one = piece(70, chunked=True)
    bound = through(estimator, [one])
    with torch.inference_mode():
        (plain,) = PlainSolver(estimator, STEPS, RATE).solve([one])
    assert torch.equal(bound[0], plain.mel)
    assert len(trt.named("set_tensor_address")) == 7 * (1 + STEPS)


def test_the_estimator_takes_a_mask_of_padding(opened: Callable[..., Opened]) -> None:
    estimator, _, _ = opened()
    generator = torch.Generator().manual_seed(5)
    x, mu, cond = torch.randn(3, 4, BINS, 60, generator=generator)
    speaker, t = torch.randn(4, BINS, generator=generator), torch.full((4,), 0.5)
    mask = (torch.arange(60) < torch.tensor([60, 60, 31, 31])[:, None])[:, None]
    with torch.inference_mode():
        found = estimator(x, mask, mu, t, speaker, cond, chunked=True)
        truth = tiny_flow().estimator(x, mask, mu, t, speaker, cond, chunked=True)
    torch.testing.assert_close(found.masked_fill(~mask, 0), truth.masked_fill(~mask, 0), atol=1e-4, rtol=0)


def test_pieces_are_solved_together_and_come_back_in_their_order(opened: Callable[..., Opened]) -> None:
    pieces = [piece(60, False, 1), piece(90, True, 2), piece(51, False, 3), piece(20, False, 4), piece(100, True, 5)]
    estimator, trt, _ = opened()
    assert worst(through(estimator, pieces), in_torch(pieces)) < 1e-4
    assert estimator.solves == 3 and len(trt.named("execute_async_v3")) == 3 * STEPS
    rows = {shape[0] for _, _, name, shape in trt.named("set_input_shape") if name == "x"}
    assert rows == {2, 4}


def test_what_a_neighbour_holds_stays_with_it(opened: Callable[..., Opened]) -> None:
    """Trap 43: rows of one solve see only themselves."""
    estimator, _, _ = opened()
    clean = through(estimator, [piece(60), piece(51, seed=1)])
    broken = replace(piece(51, seed=1), mu=torch.full((BINS, 51), torch.nan))
    poisoned = through(estimator, [piece(60), broken])
    assert torch.equal(poisoned[0], clean[0]) and torch.isnan(poisoned[1]).all()


def test_groups_hold_like_lengths_and_no_more_rows_than_fit() -> None:
    pieces = [piece(100, seed=seed) for seed in range(10)] + [piece(76), piece(74), piece(100, chunked=True)]
    fits = Profile((2, 4, 16), (4, 50, 200)).holds
    found = groups(pieces, fits)
    assert sorted(index for group in found for index in group) == list(range(13))
    assert [len(group) for group in found] == [8, 3, 1, 1]  # 74 frames would be padded by more than a quarter
    assert all(len({pieces[index].chunked for index in group}) == 1 for group in found)


@pytest.mark.parametrize("frames", [3, 61])
def test_a_length_out_of_the_profiles_goes_to_torch_and_is_counted(opened: Callable[..., Opened], frames: int) -> None:
    """Trap 38. The profiles are narrowed here, as 3,001 frames take a while on a CPU."""
    estimator, trt, _ = opened()
    estimator.graph = replace(OWN, profiles=(Profile((2, 2, 2), (4, 50, 60)), Profile((4, 8, 16), (4, 50, 60))))
    pieces = [piece(50), piece(frames, chunked=True)]
    assert worst(through(estimator, pieces), in_torch(pieces)) < 1e-4
    assert (estimator.solves, estimator.torch_solves) == (1, 1)
    assert len(trt.named("execute_async_v3")) == STEPS
    assert TensorRTSolver(estimator, STEPS, RATE, CPU).name.endswith("; solves: 1, and out of its sizes in torch: 1")


def test_profiles_end_where_they_say(opened: Callable[..., Opened]) -> None:
    estimator, _, _ = opened()
    asked = [(2, 4), (2, 3000), (2, 3001), (2, 3), (4, 1024), (16, 1024), (4, 1025), (18, 100)]
    assert [estimator.profile(*sizes) for sizes in asked] == [0, 0, None, None, 1, 1, None, None]


def test_a_company_that_passes_its_profile_is_split_and_not_sent_to_torch(opened: Callable[..., Opened]) -> None:
    estimator, _, _ = opened()
    pieces = [piece(1025), piece(1025, seed=1)]
    fits = lambda rows, frames: estimator.profile(rows, frames) is not None  # noqa: E731
    assert groups(pieces, fits) == [[0], [1]]


def test_a_refused_run_ends_the_solve_and_the_next_one_works(opened: Callable[..., Opened]) -> None:
    estimator, trt, _ = opened()
    trt.refuses.add("execute_async_v3")
    with pytest.raises(GenerationError, match="TensorRT refused to run"):
        through(estimator, [piece(50)])
    trt.refuses.clear()
    assert worst(through(estimator, [piece(50)]), in_torch([piece(50)])) < 1e-4
    assert len(trt.named("create_execution_context")) == 1


def stage1(estimator: TensorRTEstimator) -> Stage1:
    """As it is built for these settings: with the released file or without."""
    flow, noise = tiny_flow(), NoiseBank(CPU)
    onnx = None if estimator.graph.streams else Path("flow.decoder.estimator.fp32.onnx")
    settings = EngineSettings(estimator="tensorrt", estimator_onnx=onnx)
    solver = TensorRTSolver(estimator, 10, RATE, CPU)
    return Stage1(flow, solver, tiny_vocoder(noise), noise, no_streaming=settings.no_streaming)


def test_the_released_graph_speaks_whole_sentences_and_refuses_to_stream(opened: Callable[..., Opened]) -> None:
    """Trap 37: it has no chunk mask, so a hop would see the future without a word."""
    io = golden.load("stream_io")
    estimator, _, _ = opened(RELEASED)
    decoder, tokens = stage1(estimator), io["token"][0].long()
    state = decoder.open(prepared(io["prompt_token"], io["prompt_feat"], io["embedding"]))
    with pytest.raises(GenerationError, match="no chunk mask"):
        decoder.new_mel(state, tokens[:48], is_last=False)
    mel = decoder.new_mel(state, tokens, is_last=True)
    torch.testing.assert_close(mel[None], io["offline.mel"], atol=1e-3, rtol=0)


def test_our_own_graph_streams(opened: Callable[..., Opened]) -> None:
    io = golden.load("stream_io")
    estimator, _, _ = opened()
    decoder, tokens = stage1(estimator), io["token"][0].long()
    reference = prepared(io["prompt_token"], io["prompt_feat"], io["embedding"])
    state = decoder.open(reference)
    parts = [decoder.new_mel(state, tokens[:48], is_last=False), decoder.new_mel(state, tokens, is_last=True)]
    plain = Stage1(flow := tiny_flow(), PlainSolver(flow.estimator, 10, RATE), tiny_vocoder(), NoiseBank(CPU))
    state = plain.open(reference)
    truth = [plain.new_mel(state, tokens[:48], is_last=False), plain.new_mel(state, tokens, is_last=True)]
    assert worst(parts, truth) < 1e-4


def test_released_rows_are_one_pair_at_a_time(opened: Callable[..., Opened]) -> None:
    """Trap 33: its batch is the two rows of one stream, never the first two of several."""
    estimator, trt, _ = opened(RELEASED)
    pieces = [piece(60, seed=1), piece(60, seed=2)]
    assert worst(through(estimator, pieces), in_torch(pieces)) < 1e-4
    assert {shape[0] for _, _, name, shape in trt.named("set_input_shape") if name == "x"} == {2}


def test_a_plan_of_other_weights_is_refused_at_load(opened: Callable[..., Opened]) -> None:
    dit = tiny_flow().estimator
    for graph in (OWN, RELEASED):
        check_numbers(opened(graph)[0], dit, BINS)
    with torch.no_grad():
        dit.proj_out.weight *= 1.01
    with pytest.raises(EngineUnavailable, match=r"off from torch by 0\.01 of the velocity"):
        check_numbers(opened(OWN)[0], dit, BINS)
    with pytest.raises(EngineUnavailable, match="is the ONNX file this checkpoint's"):
        check_numbers(opened(RELEASED)[0], dit, BINS)


def test_a_plan_that_forgets_the_chunk_mask_is_refused_at_load(opened: Callable[..., Opened]) -> None:
    class Blind(Graph):
        def tensors(self, *given, chunk):
            return super().tensors(*given, chunk=None)

    estimator, _, _ = opened()
    estimator.graph = Blind(OWN.name, OWN.inputs, OWN.output, OWN.profiles, streams=True)
    with pytest.raises(EngineUnavailable, match="off from torch"):
        check_numbers(estimator, tiny_flow().estimator, BINS)


def test_tensorrt_needs_a_gpu() -> None:
    with pytest.raises(EngineUnavailable, match="TensorRT needs a CUDA device, not cpu"):
        build_solver(tiny_flow(), EngineSettings(estimator="tensorrt"))


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        (None, "not installed; install the `tensorrt` extra"),
        ("8.6.1", "8.6.1 is not served; install 10.8 or newer and older than 12"),
        ("10.7.0", "is not served"),
        ("12.0.1", "is not served"),
        ("unknown", "is not served"),
    ],
)
def test_a_version_that_is_not_served_is_refused_by_name(installed: str | None, told: str) -> None:
    with pytest.raises(EngineUnavailable, match=told):
        check_tensorrt(installed)


@pytest.mark.parametrize("installed", ["10.8.0.43", "10.15.1", "11.4.0.106"])
def test_versions_of_both_families_are_served(installed: str) -> None:
    check_tensorrt(installed)


def test_a_tensorrt_that_does_not_load_is_told_apart_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EngineUnavailable, match="does not load"):
        tensorrt_load.import_tensorrt()


def test_the_released_file_is_taken_in_its_own_precision_only(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="there is no file"):
        check_released(tmp_path / "missing.onnx", tiny_flow().estimator)
    (onnx := tmp_path / "flow.decoder.estimator.fp32.onnx").touch()
    check_released(onnx, tiny_flow().estimator)
    with pytest.raises(EngineUnavailable, match="computes in float32, but bfloat16 was asked for"):
        check_released(onnx, tiny_flow(EngineSettings(flow_precision="bfloat16")).estimator)


def test_settings_that_cannot_stream_or_mean_nothing_are_refused() -> None:
    onnx = Path("flow.decoder.estimator.fp32.onnx")
    EngineSettings(estimator="tensorrt", estimator_onnx=onnx)
    with pytest.raises(
        EngineUnavailable, match="final_attention is chunked, but the released ONNX file has no chunk mask"
    ):
        EngineSettings(estimator="tensorrt", estimator_onnx=onnx, final_attention="chunked")
    with pytest.raises(EngineUnavailable, match="estimator_onnx is for tensorrt, and the estimator is auto"):
        EngineSettings(estimator_onnx=onnx)


def test_the_released_profile_is_that_of_a_pair() -> None:
    assert RELEASED.profiles == (ALONE,) and ALONE.rows == (2, 2, 2) and ALONE.frames[2] == 3000

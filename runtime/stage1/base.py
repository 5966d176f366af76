"""Builds stage 1 from a checkpoint, and says what an estimator and a solver of the flow are.

Shapes: R rows, N mel frames (50 Hz), M mel bins. A faster estimator is one file beside dit.py and one branch here.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint, load_strict
from runtime.config import FlowConfig, ModelConfig
from runtime.errors import CheckpointError, EngineUnavailable
from runtime.settings import EngineSettings
from runtime.stage1.conditioning import Flow
from runtime.stage1.decoder import Stage1
from runtime.stage1.dit import rotary_frequencies
from runtime.stage1.dit_packed import PackedSolver
from runtime.stage1.hift import HiFT
from runtime.stage1.noise import HARMONICS, MEL_BINS, NoiseBank
from runtime.stage1.partition import stage1_stream
from runtime.stage1.solver import Piece, PlainSolver, Solved
from runtime.stage1.vocoder import Vocoder, build_vocoder

_PROBE_TOKENS = 50
GRAPH_FRAMES = 4096  # beyond, the GPU is busy for longer than it takes to launch the kernels


class FlowEstimator(Protocol):
    """Velocity of the mel at a time: the network that the solver asks at each step."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(
        self, x: Tensor, mask: Tensor | None, mu: Tensor, t: Tensor, speaker: Tensor, cond: Tensor, *, chunked: bool
    ) -> Tensor:
        """x, mu, cond [R, M, N], t [R], speaker [R, M] -> velocity [R, M, N].

        Rows are guidance pairs: 2i conditional, 2i + 1 unconditional. `mask` [R, 1, N] is true on real frames, which
        come first in each row; None when all are real. `chunked` is the chunk-causal attention of streaming.
        """
        ...


class FlowSolver(Protocol):
    """Brings pieces of several streams from noise to mel: an estimator and the Euler steps around it."""

    dtype: torch.dtype
    keeps_past: bool  # whether pieces may name a past, and ask for one

    @property
    def name(self) -> str:
        """For people, with what it counts."""
        ...

    def past_bytes(self, frames: int) -> int:
        """What a past of so many frames weighs."""
        ...

    def solve(self, pieces: Sequence[Piece]) -> list[Solved]:
        """In the order of the pieces; none depends on its neighbours."""
        ...


def build_stage1(checkpoint: Checkpoint, settings: EngineSettings, device: torch.device) -> Stage1:
    """Loads flow and vocoder. Raises CheckpointError for weights that do not fit, EngineUnavailable for settings."""
    config = checkpoint.config
    check_noise_shape(config)
    flow = load_flow(config.flow, checkpoint.weights("flow"), device)
    hift = HiFT(config.hift)
    load_strict(hift, "hift", checkpoint.weights("hift"))
    hift.to(device).eval()
    if device.type == "cpu":
        return assemble(flow, hift, settings)
    stream = stage1_stream(device, settings.reserved_multiprocessors)
    torch.cuda.synchronize(device)  # the weights are there
    with torch.cuda.stream(stream):  # graphs keep to the multiprocessors of the stream that they are captured on
        stage1 = assemble(flow, hift, settings)
    torch.cuda.synchronize(device)
    return stage1


def assemble(flow: Flow, hift: HiFT, settings: EngineSettings, vocoder: Vocoder | None = None) -> Stage1:
    """Stage 1 of modules that are loaded, on one device. `vocoder` is another way to run the second of them.

    Raises EngineUnavailable for settings that cannot be met.
    """
    device = flow.input_embedding.weight.device
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # process-wide, and on by default: the vocoder is float32 for real
    noise = NoiseBank(device)
    solver = build_solver(flow, settings)
    if solver.dtype is not torch.float32:
        check_finite(solver, flow, noise)
    stage1 = Stage1(
        flow,
        solver,
        vocoder or build_vocoder(hift, noise, settings.vocoder_graph_bytes),
        noise,
        final_attention=settings.final_attention,
        no_streaming=settings.no_streaming,
        voice_kv_bytes=settings.voice_kv_bytes,
        stream_kv_bytes=settings.stream_kv_bytes,
    )
    if device.type == "cpu":
        stage1.make_interruptible()
    return stage1


def load_flow(config: FlowConfig, weights: Mapping[str, Tensor], device: torch.device) -> Flow:
    """Builds the flow without drawing weights that the file replaces anyway, and fills it strictly.

    Each buffer of the flow is in the file, so nothing is left unset by this way of building.
    """
    with torch.device("meta"):
        flow = Flow(config)
    flow.to_empty(device=device)
    load_strict(flow, "flow", weights)
    inv_freq = flow.estimator.rotary_embed.inv_freq
    formula = rotary_frequencies(config.dit.head_dim).to(device)
    if not torch.allclose(inv_freq, formula, rtol=1e-3, atol=0):
        raise CheckpointError(
            "decoder.estimator.rotary_embed.inv_freq is not 10000^(-2k / head_dim); "
            f"its largest deviation is {float((inv_freq / formula - 1).abs().max()):.2g} of the value"
        )
    inv_freq.copy_(formula)  # storage in half precision rounds it
    return flow.eval().requires_grad_(False)


def build_solver(flow: Flow, settings: EngineSettings) -> FlowSolver:
    """Picks the estimator that the settings name, and casts its weights once. Tables stay in float32.

    Raises EngineUnavailable for one that cannot run here.
    """
    dtype = settings.dtype(settings.flow_precision, flow.estimator.proj_out.weight.device)
    for weight in flow.estimator.parameters():
        weight.data = weight.data.to(dtype)
    steps, rate = flow.config.euler_steps, flow.config.guidance_rate
    if settings.estimator == "tensorrt":
        from runtime.stage1.tensorrt_load import build_tensorrt

        folder = settings.export_folder or Path.home() / ".cache" / "mynah"
        return build_tensorrt(flow, settings.estimator_onnx, folder)
    if settings.estimator == "torch":
        return PlainSolver(flow.estimator, steps, rate)
    unfit = why_not_fused(flow)
    if settings.estimator == "packed" or (settings.estimator == "auto" and unfit):
        return PackedSolver(flow.estimator, steps, rate)
    if unfit:
        raise EngineUnavailable(f"the fused estimator cannot run: {unfit}; choose packed or auto")
    return build_fused(flow, settings.flow_graph_bytes)


def why_not_fused(flow: Flow) -> str | None:
    """What keeps the flow from our GPU kernels, or None."""
    device, dit = flow.estimator.proj_out.weight.device, flow.config.dit
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a CUDA device of compute capability 8.0 or more"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if dit.head_dim < 16 or dit.head_dim & (dit.head_dim - 1):
        return f"heads have {dit.head_dim} channels, not a power of two from 16 on"
    if dit.dim % 8:
        return f"its width is {dit.dim}, not a multiple of 8"
    return None


def build_fused(flow: Flow, graph_bytes: int) -> FlowSolver:
    from runtime.stage1.dit_fused import FusedSolver
    from runtime.stage1.graphs import CudaCapture, GraphTable

    solver = FusedSolver(flow.estimator, flow.config.euler_steps, flow.config.guidance_rate)
    if graph_bytes:
        capture = CudaCapture(flow.estimator.proj_out.weight.device)
        solver.capture(GRAPH_FRAMES, GraphTable(capture, limit_bytes=graph_bytes))
    return solver


@torch.inference_mode()
def check_finite(solver: FlowSolver, flow: Flow, noise: NoiseBank) -> None:
    """Solves a short probe. Raises EngineUnavailable when the estimator's precision does not hold its numbers."""
    device = flow.input_embedding.weight.device
    mu = flow.mu(torch.arange(_PROBE_TOKENS, device=device)[None] % flow.config.speech_tokens, is_last=True)[0]
    speaker = flow.speaker(torch.ones(1, flow.config.speaker_dim, device=device))[0]
    start = noise.flow_noise(mu.shape[-1])
    (solved,) = solver.solve([Piece(start, mu, torch.zeros_like(start), speaker, chunked=False)])
    if not torch.isfinite(solved.mel).all():
        precision = str(solver.dtype).removeprefix("torch.")
        raise EngineUnavailable(
            f"the flow overflows in {precision}: a probe of {_PROBE_TOKENS} tokens gave NaN or infinite mel; "
            "choose float32 or bfloat16 as flow_precision"
        )


def check_noise_shape(config: ModelConfig) -> None:
    """The noise recipe is that of the released shape; raises CheckpointError for another."""
    pairs = (("mel bins", config.flow.mel_bins, MEL_BINS), ("harmonics", config.hift.harmonics + 1, HARMONICS))
    for name, given, known in pairs:
        if given != known:
            raise CheckpointError(f"the checkpoint has {given} {name}; the fixed noise is made for {known}")

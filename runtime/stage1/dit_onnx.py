"""The DiT as an ONNX graph, for engines that compile one (spec 4.2 and 7).

Shapes: R rows, N mel frames (50 Hz), M mel bins. Rows and frames are free axes, and what a frame sees is an input: its
`horizon` [R, N], so that one graph serves whole sentences, streaming hops and padded company. Inputs and output are
float32 whatever the precision of the weights; the graph carries its own casts. Norms, softmax
and Mish are float32 in it.
"""

import copy
import hashlib
import os
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from runtime.errors import EngineUnavailable
from runtime.onnx_export import export_onnx
from runtime.stage1.dit import Attention, Block, DiT, InputEmbedding, Rotary, rotate_first_head

Lengths = Sequence[int | Tensor]  # real frames of each row: numbers, or tensors without a dimension

_FORM = 1  # of the graph below: a changed graph must not be found under an old name


def horizon(lengths: Lengths, frames: int, chunk_frames: int | None, device: torch.device) -> Tensor:
    """How many frames, from the first, each frame sees: int32 [R, N] for rows of these lengths, padded to N.

    With `chunk_frames` it is the chunk-causal attention of streaming (spec 4.2), else full attention. Padding sees what
    is real, and nothing sees padding.
    """
    frame = torch.arange(frames, dtype=torch.int32, device=device)
    seen = (frame // chunk_frames + 1) * chunk_frames if chunk_frames else torch.full_like(frame, frames)
    return torch.stack([seen.clamp(max=length) for length in lengths])  # neither kind needs a copy or a wait


class OnnxDiT(nn.Module):
    """The DiT's own weights, laid out for an engine that takes the graph at its word (strongly typed)."""

    def __init__(self, dit: DiT) -> None:
        super().__init__()
        self.dit = dit

    def forward(self, x: Tensor, mu: Tensor, t: Tensor, speaker: Tensor, cond: Tensor, horizon: Tensor) -> Tensor:
        """Velocity [R, M, N] at times t [R] of x [R, M, N], all float32; horizon int32 [R, N]."""
        dit, frames = self.dit, x.shape[-1]
        frame = torch.arange(frames, dtype=torch.int32, device=x.device)
        padding = (frame >= horizon[:, -1:])[:, None]  # [R, 1, N]: the last frame sees all that are real
        hidden = (frame >= horizon[:, :, None])[:, None]  # [R, 1, N, N]
        # Zero times NaN is NaN, so what padding holds must go before it becomes a value of the attention.
        x, mu, cond = (part.masked_fill(padding, 0).to(dit.dtype) for part in (x, mu, cond))
        c = F.silu(dit.time_embed(t, dit.dtype))
        rotary = dit.rotary_embed(frames)
        h = embed(dit.input_embed, x, cond, mu, speaker.to(dit.dtype))
        blocks: list[Block] = list(dit.transformer_blocks)  # type: ignore[arg-type]
        for block in blocks:
            shift, scale, gate, ff_shift, ff_scale, ff_gate = block.attn_norm(c)
            h = h + gate * attend(block.attn, modulate(h, shift, scale), rotary, hidden)
            h = h + ff_gate * block.ff(modulate(h, ff_shift, ff_scale))
        scale, shift = dit.norm_out(c)  # the other way round than in the blocks (spec 9.2)
        return dit.proj_out(modulate(h, shift, scale)).transpose(1, 2).float()


def embed(embedding: InputEmbedding, x: Tensor, cond: Tensor, mu: Tensor, speaker: Tensor) -> Tensor:
    """As in dit.py, but for the activations between the convolutions: TensorRT's Mish takes no bfloat16."""
    positions = embedding.conv_pos_embed
    everywhere = speaker[:, :, None].expand(-1, -1, x.shape[-1])
    h = embedding.proj(torch.cat((x, cond, mu, everywhere), dim=1).transpose(1, 2))
    place = h.transpose(1, 2)
    for layer in (positions.conv1, positions.conv2):
        place = F.mish(layer[0](F.pad(place, (positions.left, 0))).float()).to(h.dtype)
    return h + place.transpose(1, 2)


def modulate(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """As in dit.py, but in float32 from the norm to the end."""
    normed = F.layer_norm(h.float(), h.shape[-1:], eps=1e-6)
    return (normed * (1 + scale.float()) + shift.float()).to(h.dtype)


def attend(attention: Attention, u: Tensor, rotary: Rotary, hidden: Tensor) -> Tensor:
    """Attention written out, with logits and softmax in float32.

    Nothing norms q and k, so logits may pass what half precision holds. Casting before the product loses nothing: a
    TF32 product of half-precision numbers is exact, and its sum is float32 either way.
    """
    q, k, v = rotate_first_head(attention.to_q(u), rotary), rotate_first_head(attention.to_k(u), rotary), u
    q, k, v = (w.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for w in (q, k, attention.to_v(v)))
    logits = torch.matmul(q.float(), k.float().transpose(2, 3)) * q.shape[-1] ** -0.5
    weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)  # of what is hidden exactly zero
    return attention.to_out[0](torch.matmul(weights.to(v.dtype), v).transpose(1, 2).flatten(2))


def export_path(dit: DiT, folder: Path) -> Path:
    """Where `export_dit` keeps the graph of this DiT: named by a hash of all that is in it."""
    digest = hashlib.sha256(f"{_FORM} {dit.chunk_frames}".encode())
    for name, weight in dit.state_dict().items():
        digest.update(f"{name} {list(weight.shape)} {weight.dtype};".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return folder / f"dit-{digest.hexdigest()[:24]}.onnx"


def export_dit(dit: DiT, folder: Path) -> Path:
    """The ONNX file of this DiT in `folder`; written once, and whole: a file of this name is always complete.

    Raises EngineUnavailable without the packages that write ONNX.
    """
    path = export_path(dit, folder)
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(prefix="unfinished-", suffix=".onnx", dir=folder)
    os.close(handle)
    try:
        write_onnx(dit, Path(unfinished))
        Path(unfinished).replace(path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return path


def write_onnx(dit: DiT, path: Path) -> None:
    """Writes the graph as one file, weights included. Raises EngineUnavailable as above."""
    absent = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if absent:
        raise EngineUnavailable(
            f"{' and '.join(absent)} cannot be found; install the `tensorrt` extra or choose the packed estimator"
        )
    rows, frames, bins = Dim("rows"), Dim("frames"), dit.proj_out.out_features
    x, mu, cond = (torch.zeros(2, bins, 60) for _ in range(3))  # one tensor in three places would become one input
    t, speaker, seen = torch.zeros(2), torch.zeros(2, bins), horizon([60, 60], 60, None, x.device)
    inputs = {"x": x, "mu": mu, "t": t, "speaker": speaker, "cond": cond, "horizon": seen}
    wide: dict[int, object] = {0: rows, 2: frames}
    free: list[dict[int, object]] = [wide, wide, {0: rows}, {0: rows}, wide, {0: rows, 1: frames}]
    on_cpu = copy.deepcopy(dit).cpu()
    export_onnx(OnnxDiT(on_cpu), path, inputs, output="velocity", dynamic=free)

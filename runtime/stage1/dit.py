"""The DiT: which way a noisy mel should move (spec 4.2).

Shapes: R rows, N mel frames (50 Hz), M mel bins, D width, H heads of K channels. Rows are guidance pairs (solver.py);
they never see each other. Padding stands at the end of a row and may hold anything, NaN included. Inputs are cast to
the precision of the weights at the door; the time sinusoid and the rotary table are always computed in float32.
Attribute names are those of the released files.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.config import DiTConfig

Rotary = tuple[Tensor, Tensor]  # cos and sin [N, K], one angle per pair of channels, written twice


def sinusoid(t: Tensor, channels: int) -> Tensor:
    """Time in [0, 1] [R] -> float32 waves [R, channels], sines first."""
    half = channels // 2
    rates = torch.exp(torch.arange(half, device=t.device, dtype=torch.float32) * -(math.log(10_000) / (half - 1)))
    angle = 1000 * t.float()[:, None] * rates
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


def rotary_frequencies(head_dim: int) -> Tensor:
    """Radians per frame [K / 2]."""
    return 1.0 / (10_000 ** (torch.arange(0, head_dim, 2).float() / head_dim))


def rotate_first_head(wide: Tensor, rotary: Rotary) -> Tensor:
    """Turns channel pairs (2k, 2k + 1) of head 0 in [R, N, H * K]; the other heads know no position (spec 9.1)."""
    cos, sin = rotary
    first, rest = wide[..., : cos.shape[-1]], wide[..., cos.shape[-1] :]
    first = first.to(torch.promote_types(cos.dtype, wide.dtype))
    crossed = torch.stack((-first[..., 1::2], first[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat(((first * cos + crossed * sin).to(wide.dtype), rest), dim=-1)


def chunk_mask(frames: int, chunk_frames: int, device: torch.device) -> Tensor:
    """Who sees whom [N, N] when streaming: every frame its own chunk and all chunks before, counted from frame 0."""
    chunk = torch.arange(frames, device=device) // chunk_frames
    return chunk[:, None] >= chunk


def modulate(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without weights of its own, then the shift and scale of the time [R, 1, D]."""
    return F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift


class TimeEmbedding(nn.Module):
    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.channels = channels
        self.time_mlp = nn.Sequential(nn.Linear(channels, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return self.time_mlp(sinusoid(t, self.channels).to(dtype))


class ConvPositions(nn.Module):
    """Two causal grouped convolutions: the only sense of place that heads 1.. have."""

    def __init__(self, dim: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.left = kernel - 1
        self.conv1 = nn.Sequential(nn.Conv1d(dim, dim, kernel, groups=groups), nn.Mish())
        self.conv2 = nn.Sequential(nn.Conv1d(dim, dim, kernel, groups=groups), nn.Mish())

    def forward(self, h: Tensor) -> Tensor:  # [R, N, D] -> [R, N, D]
        h = self.conv1(F.pad(h.transpose(1, 2), (self.left, 0)))
        return self.conv2(F.pad(h, (self.left, 0))).transpose(1, 2)


class InputEmbedding(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(2 * config.mel_bins + config.mu_dim + config.speaker_dim, config.dim)
        self.conv_pos_embed = ConvPositions(config.dim, config.conv_kernel, config.conv_groups)

    def forward(self, x: Tensor, cond: Tensor, mu: Tensor, speaker: Tensor) -> Tensor:  # [R, M, N] -> [R, N, D]
        everywhere = speaker[:, :, None].expand(-1, -1, x.shape[-1])
        h = self.proj(torch.cat((x, cond, mu, everywhere), dim=1).transpose(1, 2))
        return h + self.conv_pos_embed(h)


class RotaryEmbedding(nn.Module):
    """Angles by absolute frame. The buffer is in the released files; loading holds it to the formula."""

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rotary_frequencies(head_dim))

    def forward(self, frames: int) -> Rotary:
        frame = torch.arange(frames, device=self.inv_freq.device, dtype=torch.float32)
        angle = (frame[:, None] * self.inv_freq.float()).repeat_interleave(2, dim=-1)
        return angle.cos(), angle.sin()


class Modulation(nn.Module):
    """Shift, scale and gate vectors that depend on the time alone: [R, D] -> `parts` times [R, 1, D]."""

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(dim, parts * dim)

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        return self.linear(c)[:, None].chunk(self.parts, dim=-1)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, heads * head_dim)
        self.to_k = nn.Linear(dim, heads * head_dim)
        self.to_v = nn.Linear(dim, heads * head_dim)
        self.to_out = nn.ModuleList((nn.Linear(heads * head_dim, dim),))

    def forward(self, u: Tensor, rotary: Rotary, visible: Tensor | None, padding: Tensor | None) -> Tensor:
        """`visible` is the boolean attention mask, broadcast to [R, H, N, N]; `padding` [R, N, 1]. None: no limits."""
        q, k, v = rotate_first_head(self.to_q(u), rotary), rotate_first_head(self.to_k(u), rotary), self.to_v(u)
        if padding is not None:  # their weight is zero, but zero times NaN is NaN
            k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        q, k, v = (wide.unflatten(-1, (self.heads, -1)).transpose(1, 2) for wide in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        out = self.to_out[0](heads.transpose(1, 2).flatten(2))
        return out if padding is None else out.masked_fill(padding, 0)


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(dim, inner), nn.GELU(approximate="tanh"))
        self.ff = nn.Sequential(first, nn.Identity(), nn.Linear(inner, dim))  # the middle is dropout in training

    def forward(self, u: Tensor) -> Tensor:
        return self.ff(u)


class Block(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.attn_norm = Modulation(config.dim, parts=6)
        self.attn = Attention(config.dim, config.heads, config.head_dim)
        self.ff = FeedForward(config.dim, config.dim * config.ff_mult)

    def forward(self, h: Tensor, c: Tensor, rotary: Rotary, visible: Tensor | None, padding: Tensor | None) -> Tensor:
        shift, scale, gate, ff_shift, ff_scale, ff_gate = self.attn_norm(c)
        h = h + gate * self.attn(modulate(h, shift, scale), rotary, visible, padding)
        return h + ff_gate * self.ff(modulate(h, ff_shift, ff_scale))


class DiT(nn.Module):
    """The torch estimator: the truth that faster ones are compared with."""

    name = "torch"

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.chunk_frames = config.chunk_frames
        self.time_embed = TimeEmbedding(config.time_channels, config.dim)
        self.input_embed = InputEmbedding(config)
        self.rotary_embed = RotaryEmbedding(config.head_dim)
        self.transformer_blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm_out = Modulation(config.dim, parts=2)
        self.proj_out = nn.Linear(config.dim, config.mel_bins)

    @property
    def dtype(self) -> torch.dtype:
        return self.proj_out.weight.dtype

    def forward(
        self, x: Tensor, mask: Tensor | None, mu: Tensor, t: Tensor, speaker: Tensor, cond: Tensor, *, chunked: bool
    ) -> Tensor:
        """Velocity [R, M, N] at times t [R] of the mel x [R, M, N]; see FlowEstimator."""
        rows, _, frames = x.shape
        assert t.shape == (rows,), f"t is {list(t.shape)}; it holds one time for each of the {rows} rows"
        visible = chunk_mask(frames, self.chunk_frames, x.device) if chunked else None
        padding = None
        if mask is not None:
            padding = ~mask.bool().transpose(1, 2)
            keys = mask.bool()[:, None]  # [R, 1, 1, N]
            visible = keys if visible is None else keys & visible
        x, cond, mu, speaker = (part.to(self.dtype) for part in (x, cond, mu, speaker))
        c = F.silu(self.time_embed(t, self.dtype))
        rotary = self.rotary_embed(frames)
        h = self.input_embed(x, cond, mu, speaker)
        for block in self.transformer_blocks:
            h = block(h, c, rotary, visible, padding)
        scale, shift = self.norm_out(c)  # the other way round than in the blocks (spec 9.2)
        return self.proj_out(modulate(h, shift, scale)).transpose(1, 2)

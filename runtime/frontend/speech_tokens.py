"""Reference audio -> speech tokens, 25 per second (spec 2.3): the checkpoint's ONNX file, and the same net in torch.

onnxruntime is the reference and the way of a CPU; on a GPU the net takes its weights from the file.

Shapes: B clips, T log-mel frames (100 Hz), P = ceil(ceil(T / 2) / 2) tokens, D width, H heads. A token is a number of
eight ternary digits: 3^8 = 6561 of them.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.errors import EngineUnavailable, GenerationError
from runtime.frontend.mel import WhisperLogMel
from runtime.frontend.onnx_file import CPU, OnnxFile
from runtime.frontend.onnx_weights import fill, read_layers
from runtime.onnx_export import export_onnx

DIGITS = 8
CODEBOOK = 3**DIGITS
HEAD_WIDTH = 64  # channels of an attention head, in every size of the net
LEVEL_SCALE = 0.9990000128746033  # keeps the outer digits off the rounding edge (spec 2.3)


class SpeechTokenizer:
    """Runs the checkpoint's `speech_tokenizer_v3.onnx`. Threads may share it."""

    def __init__(self, path: Path, threads: int = 0, provider: str = CPU, codebook: int = CODEBOOK) -> None:
        self._model = OnnxFile(path, inputs=2, threads=threads, provider=provider)
        self._log_mel = WhisperLogMel()
        self._codebook = codebook
        self.identity = self._model.identity

    def encode(self, samples: Tensor) -> Tensor:
        """16 kHz samples [n] -> tokens [P] int64. Raises GenerationError when the file breaks its promise."""
        feats = self._log_mel(samples.float().cpu()[None])  # [1, 128, T]
        frames = feats.shape[-1]
        ids = self._model.run(feats.numpy(), np.array([frames], np.int32))
        tokens = torch.from_numpy(ids.reshape(-1).astype(np.int64))
        return _checked(tokens, frames, self._codebook, self._model.name)


class TorchSpeechTokenizer:
    """The net on a device, with the weights of the ONNX file. Threads may share it."""

    def __init__(self, net: "SpeechTokenizerNet", device: torch.device, name: str, codebook: int = CODEBOOK) -> None:
        """`name` is that of the file the weights are from."""
        self._net = net.to(device).eval()
        self._log_mel = WhisperLogMel(self._net.config.mel_bins).to(device)
        self._codebook = codebook
        self._device = device
        self._name = name
        self.identity = f"{name}@torch-{device.type}"

    @torch.no_grad()
    def encode(self, samples: Tensor) -> Tensor:
        """As `SpeechTokenizer.encode`; samples may lie on the device."""
        feats = self._log_mel(samples.to(self._device, torch.float32)[None])
        frames = feats.shape[-1]
        tokens = self._net(feats, torch.full((1,), frames, device=self._device))[0].long().cpu()
        return _checked(tokens, frames, self._codebook, self._name)


def _checked(tokens: Tensor, frames: int, codebook: int, name: str) -> Tensor:
    if len(tokens) != token_count(frames):
        raise GenerationError(f"{name} gave {len(tokens)} tokens, {token_count(frames)} were due")
    if ((tokens < 0) | (tokens >= codebook)).any():
        raise GenerationError(f"{name} gave a token outside 0..{codebook - 1}")
    return tokens


def token_count(frames: int) -> int:
    """Tokens of so many log-mel frames: two convolutions of stride 2."""
    return ((frames + 1) // 2 + 1) // 2


@dataclass(frozen=True, slots=True)
class SpeechTokenizerConfig:
    """Sizes of the net; the defaults are the released ones."""

    mel_bins: int = 128
    width: int = 1280
    heads: int = 20
    layers: int = 12
    fsmn_kernel: int = 31


class SpeechTokenizerNet(nn.Module):
    """The tokenizer as torch modules. Frames behind a clip's length have no influence, whatever they hold."""

    def __init__(self, config: SpeechTokenizerConfig | None = None) -> None:
        super().__init__()
        self.config = config or SpeechTokenizerConfig()
        self.encoder = Encoder(self.config)
        self.quantizer = Quantizer(self.config.width)

    def forward(self, feats: Tensor, lengths: Tensor) -> Tensor:
        """Log-mel [B, 128, T] of `lengths` [B] frames -> tokens [B, P] int32; behind a clip's end they mean nothing."""
        return self.quantizer(self.hidden(feats, lengths))

    def hidden(self, feats: Tensor, lengths: Tensor) -> Tensor:
        """What the quantizer sees: [B, P, D]."""
        return self.encoder(feats, lengths)


class Encoder(nn.Module):
    def __init__(self, config: SpeechTokenizerConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(config.mel_bins, config.width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(self, feats: Tensor, lengths: Tensor) -> Tensor:
        x = feats
        for conv in (self.conv1, self.conv2):
            x = F.gelu(conv(x.masked_fill(~_valid(x.shape[-1], lengths)[:, None], 0.0)))
            lengths = (lengths + 1) // 2
        x = x.transpose(1, 2)  # [B, P, D]
        valid = _valid(x.shape[1], lengths)
        for block in self.blocks:
            x = block(x, valid)
        return x


def _valid(frames: int, lengths: Tensor) -> Tensor:
    """True where a clip has a frame: [B, frames]."""
    return torch.arange(frames, device=lengths.device) < lengths[:, None]


class Block(nn.Module):
    def __init__(self, config: SpeechTokenizerConfig) -> None:
        super().__init__()
        width = config.width
        self.attn = MemoryAttention(width, config.heads, config.fsmn_kernel)
        self.attn_ln = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp_ln = nn.LayerNorm(width)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = x + self.attn(self.attn_ln(x), valid)
        return x + self.mlp(self.mlp_ln(x))


class MemoryAttention(nn.Module):
    """Rotary attention, plus a memory: a depthwise convolution over the values, with a way around it."""

    def __init__(self, width: int, heads: int, fsmn_kernel: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.fsmn_block = nn.Conv1d(width, width, fsmn_kernel, padding=fsmn_kernel // 2, groups=width, bias=False)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        value = self.value(x)
        query, key, heads_value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query(x), self.key(x), value)
        )  # [B, H, P, D / H]
        mask = valid[:, None, None, :]
        attended = F.scaled_dot_product_attention(rotate(query), rotate(key), heads_value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(-2)) + self._memory(value, valid)

    def _memory(self, value: Tensor, valid: Tensor) -> Tensor:
        padding = ~valid[..., None]
        value = value.masked_fill(padding, 0.0)
        memory = self.fsmn_block(value.transpose(1, 2)).transpose(1, 2) + value
        return memory.masked_fill(padding, 0.0)


def rotate(x: Tensor, theta: float = 1e4) -> Tensor:
    """Rotary position embedding of [.., P, head dim], halves paired: dimension i turns with i + half."""
    half = x.shape[-1] // 2
    speed = torch.exp(torch.arange(half, device=x.device) * (-math.log(theta) / half))
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Quantizer(nn.Module):
    """Finite scalar quantization: hidden [.., D] -> levels [.., 8] in (-1, 1) -> token ids [..]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._codebook = Codebook(width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.ids(self.levels(hidden))

    def levels(self, hidden: Tensor) -> Tensor:
        """Differentiable up to here; rounding them gives the digits minus one."""
        return self._codebook.project_down(hidden).tanh() * LEVEL_SCALE

    @staticmethod
    def ids(levels: Tensor) -> Tensor:
        """Rounds half to even, reads the digits with the first one lowest. Int32, as the released file gives them."""
        digits = levels.round().to(torch.int32) + 1
        powers = torch.tensor([3**place for place in range(DIGITS)], dtype=torch.int32, device=levels.device)
        return (digits * powers).sum(-1, dtype=torch.int32)


class Codebook(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project_down = nn.Linear(width, DIGITS)


def export_speech_tokenizer(net: SpeechTokenizerNet, path: Path) -> None:
    """Writes the net as an ONNX file with the released interface: one clip of any length."""
    device = next(net.parameters()).device
    feats = torch.zeros(1, net.config.mel_bins, 203, device=device)
    lengths = torch.tensor([203], dtype=torch.int32, device=device)
    free = {2: torch.export.Dim("frames", min=4, max=30_000)}
    export_onnx(net, path, {"feats": feats, "feats_length": lengths}, output="indices", dynamic=[free, {}])


def net_of(path: Path) -> SpeechTokenizerNet:
    """The net with the weights of an ONNX file, on the CPU. Raises EngineUnavailable when they do not fit."""
    layers = read_layers(path)
    convs = [layer.arrays[0].shape for layer in layers if layer.kind == "conv"]
    depthwise = [shape for shape in convs if shape[1] == 1]
    if len(convs) != len(depthwise) + 2 or not depthwise:
        raise EngineUnavailable(f"{path.name} has another architecture: its convolutions are {convs[:4]}")
    width, mel_bins, _ = convs[0]
    config = SpeechTokenizerConfig(mel_bins, width, max(1, width // HEAD_WIDTH), len(depthwise), depthwise[0][2])
    with torch.device("meta"):
        net = SpeechTokenizerNet(config)
    fill(net, layers, lambda net: net(torch.zeros(1, mel_bins, 8), torch.full((1,), 8)))
    return net.eval().requires_grad_(False)

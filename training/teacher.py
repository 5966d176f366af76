"""The teacher, Kokoro-82M, as batched plain torch: phoneme ids and style vectors in, 24 kHz speech out.

Shapes: B sentences, T phoneme tokens with the two edge pads, L duration frames (40 Hz), N samples (24 kHz). Sentences
of unequal length share a batch: every statistic, edge and overlap is masked, so a sentence sounds as it does alone.
The weights are a folder: `kokoro-int8.pack.z1`, `.z2` (the integers of the int8 ONNX export with their scales, the
rest in half precision), `voices.npz` (style tables) and the sentences' phoneme ids; see README.md for their origin.
"""

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLE_RATE = 24000
FRAME = 600  # samples per duration frame; pitch and energy come at twice that rate
_TYPES = {"i1": np.int8, "u1": np.uint8, "f2": np.float16, "f4": np.float32}


@dataclass(frozen=True, slots=True)
class Utterances:
    """What the teacher says: samples [B, N] (zero after each end), lengths [B] on the CPU, and how it says it."""

    samples: Tensor
    lengths: Tensor
    durations: Tensor  # [B, T] duration frames per token
    f0: Tensor  # [B, 2L] Hz at 80 Hz, never zero inside a sentence


def unpack(folder: Path) -> tuple[dict[str, Tensor], dict]:
    """Reads the weight pack: 8 bytes of header length, a JSON header, then integers with scales and zero points."""
    parts = sorted(folder.glob("kokoro-int8.pack.z*"))
    raw = zlib.decompress(b"".join(part.read_bytes() for part in parts))
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    base = 8 + size
    weights = {}
    for entry in header["tensors"]:
        values = np.frombuffer(raw, _TYPES[entry["dtype"]], math.prod(entry["shape"]), base + entry["offset"])
        values = values.reshape(entry["shape"]).astype(np.float32)
        if "scale" in entry:
            scale = np.frombuffer(raw, np.float32, math.prod(entry["sshape"]), base + entry["scale"])
            values = (values - entry["zero"]) * scale.reshape(entry["sshape"])
        weights[entry["name"]] = torch.from_numpy(np.ascontiguousarray(values))
    return weights, header["config"]


def lengths_mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device)[None] < lengths[:, None]


class Teacher:
    """Kokoro with its weights on one device. Not a module: nothing of it is trained."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        weights, self.config = unpack(folder)
        self.device = device
        self.weights = {name: value.to(device) for name, value in weights.items()}
        for name in [name for name in self.weights if ".alpha" in name]:
            self.weights[name + ".inverse"] = 1.0 / self.weights[name]
        self.lstms = {}
        for name in [n.removesuffix(".weight_ih_l0") for n in weights if n.endswith(".weight_ih_l0")]:
            size = weights[name + ".weight_ih_l0"].shape
            lstm = nn.LSTM(size[1], size[0] // 4, 1, batch_first=True, bidirectional=True)
            lstm.load_state_dict({key: weights[f"{name}.{key}"] for key in lstm.state_dict()})
            self.lstms[name] = lstm.to(device).eval()
        step = torch.arange(20, dtype=torch.float64)
        bins = torch.arange(11, dtype=torch.float64)
        window = torch.hann_window(20, periodic=True, dtype=torch.float64)
        angle = 2 * math.pi * bins[:, None] * step[None] / 20
        twice = torch.where((bins == 0) | (bins == 10), 1.0, 2.0)[:, None].double()
        self.window = window.float().to(device)
        self.dft = torch.cat([torch.cos(angle) * window, -torch.sin(angle) * window]).float().to(device)[:, None]
        inverse = [twice * torch.cos(angle) * window / 20, -twice * torch.sin(angle) * window / 20]
        self.inverse_dft = torch.cat(inverse).float().to(device)

    @torch.inference_mode()
    def __call__(
        self, ids: Sequence[Sequence[int]], style: Tensor, speed: Tensor, f0_scale: Tensor, seed: int
    ) -> Utterances:
        """Speaks a batch: phoneme ids without pads, style [B, 256] (timbre, prosody), speed and pitch factor [B]."""
        counts = torch.tensor([len(row) + 2 for row in ids])
        tokens = torch.zeros(len(ids), int(counts.max()), dtype=torch.long)
        for row, line in zip(tokens, ids, strict=True):
            row[1 : len(line) + 1] = torch.as_tensor(np.asarray(line, np.int64))
        tokens, style, n = tokens.to(self.device), style.to(self.device), counts.to(self.device)
        mask = lengths_mask(n, tokens.shape[1])
        timbre, prosody = style[:, :128], style[:, 128:]
        hidden, durations = self._durations(self._bert(tokens, mask), prosody, counts, mask, speed.to(self.device))
        text = self._text_encoder(tokens, counts, mask)
        frames = durations.sum(1)
        width = -(-int(frames.max()) // 8) * 8
        position = torch.arange(width, device=self.device)[None].expand(len(ids), -1).contiguous()
        index = torch.searchsorted(durations.cumsum(1), position, right=True).clamp(max=tokens.shape[1] - 1)
        frame_mask = lengths_mask(frames, width)

        def per_frame(x: Tensor) -> Tensor:
            return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1])) * frame_mask[..., None]

        aligned = per_frame(text).transpose(1, 2).contiguous()
        m = frame_mask[:, None].float()
        shared = self._lstm("predictor.shared", per_frame(hidden), frames.cpu(), width).transpose(1, 2).contiguous()
        f0 = self._curve("F0", shared, prosody, frames, m) * f0_scale.to(self.device)[:, None]
        energy = self._curve("N", shared, prosody, frames, m)
        samples = self._decode(aligned, f0, energy, timbre, frames, m, seed)
        lengths = frames * FRAME
        return Utterances(samples * lengths_mask(lengths, samples.shape[-1]), lengths.cpu(), durations, f0)

    # ---- encoders -------------------------------------------------------------------------------------------------
    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def _conv(self, name: str, x: Tensor, padding: int = 0, stride: int = 1, dilation: int = 1) -> Tensor:
        return F.conv1d(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"), stride, padding, dilation)

    def _lstm(self, name: str, x: Tensor, counts: Tensor, width: int) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=False)
        y, _ = self.lstms[name](packed)
        return nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=width)[0]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.weights[name + ".bias"], 1e-12)

    def _bert(self, tokens: Tensor, mask: Tensor) -> Tensor:
        w, p = self.weights, "bert.embeddings."
        x = w[p + "word_embeddings.weight"][tokens] + w[p + "position_embeddings.weight"][: tokens.shape[1]]
        x = self._norm(p + "LayerNorm", x + w[p + "token_type_embeddings.weight"][0])
        x = self._linear("bert.encoder.embedding_hidden_mapping_in", x)
        q = "bert.encoder.albert_layer_groups.0.albert_layers.0."
        heads = self.config["plbert"]["num_attention_heads"]
        for _ in range(self.config["plbert"]["num_hidden_layers"]):
            qkv = [self._linear(q + "attention." + name, x) for name in ("query", "key", "value")]
            qkv = [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv]
            attended = F.scaled_dot_product_attention(*qkv, attn_mask=mask[:, None, None])
            attended = self._linear(q + "attention.dense", attended.transpose(1, 2).flatten(2))
            x = self._norm(q + "attention.LayerNorm", x + attended)
            wide = F.gelu(self._linear(q + "ffn", x), approximate="tanh")
            x = self._norm(q + "full_layer_layer_norm", x + self._linear(q + "ffn_output", wide))
        return x

    def _text_encoder(self, tokens: Tensor, counts: Tensor, mask: Tensor) -> Tensor:
        m = mask[:, None].float()
        x = self.weights["text_encoder.embedding.weight"][tokens].transpose(1, 2) * m
        for i in range(self.config["n_layer"]):
            p = f"text_encoder.cnn.{i}."
            x = self._conv(p + "0", x, padding=(self.config["text_encoder_kernel_size"] - 1) // 2).transpose(1, 2)
            x = F.layer_norm(x, x.shape[-1:], self.weights[p + "1.gamma"], self.weights[p + "1.beta"], 1e-5)
            x = F.leaky_relu(x.transpose(1, 2), 0.2) * m
        return self._lstm("text_encoder.lstm", x.transpose(1, 2), counts, tokens.shape[1]) * mask[..., None]

    def _durations(
        self, bert: Tensor, prosody: Tensor, counts: Tensor, mask: Tensor, speed: Tensor
    ) -> tuple[Tensor, Tensor]:
        width = bert.shape[1]
        m = mask[..., None].float()
        spread = prosody[:, None].expand(-1, width, -1)
        x = torch.cat([self._linear("bert_encoder", bert), spread], -1) * m
        for i in range(self.config["n_layer"]):
            x = self._lstm(f"predictor.text_encoder.lstms.{2 * i}", x, counts, width)
            gain, shift = self._linear(f"predictor.text_encoder.lstms.{2 * i + 1}.fc", prosody)[:, None].chunk(2, -1)
            x = (1 + gain) * F.layer_norm(x, x.shape[-1:], eps=1e-5) + shift
            x = torch.cat([x, spread], -1) * m
        y = self._lstm("predictor.lstm", x, counts, width)
        frames = torch.sigmoid(self._linear("predictor.duration_proj.linear_layer", y)).sum(-1) / speed[:, None]
        return x, torch.round(frames).clamp(min=1).long() * mask

    # ---- decoder --------------------------------------------------------------------------------------------------
    def _affine(self, name: str, x: Tensor, style: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """AdaIN over the n [B] valid columns of x (zero elsewhere), as one scale and shift [B, C, 1]."""
        gain, shift = self._linear(name + ".fc", style).chunk(2, 1)
        mean = x.sum(-1) / n[:, None]
        variance = (x.square().sum(-1) / n[:, None] - mean.square()).clamp_min(0)
        scale = (1 + gain) * torch.rsqrt(variance + 1e-5)
        return scale[:, :, None], (shift - mean * scale)[:, :, None]

    def _block(
        self, name: str, x: Tensor, style: Tensor, n: Tensor, m: Tensor, up: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale, shift = self._affine(name + ".norm1", x, style, n)
        y = F.leaky_relu(torch.addcmul(shift, x, scale), 0.2) * m
        if up:  # depthwise transposed convolution, kernel 3, stride 2, written out: grouped kernels are slow
            w, following = self.weights[name + ".pool.weight"], F.pad(y[..., 1:], (0, 1))
            pair = [y * w[:, :, 1], torch.addcmul(y * w[:, :, 2], following, w[:, :, 0])]
            y = torch.stack(pair, -1).flatten(-2) + self.weights[name + ".pool.bias"][:, None]
            n = n * 2
            m = lengths_mask(n, y.shape[-1])[:, None].to(x.dtype)
            y, x = y * m, x.repeat_interleave(2, -1)
        y = self._conv(name + ".conv1", y, padding=1) * m
        scale, shift = self._affine(name + ".norm2", y, style, n)
        y = self._conv(name + ".conv2", F.leaky_relu(torch.addcmul(shift, y, scale), 0.2) * m, padding=1)
        if name + ".conv1x1.weight" in self.weights:
            x = self._conv(name + ".conv1x1", x)
        return (y + x) * (m * math.sqrt(0.5)), n, m

    def _curve(self, name: str, shared: Tensor, prosody: Tensor, frames: Tensor, m: Tensor) -> Tensor:
        x, n = shared, frames
        for i in range(3):
            x, n, m = self._block(f"predictor.{name}.{i}", x, prosody, n, m, up=i == 1)
        return (self._conv(f"predictor.{name}_proj", x) * m)[:, 0]

    def _snake_block(self, name: str, x: Tensor, style: Tensor, n: Tensor, m: Tensor) -> Tensor:
        for j, dilation in enumerate((1, 3, 5)):
            y = x
            for half, spread in (("1", dilation), ("2", 1)):
                scale, shift = self._affine(f"{name}.adain{half}.{j}", y, style, n)
                alpha = f"{name}.alpha{half}.{j}"
                y = torch.addcmul(shift, y, scale)
                wave = torch.sin(self.weights[alpha] * y)
                y = torch.addcmul(y, wave * self.weights[alpha + ".inverse"], wave) * m
                kernel = self.weights[f"{name}.convs{half}.{j}.weight"].shape[-1]
                y = self._conv(f"{name}.convs{half}.{j}", y, (kernel - 1) // 2 * spread, dilation=spread) * m
            x = x + y
        return x

    def _source(self, f0: Tensor, frames: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pitch -> magnitude and phase of a harmonic source [B, 22, 120 L + 1], with its mask."""
        up = FRAME // 2
        harmonics = torch.arange(1, 10, device=f0.device, dtype=torch.float32)
        turns = torch.cumsum((f0[:, None] * harmonics[:, None] / SAMPLE_RATE) % 1, -1) * (2 * math.pi)
        phase = F.interpolate(turns * up, scale_factor=up, mode="linear")
        voiced = (f0 > 10).float().repeat_interleave(up, -1)[:, None]
        noise = torch.randn(phase.shape, device=f0.device, generator=generator)
        sine = torch.sin(phase) * 0.1 * voiced + (voiced * 0.003 + (1 - voiced) * (0.1 / 3)) * noise
        p = "decoder.generator.m_source.l_linear"
        source = torch.tanh(torch.einsum("oh,bhn->bn", self.weights[p + ".weight"], sine) + self.weights[p + ".bias"])
        # reflect ten samples beyond each sentence's own end
        position = torch.arange(-10, source.shape[-1] + 10, device=f0.device)[None].abs()
        last = (frames * FRAME)[:, None] - 1
        index = torch.where(position > last, 2 * last - position, position).clamp(0, source.shape[-1] - 1)
        spectrum = F.conv1d(source.gather(1, index)[:, None], self.dft, stride=5)
        real, imaginary = spectrum[:, :11], spectrum[:, 11:]
        m = lengths_mask(frames * 120 + 1, spectrum.shape[-1])[:, None].float()
        return torch.cat([torch.sqrt(real * real + imaginary * imaginary), torch.atan2(imaginary, real)], 1) * m, m

    def _decode(
        self, aligned: Tensor, f0: Tensor, energy: Tensor, timbre: Tensor, frames: Tensor, m: Tensor, seed: int
    ) -> Tensor:
        pitch = self._conv("decoder.F0_conv", f0[:, None], 1, 2) * m
        loudness = self._conv("decoder.N_conv", energy[:, None], 1, 2) * m
        x, n, mask = self._block("decoder.encode", torch.cat([aligned, pitch, loudness], 1), timbre, frames, m)
        residual = self._conv("decoder.asr_res.0", aligned) * m
        for i in range(4):
            x = torch.cat([x, residual, pitch, loudness], 1)
            x, n, mask = self._block(f"decoder.decode.{i}", x, timbre, n, mask, up=i == 3)
        source, end_mask = self._source(f0, frames, torch.Generator(self.device).manual_seed(seed))
        p = "decoder.generator."
        for i, (rate, kernel, count) in enumerate(((10, 20, frames * 20), (6, 12, frames * 120 + 1))):
            mask = end_mask if i else lengths_mask(count, x.shape[-1] * rate)[:, None].to(x.dtype)
            branch = self._conv(f"{p}noise_convs.{i}", source, 0 if i else 3, 1 if i else 6) * mask
            branch = self._snake_block(f"{p}noise_res.{i}", branch, timbre, count, mask)
            w, b = self.weights[f"{p}ups.{i}.weight"], self.weights[f"{p}ups.{i}.bias"]
            x = F.conv_transpose1d(F.leaky_relu(x, 0.1), w, b, stride=rate, padding=(kernel - rate) // 2)
            x = (F.pad(x, (1, 0), mode="reflect") if i else x) + branch
            x = x * mask
            x = sum(self._snake_block(f"{p}resblocks.{3 * i + k}", x, timbre, count, mask) for k in range(3)) / 3
        x = self._conv(p + "conv_post", F.leaky_relu(x, 0.01), 3)
        magnitude, phase = torch.exp(x[:, :11]) * mask, torch.sin(x[:, 11:])
        spectrum = torch.cat([magnitude * torch.cos(phase), magnitude * torch.sin(phase)], 1)
        wave = _overlap_add(torch.einsum("kt,bkf->bft", self.inverse_dft, spectrum))
        envelope = _overlap_add(mask[:, 0, :, None] * self.window.square())
        return (wave / envelope.clamp_min(1e-8))[:, 10:-10]


def _overlap_add(frames: Tensor) -> Tensor:
    """[B, F, 20] at hop 5 -> [B, 5 F + 15]"""
    out = frames.new_zeros(frames.shape[0], frames.shape[1] + 3, 5)
    for j in range(4):
        out[:, j : j + frames.shape[1]] += frames[..., 5 * j : 5 * j + 5]
    return out.flatten(1)

"""What speech tokens and mels must tell, as nets that read them while others are trained; none is exported.

Shapes: B windows, P tokens (25 Hz), F = 2P frames (50 Hz), C channels. Timbre reaches the mel through a table of
speakers, so the tokens need not carry it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.frontend.speech_tokens import DIGITS
from training.corpus import Corpus
from training.shapes import MEL_MEAN, MEL_SPREAD


class ConvStack(nn.Module):
    """Residual convolutions over [B, C, F], optionally shifted by a speaker [B, C] in every layer."""

    def __init__(self, channels: int, layers: int, kernel: int = 5) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Conv1d(channels, 2 * channels, kernel, padding=kernel // 2) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Conv1d(2 * channels, channels, 1) for _ in range(layers))

    def forward(self, x: Tensor, speaker: Tensor | None = None) -> Tensor:
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
            y = norm(x.transpose(1, 2)).transpose(1, 2)
            x = x + narrow(F.gelu(wide(y if speaker is None else y + speaker[:, :, None])))
        return x


class Heads(nn.Module):
    """From one token alone: the phonemes of its two frames. With context: phoneme, pitch, voicing, energy, mel."""

    def __init__(self, phones: int, speakers: int, channels: int = 192, mel_bins: int = 80) -> None:
        super().__init__()
        self.phones = phones
        self.alone = nn.Sequential(
            nn.Linear(DIGITS, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 2 * phones)
        )
        self.into = nn.Linear(DIGITS, channels)
        self.half_of_token = nn.Parameter(torch.randn(2, channels) * 0.02)
        self.context = ConvStack(channels, 2)
        self.prosody = nn.Conv1d(channels, 3, 1)
        self.phone = nn.Conv1d(channels, phones, 1)
        self.speaker = nn.Embedding(speakers, channels)
        self.mel_in = nn.Conv1d(channels, channels, 5, padding=2)
        self.mel_stack = ConvStack(channels, 4)
        self.mel_out = nn.Conv1d(channels, mel_bins, 1)
        nn.init.normal_(self.speaker.weight, std=0.3)
        nn.init.constant_(self.mel_out.bias, -5.0)  # the mean of a log-mel

    def forward(self, digits: Tensor, speaker: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rounded levels [B, P, 8] -> phonemes alone and in context [B, F, phones], prosody [B, 3, F], mel [B, F, M].

        Both phoneme outputs are scores.
        """
        alone = self.alone(digits).unflatten(-1, (2, self.phones)).flatten(1, 2)
        x = (self.into(digits)[:, :, None] + self.half_of_token).flatten(1, 2).transpose(1, 2)
        h = self.context(x)
        mel = self.mel_out(self.mel_stack(self.mel_in(x), self.speaker(speaker)))
        return alone, self.phone(h).transpose(1, 2), self.prosody(h), mel.transpose(1, 2)


class MelReader(nn.Module):
    """The phonemes of mel frames: what the flow's mel is to keep clear (`train_flow --phones`)."""

    def __init__(self, phones: int, mel_bins: int = 80, channels: int = 192) -> None:
        super().__init__()
        self.into = nn.Conv1d(mel_bins, channels, 5, padding=2)
        self.stack = ConvStack(channels, 3)
        self.out = nn.Conv1d(channels, phones, 1)

    def loss(self, mel: Tensor, phone: Tensor) -> Tensor:
        """Cross entropy of mel [B, M, F] and phonemes [B, F], per frame; 0 for class 255."""
        scores = self.out(self.stack(self.into((mel - MEL_MEAN) / MEL_SPREAD)))
        return F.cross_entropy(scores.float(), scored(phone), ignore_index=-100, reduction="none")


class Prosody:
    """Pitch and energy of every corpus frame, normalised per speaker: what is left is intonation and stress."""

    def __init__(self, corpus: Corpus, mel: Tensor) -> None:
        frames = torch.from_numpy(corpus.table[:, 1]).to(corpus.device)
        who = torch.from_numpy(corpus.table[:, 2]).to(corpus.device).repeat_interleave(frames)
        self.voiced = corpus.voiced & (corpus.hz > 40)
        log_f0 = corpus.hz.float().clamp_min(1).log()
        energy = mel.float().mean(1)
        mean = _mean_by(who, log_f0, self.voiced)
        self.f0 = torch.where(self.voiced, (log_f0 - mean) / 0.25, 0.0).half()
        centred = energy - _mean_by(who, energy)
        self.energy = (centred / _mean_by(who, centred.square()).sqrt().clamp_min(1e-3)).half()


def _mean_by(who: Tensor, values: Tensor, where: Tensor | None = None) -> Tensor:
    """Mean of each speaker's values, given back to each frame."""
    weight = torch.ones_like(values) if where is None else where.float()
    size = int(who.max()) + 1
    total = values.new_zeros(size).index_add_(0, who, values * weight)
    count = values.new_zeros(size).index_add_(0, who, weight)
    return (total / count.clamp_min(1))[who]


def scored(phone: Tensor) -> Tensor:
    """Phonemes as the target of a cross entropy, class 255 as -100, which it ignores."""
    return torch.where(phone == 255, -100, phone.long())


def losses(
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    phone: Tensor,
    f0: Tensor,
    voiced: Tensor,
    energy: Tensor,
    mel: Tensor,
) -> dict[str, Tensor]:
    """The parts of the loss, unweighted; phoneme class 255 is not scored."""
    alone, context, prosody, rebuilt = (output.float() for output in outputs)
    target = scored(phone).flatten()
    voiced = voiced.float()
    return {
        "phone": F.cross_entropy(alone.flatten(0, 1), target, ignore_index=-100),
        "context": F.cross_entropy(context.flatten(0, 1), target, ignore_index=-100),
        "f0": ((prosody[:, 0] - f0.float()).abs() * voiced).sum() / voiced.sum().clamp_min(1),
        "voicing": F.binary_cross_entropy_with_logits(prosody[:, 1], voiced),
        "energy": (prosody[:, 2] - energy.float()).abs().mean(),
        "mel": (rebuilt - mel.float()).abs().mean(),
    }

"""Rooms, channels and noise for 16 kHz speech [B, N]: what real prompts suffer and the teacher's speech lacks."""

import math

import torch
from torch import Tensor


def uniform(rows: int, low: float, high: float, device: torch.device) -> Tensor:
    return torch.rand(rows, 1, device=device) * (high - low) + low


def coloured_noise(x: Tensor, slope: Tensor | float) -> Tensor:
    """Noise of unit power shaped like x; slope 0 is white, 1 pink, 2 brown."""
    spectrum = torch.fft.rfft(torch.randn_like(x))
    frequency = torch.arange(spectrum.shape[-1], device=x.device).clamp_min(8)[None].float()
    noise = torch.fft.irfft(spectrum * frequency.pow(-slope / 2), n=x.shape[-1])
    return noise / noise.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-8)


def add_noise(x: Tensor, snr_db: Tensor | float, slope: Tensor | float) -> Tensor:
    level = x.square().mean(-1, keepdim=True).sqrt()
    return x + coloured_noise(x, slope) * level * 10 ** (-snr_db / 20)


def shape_spectrum(x: Tensor, equalise: float = 0.5, low_pass: float = 0.3, reverberate: float = 0.3) -> Tensor:
    """A random smooth equaliser, a random low-pass (3 to 7 kHz) and an exponential room, all in one transform."""
    rows, device = len(x), x.device
    size = -(-(x.shape[1] + 8000) // 4000) * 4000
    spectrum = torch.fft.rfft(x, n=size)
    frequency = torch.linspace(0, 1, spectrum.shape[-1], device=device)[None]
    order = torch.arange(1, 7, device=device, dtype=torch.float32)
    ripples = torch.randn(rows, 6, device=device) / order * (torch.rand(rows, 1, device=device) < equalise)
    gain = 10 ** (ripples @ torch.cos(math.pi * order[:, None] * frequency.sqrt()) * 0.24)
    edge = torch.sigmoid((uniform(rows, 3000, 7000, device) / 8000 - frequency) * 60)
    gain = torch.where(torch.rand(rows, 1, device=device) < low_pass, gain * edge, gain)
    time = torch.arange(8000, device=device)[None] / 16_000
    room = torch.randn(rows, 8000, device=device) * torch.exp(-6.9 * time / uniform(rows, 0.05, 0.4, device))
    wet = uniform(rows, 0.02, 0.35, device) * (torch.rand(rows, 1, device=device) < reverberate)
    room = room * wet / room.square().sum(-1, keepdim=True).sqrt()
    room = torch.cat([torch.ones(rows, 1, device=device), room[:, 1:]], 1)
    y = torch.fft.irfft(spectrum * gain * torch.fft.rfft(room, n=size), n=size)[:, : x.shape[1]]
    return y * (x.square().mean(-1, keepdim=True) / y.square().mean(-1, keepdim=True).clamp_min(1e-16)).sqrt()


def augment(x: Tensor, noisy: float = 0.6, snr_db: tuple[float, float] = (5.0, 40.0)) -> Tensor:
    """Room and channel, then noise on a share of the rows, then gain from -30 to +6 dB."""
    rows, device = len(x), x.device
    x = shape_spectrum(x)
    noised = add_noise(x, uniform(rows, *snr_db, device), uniform(rows, 0.0, 2.0, device))
    x = torch.where(torch.rand(rows, 1, device=device) < noisy, noised, x)
    return (x * 10 ** (uniform(rows, -30.0, 6.0, device) / 20)).clamp(-1, 1)

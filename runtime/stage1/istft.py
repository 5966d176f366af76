"""Short-time Fourier transform and its inverse, centred, for the vocoder's head (spec 5.3).

Shapes: samples [B, S] with S a multiple of the hop, spectrum [B, K, N] of K = n_fft / 2 + 1 bins and N = S / hop + 1
columns. The window is a buffer: it moves with the module, and the envelope is made from it in each call (it costs a
few microseconds), so neither can be stale.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class STFT(nn.Module):
    """Both directions with one periodic Hann window."""

    window: Tensor

    def __init__(self, n_fft: int, hop: int) -> None:
        super().__init__()
        self.n_fft = n_fft
        self.hop = hop
        self.register_buffer("window", torch.hann_window(n_fft, periodic=True), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Real parts over imaginary parts: [B, 2K, N]. The ends are reflected."""
        spectrum = torch.stft(
            samples, self.n_fft, self.hop, window=self.window, pad_mode="reflect", return_complex=True
        )
        return torch.cat([spectrum.real, spectrum.imag], dim=1)

    def inverse(self, magnitude: Tensor, phase: Tensor) -> Tensor:
        """Samples [B, hop * (N - 1)]. Equals torch.istft, which waits for the device to look at its envelope."""
        spectrum = torch.polar(magnitude, phase)
        frames = torch.fft.irfft(spectrum, n=self.n_fft, dim=1) * self.window[:, None]
        envelope = (self.window**2)[None, :, None].expand(1, -1, frames.shape[-1])
        return self._overlap_add(frames) / self._overlap_add(envelope)

    def _overlap_add(self, frames: Tensor) -> Tensor:
        """[B, n_fft, N] -> [B, hop * (N - 1)], the half window at either end cut off."""
        length = self.n_fft + self.hop * (frames.shape[-1] - 1)
        summed = F.fold(frames, (1, length), kernel_size=(1, self.n_fft), stride=(1, self.hop))
        return summed[:, 0, 0, self.n_fft // 2 : length - self.n_fft // 2]

import pytest
import torch
from torch import Tensor

from runtime.stage1.istft import STFT


def spectrum(columns: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    magnitude = torch.rand(rows, 9, columns, generator=generator)
    return magnitude, torch.randn(rows, 9, columns, generator=generator)


@pytest.mark.parametrize("columns", [4, 5, 121, 1201])
def test_inverse_equals_torch_istft(columns: int) -> None:
    magnitude, phase = spectrum(columns)
    expected = torch.istft(torch.polar(magnitude, phase), 16, 4, window=torch.hann_window(16))
    torch.testing.assert_close(STFT(16, 4).inverse(magnitude, phase), expected, atol=1e-6, rtol=0)


def test_inverse_undoes_the_transform() -> None:
    samples = torch.randn(2, 4 * 120)
    stft = STFT(16, 4)
    real, imaginary = stft(samples).chunk(2, dim=1)
    whole = torch.complex(real, imaginary)
    assert whole.shape == (2, 9, 121)
    torch.testing.assert_close(stft.inverse(whole.abs(), whole.angle()), samples, atol=1e-5, rtol=0)


def test_envelope_follows_a_changed_window() -> None:
    """Trap 53: nothing is kept from an earlier window."""
    stft = STFT(16, 4)
    magnitude, phase = spectrum(30)
    stft.inverse(magnitude, phase)
    stft.window.copy_(torch.hamming_window(16))
    expected = torch.istft(torch.polar(magnitude, phase), 16, 4, window=torch.hamming_window(16))
    torch.testing.assert_close(stft.inverse(magnitude, phase), expected, atol=1e-6, rtol=0)


def test_window_moves_with_the_module_and_stays_out_of_the_weights() -> None:
    """Traps 48 and 53: both directions use the one buffer, so a move takes window and envelope along."""
    stft = STFT(16, 4).to(torch.float64)
    magnitude, phase = (part.double() for part in spectrum(30))
    assert stft(torch.randn(1, 480, dtype=torch.float64)).dtype == torch.float64
    assert stft.inverse(magnitude, phase).dtype == torch.float64
    assert not stft.state_dict()


def test_neither_direction_waits_for_values() -> None:
    """On the meta device there are no values to look at, so a hidden device sync would raise here."""
    stft = STFT(16, 4).to("meta")
    columns = stft(torch.empty(1, 480, device="meta"))
    assert stft.inverse(columns[:, :9], columns[:, 9:]).shape == (1, 480)

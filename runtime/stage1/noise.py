"""The two random buffers of the model. They are no file but a recipe, and the same for every request (spec 8).

Shapes: N mel frames (50 Hz), S samples (24 kHz). One CPU generator draws them in the order in which the reference
builds its modules; the counts are those of the released model whatever size a checkpoint has. Frames and samples are
counted from the start of the prompt and of the stream, so a hop finds the noise that a whole pass would find.
"""

import torch
from torch import Tensor

from runtime.errors import GenerationError

MEL_BINS = 80
FLOW_FRAMES = 15_000  # 300 s of prompt and speech; the flow has no noise beyond
HARMONICS = 9  # the fundamental and eight above it
BLOCK_SAMPLES = 240_000  # 10 s

_TOKEN_TABLE_NORMALS = 524_880  # 6561 x 80: the flow's embedding
_LAYER_UNIFORMS = 3_328_081  # linear and f0 layers
_PHASE_UNIFORMS = 9  # start phases that never reach the output (spec 5.2)


class NoiseBank:
    """Gaussian noise that the flow starts from, and uniform noise of the vocoder's source.

    The flow's part is drawn at once; the source's part grows by blocks of 10 s as far as somebody asks, each moved to
    the device once. One worker uses a bank: it is not thread-safe.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)
        self._flow = torch.randn(1, MEL_BINS, FLOW_FRAMES, generator=self._generator)[0].to(device)
        torch.randn(_TOKEN_TABLE_NORMALS, generator=self._generator)
        torch.rand(_LAYER_UNIFORMS + _PHASE_UNIFORMS, generator=self._generator)
        self._blocks: list[Tensor] = []

    def flow_noise(self, frames: int) -> Tensor:
        """Standard normals [80, frames] of the first frames, as a view. Raises GenerationError beyond 15,000."""
        if frames > FLOW_FRAMES:
            raise GenerationError(
                f"{frames} mel frames are asked for, the flow has noise for {FLOW_FRAMES} (300 s, prompt included); "
                "split the text"
            )
        return self._flow[:, :frames]

    def source_noise(self, start_sample: int, samples: int) -> Tensor:
        """Uniforms [samples, 9] in [0, 1) from an absolute sample on; goes on past the reference's 300 s."""
        end_sample = start_sample + samples
        while len(self._blocks) * BLOCK_SAMPLES < end_sample:
            self._blocks.append(torch.rand(BLOCK_SAMPLES, HARMONICS, generator=self._generator).to(self.device))
        if not samples:
            return torch.empty(0, HARMONICS, device=self.device)
        first, last = start_sample // BLOCK_SAMPLES, (end_sample - 1) // BLOCK_SAMPLES
        covering = self._blocks[first] if first == last else torch.cat(self._blocks[first : last + 1])
        return covering.narrow(0, start_sample - first * BLOCK_SAMPLES, samples)

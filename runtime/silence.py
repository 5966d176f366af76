"""Silence between sentences, to the sample. The quiet that the model leaves at a sentence's edges counts towards it.

Nothing is held back for it: what was sent stays sent, and the silence is laid before the next chunk. A pause that is
shorter than the quiet already sent can therefore not be kept; the quiet before the next word is cut away then.
"""

import numpy as np

QUIET = 0.005  # of the loudest sample of the sentences around: -46 dB
SHORTEST_QUIET_SECONDS = 0.01  # less is a zero crossing


class SilenceKeeper:
    """What one stream has sent last. Samples [S] float32."""

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate = sample_rate
        self._peak = 0.0
        self._trailing = 0  # quiet samples at the end of what was sent

    def before(self, samples: np.ndarray, seconds: float) -> tuple[int, int]:
        """Zeros to lay before the first chunk of a sentence, and quiet samples to cut from its front."""
        if seconds == 0:
            return 0, 0
        loud = self._loud(samples)
        leading = self._counted(int(loud[0]) if len(loud) else len(samples))
        missing = round(seconds * self._sample_rate) - self._counted(self._trailing) - leading
        return max(0, missing), min(leading, max(0, -missing))

    def after(self, seconds: float) -> int:
        """Zeros to lay after the last chunk, which was sent."""
        if seconds == 0:
            return 0
        return max(0, round(seconds * self._sample_rate) - self._counted(self._trailing))

    def sent(self, samples: np.ndarray) -> None:
        """Remembers a chunk of speech."""
        loud = self._loud(samples)
        self._trailing = len(samples) - 1 - int(loud[-1]) if len(loud) else self._trailing + len(samples)
        self._peak = self._peak_with(samples)

    def _loud(self, samples: np.ndarray) -> np.ndarray:
        return np.flatnonzero(np.abs(samples) > QUIET * self._peak_with(samples))

    def _peak_with(self, samples: np.ndarray) -> float:
        return max(self._peak, float(np.abs(samples).max(initial=0.0)))

    def _counted(self, quiet: int) -> int:
        return quiet if quiet >= SHORTEST_QUIET_SECONDS * self._sample_rate else 0

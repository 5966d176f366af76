"""Keys and values of all live streams: one tensor per layer, rows kept compact at the front.

Shapes: N rows (one per stream), P positions, K key/value heads. Rows and positions are added by blocks when they are
needed and everything is given back when the last stream has left. Whatever no stream has written is zero: attention
multiplies hidden positions by zero, and zero times a leftover NaN would be NaN.
"""

import torch
from torch import Tensor

from runtime.config import QwenConfig
from runtime.stage0.lm import LayerCache

ROW_BLOCK = 8
POSITION_BLOCK = 512  # views end on this grid too; see `view`


class KVCache:
    """Memory of the attention layers. Rows are joined at the end and left anywhere; the last row fills the hole."""

    def __init__(self, config: QwenConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self.rows = 0  # in use
        self._layers = [self._zeros(0, 0) for _ in range(config.num_hidden_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self._layers)

    def reserve(self, rows: int, positions: int) -> None:
        """Makes room for that many rows and positions; what is there stays."""
        for index, old in enumerate(self._layers):  # layer by layer, so that only one is held twice
            _, old_rows, _, old_positions, _ = old.shape
            if rows <= old_rows and positions <= old_positions:
                continue
            self._layers[index] = self._zeros(
                max(old_rows, round_up(rows, ROW_BLOCK)), max(old_positions, round_up(positions, POSITION_BLOCK))
            )
            self._layers[index][:, :old_rows, :, :old_positions] = old

    def join(self, positions: int) -> int:
        """Takes the next free row, with room for that many positions, and tells its index."""
        self.reserve(self.rows + 1, positions)
        self.rows += 1
        return self.rows - 1

    def leave(self, row: int) -> None:
        """Clears a row and moves the last one into it."""
        self.rows -= 1
        if not self.rows:
            self._layers = [self._zeros(0, 0) for _ in self._layers]
            return
        for layer in self._layers:
            layer[:, row] = layer[:, self.rows]
            layer[:, self.rows] = 0

    def row(self, row: int, positions: int) -> list[LayerCache]:
        """The first positions of one row, to fill with a prompt."""
        return [
            (layer[0, row : row + 1, :, :positions], layer[1, row : row + 1, :, :positions]) for layer in self._layers
        ]

    def view(self, positions: int) -> list[LayerCache]:
        """All rows in use, up to the longest.

        The end is rounded up to whole blocks: kernels then sum a row in the same order whatever its neighbours' length.
        """
        self.reserve(self.rows, positions)
        end = round_up(positions, POSITION_BLOCK)
        return [(layer[0, : self.rows, :, :end], layer[1, : self.rows, :, :end]) for layer in self._layers]

    def _zeros(self, rows: int, positions: int) -> Tensor:
        shape = (2, rows, self._config.num_key_value_heads, positions, self._config.head_dim)
        return torch.zeros(shape, device=self._device, dtype=self._dtype)


def round_up(count: int, block: int) -> int:
    return -(-count // block) * block

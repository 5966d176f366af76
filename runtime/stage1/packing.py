"""Where the pieces of one solve lie, as the tables that kernels read.

Shapes: T frames of all pieces laid end to end, then unused ones up to a capacity. All tables are int64 and parts of one
tensor, so that a solve uploads one. Memory is named by its place, in multiples of 16 bytes from an anchor that kernels
know, so that they may rely on its alignment; 0 is nothing. Pure bookkeeping: no arithmetic of the flow.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.stage1.past import BlockShape, PastBlock
from runtime.stage1.solver import Piece

FRAME_TABLES = 6
TILE_COLUMNS = 5
PLACE_BYTES = 16
TILE_FRAMES = 64  # queries of one program of the attention


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much the tables of a solve have room for."""

    frames: int
    tiles: int
    past_blocks: int

    @property
    def numbers(self) -> int:
        return FRAME_TABLES * self.frames + TILE_COLUMNS * self.tiles + self.past_blocks

    def holds(self, other: "Capacity") -> bool:
        return self.frames >= other.frames and self.tiles >= other.tiles and self.past_blocks >= other.past_blocks


def ladder(largest_frames: int) -> list[int]:
    """Sizes of graphs: steps of 64 frames, above 1,024 of an eighth, so that 12 % of a large one are unused at most."""
    sizes, frames = [], 64
    while frames <= largest_frames:
        sizes.append(frames)
        frames += max(64, 2 ** (frames.bit_length() - 4))
    return sizes


def room(frames: int) -> Capacity:
    """For pieces of 50 frames and more, each of which may have its own past."""
    pieces = frames // 50 + 2
    return rounded(Capacity(frames, frames // TILE_FRAMES + pieces, max(64, 32 * pieces)))


def rounded(least: Capacity) -> Capacity:
    """A little more, so that each table begins at a multiple of 16 bytes: else kernels would be compiled anew."""
    return Capacity(*(-(-size // step) * step for size, step in zip(astuple(least), (64, 2, 2), strict=True)))


def needed(pieces: Sequence[Piece]) -> Capacity:
    """The least that these pieces need."""
    return Capacity(
        sum(piece.frames for piece in pieces),
        sum(-(-piece.frames // TILE_FRAMES) for piece in pieces),
        sum(len(piece.past.blocks) for piece in pieces if piece.past),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Views of one tensor of `Capacity.numbers`."""

    begins: Tensor  # [T] first frame of the piece a frame belongs to; an unused frame is a piece of its own
    seen: Tensor  # [T] keys that it sees, those of the past included
    positions: Tensor  # [T] absolute frame
    tails: Tensor  # [T] place of the convolutions' inputs before the piece
    kv_keeps: Tensor  # [T] place to which keys and values are to be written
    tail_keeps: Tensor  # [T] place to which the convolutions' inputs are to be written
    tiles: Tensor  # [n, 5] first frame, frames, first frame of the piece, place in `past`, frames of the past
    past: Tensor  # [k] places of the keys and values of the pasts' blocks

    @classmethod
    def of(cls, numbers: Tensor, capacity: Capacity) -> "Tables":
        frames, rest = numbers[: FRAME_TABLES * capacity.frames], numbers[FRAME_TABLES * capacity.frames :]
        tiles, past = rest[: TILE_COLUMNS * capacity.tiles], rest[TILE_COLUMNS * capacity.tiles :]
        begins, seen, positions, tails, kv_keeps, tail_keeps = frames.view(FRAME_TABLES, -1)
        return cls(begins, seen, positions, tails, kv_keeps, tail_keeps, tiles.view(-1, TILE_COLUMNS), past)


def lay_out(
    pieces: Sequence[Piece],
    kept: Sequence[Sequence[PastBlock]],
    shape: BlockShape,
    capacity: Capacity,
    anchor: int,
) -> Tensor:
    """The numbers of the tables. `kept` are the blocks that each piece is to fill, `anchor` is an address."""

    def place(tensor: Tensor) -> int:
        units, rest = divmod(tensor.data_ptr() - anchor, PLACE_BYTES)
        assert units and not rest
        return units

    frame = np.zeros((FRAME_TABLES, capacity.frames), np.int64)
    begins, seen, positions, tails, kv_keeps, tail_keeps = frame
    tiles: list[tuple[int, int, int, int, int]] = []
    past: list[int] = []
    kv_row, tail_row = (size * shape.dtype.itemsize // PLACE_BYTES for size in (2 * shape.width, shape.dim))
    begin = 0
    for piece, blocks in zip(pieces, kept, strict=True):
        end, total = begin + piece.frames, piece.start + piece.frames
        at = np.arange(piece.start, total)
        begins[begin:end], positions[begin:end] = begin, at
        seen[begin:end] = np.minimum(at - at % shape.frames + shape.frames, total) if piece.chunked else total
        if piece.past:
            tails[begin:end] = place(piece.past.blocks[-1].tails)
        for number, block in enumerate(blocks):
            first, last = begin + number * shape.frames, begin + (number + 1) * shape.frames
            kv_keeps[first:last] = place(block.kv) + kv_row * np.arange(shape.frames)
            tail_keeps[last - shape.left : last] = place(block.tails) + tail_row * np.arange(shape.left)
        cuts = range(begin, end, TILE_FRAMES)
        tiles += [(cut, min(TILE_FRAMES, end - cut), begin, len(past), piece.start) for cut in cuts]
        past += [place(block.kv) for block in piece.past.blocks] if piece.past else []
        begin = end
    begins[begin:] = np.arange(begin, capacity.frames)
    tiles.sort(key=lambda tile: -seen[tile[0] + tile[1] - 1])  # the longest first: none is left over at the end
    table = np.zeros((capacity.tiles, TILE_COLUMNS), np.int64)
    table[: len(tiles)] = np.array(tiles, np.int64).reshape(-1, TILE_COLUMNS)
    blocks_table = np.zeros(capacity.past_blocks, np.int64)
    blocks_table[: len(past)] = past
    return torch.from_numpy(np.concatenate((frame.ravel(), table.ravel(), blocks_table)))

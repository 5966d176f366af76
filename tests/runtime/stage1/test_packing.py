"""The tables of a solve say of each frame what a piece by itself would say."""

import dataclasses

import pytest
import torch

from runtime.stage1.packing import Capacity, Tables, ladder, lay_out, needed, room, rounded
from runtime.stage1.past import BlockShape, Past, PastBlock
from runtime.stage1.solver import Piece

SHAPE = BlockShape(
    steps=2, layers=3, frames=50, width=16, left=30, dim=24, dtype=torch.float32, device=torch.device("cpu")
)
ANCHOR = torch.zeros(64)


def piece(frames: int, chunked: bool = True, blocks: int = 0, keep: int = 0) -> Piece:
    zeros = torch.zeros(80, frames)
    past = Past(tuple(SHAPE.new() for _ in range(blocks))) if blocks else None
    return Piece(zeros, zeros, zeros, zeros[:, 0], chunked, past, keep)


def tables(pieces: list[Piece], kept: list[list[PastBlock]] | None = None, spare: int = 0) -> Tables:
    least = needed(pieces)
    capacity = Capacity(least.frames + spare, least.tiles + 2, least.past_blocks + 3)
    numbers = lay_out(pieces, kept or [[] for _ in pieces], SHAPE, capacity, ANCHOR.data_ptr())
    assert len(numbers) == capacity.numbers
    return Tables.of(numbers, capacity)


def test_a_streaming_frame_sees_its_block_and_what_was_before() -> None:
    whole = tables([piece(120)])
    assert whole.seen.tolist() == [50] * 50 + [100] * 50 + [120] * 20
    behind = tables([piece(70, blocks=2)])
    assert behind.seen.tolist() == [150] * 50 + [170] * 20
    assert behind.positions.tolist() == list(range(100, 170))


def test_a_frame_of_the_last_chunk_sees_all() -> None:
    assert set(tables([piece(120, chunked=False)]).seen.tolist()) == {120}


def test_every_frame_lies_in_one_tile_of_its_own_piece() -> None:
    pieces = [
        piece(frames, chunked) for frames, chunked in ((1, True), (49, False), (64, True), (65, False), (200, True))
    ]
    laid = tables(pieces, spare=9)
    covered = torch.zeros(len(laid.begins), dtype=torch.long)
    for first, frames, begin, _, past_frames in laid.tiles.tolist():
        covered[first : first + frames] += 1
        assert past_frames == 0 and set(laid.begins[first : first + frames].tolist()) <= {begin}
    assert covered.tolist() == [1] * 379 + [0] * 9


def test_the_longest_tiles_come_first() -> None:
    laid = tables([piece(10), piece(200), piece(50, blocks=8)])
    seen = [int(laid.seen[first + frames - 1]) for first, frames, *_ in laid.tiles.tolist() if frames]
    assert seen == sorted(seen, reverse=True)


def test_an_unused_frame_is_a_piece_of_its_own_without_past_or_memory() -> None:
    laid = tables([piece(60, blocks=1)], [[SHAPE.new()]], spare=4)
    assert laid.begins[60:].tolist() == [60, 61, 62, 63]
    for table in (laid.seen, laid.tails, laid.kv_keeps, laid.tail_keeps):
        assert not table[60:].any()


def test_places_lead_to_the_blocks() -> None:
    first, second = piece(100, blocks=2), piece(70, blocks=1)
    laid = tables([first, second])

    def address(places: torch.Tensor) -> list[int]:
        return [ANCHOR.data_ptr() + 16 * place for place in places.tolist()]

    blocks = [block for one in (first, second) if one.past for block in one.past.blocks]
    assert address(laid.past[:3]) == [block.kv.data_ptr() for block in blocks]
    assert set(address(laid.tails[:100])) == {blocks[1].tails.data_ptr()}
    assert set(address(laid.tails[100:])) == {blocks[2].tails.data_ptr()}
    starts = {begin: (place, frames) for _, count, begin, place, frames in laid.tiles.tolist() if count}
    assert starts == {0: (0, 100), 100: (2, 50)}


def test_only_frames_of_new_blocks_are_written_and_only_the_last_inputs_of_each() -> None:
    block = SHAPE.new()
    laid = tables([piece(7), piece(80, keep=50)], [[], [block]])
    row, tail_row = (size * 4 // 16 for size in (2 * SHAPE.width, SHAPE.dim))
    kv, tails = ((part.data_ptr() - ANCHOR.data_ptr()) // 16 for part in (block.kv, block.tails))
    assert laid.kv_keeps.tolist() == [0] * 7 + [kv + row * frame for frame in range(50)] + [0] * 30
    assert laid.tail_keeps.tolist() == [0] * 27 + [tails + tail_row * frame for frame in range(30)] + [0] * 30


@pytest.mark.parametrize("lengths", [(1,), (37, 50), (51, 49, 7), (4097,)])
def test_every_table_begins_where_a_kernel_may_read_sixteen_bytes(lengths: tuple[int, ...]) -> None:
    """Kernels are compiled for the alignment of what they are given: an odd length would compile in mid-speech."""
    least = needed([piece(frames, blocks=1) for frames in lengths])
    capacity = rounded(least)
    assert capacity.holds(least)
    for one in (capacity, room(64 * len(lengths))):
        numbers = torch.zeros(one.numbers, dtype=torch.long)
        laid = Tables.of(numbers, one)
        tables = [getattr(laid, field.name) for field in dataclasses.fields(laid)]
        assert all((table.data_ptr() - numbers.data_ptr()) % 16 == 0 for table in tables)


@pytest.mark.parametrize("frames", [1, 64, 100, 250, 424, 850, 1025, 3000, 4096])
def test_a_graph_wastes_little_and_has_room_for_whole_blocks(frames: int) -> None:
    size = min(size for size in ladder(4096) if size >= frames)
    assert size - frames <= max(63, 0.125 * frames)
    pieces = [piece(50, blocks=10) for _ in range(frames // 50)] or [piece(frames)]
    assert room(size).holds(dataclasses.replace(needed(pieces), frames=frames))

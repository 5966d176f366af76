"""The attention kernel by itself, on a GPU: what a query sees, and that nothing else weighs anything."""

import pytest
import torch
import torch.nn.functional as F

from runtime.stage1.packing import Tables, lay_out, needed
from runtime.stage1.past import BlockShape, Past
from runtime.stage1.solver import Piece

pytestmark = pytest.mark.cuda
GPU = torch.device("cuda")
HEADS, CHANNELS = 2, 64
WIDTH = HEADS * CHANNELS


def piece(frames: int, chunked: bool = True, past: Past | None = None) -> Piece:
    zeros = torch.zeros(80, frames, device=GPU)
    return Piece(zeros, zeros, zeros, zeros[:, 0], chunked, past)


def shape(dtype: torch.dtype) -> BlockShape:
    return BlockShape(1, 1, 50, WIDTH, 30, 16, dtype, GPU)


def attended(qkv: torch.Tensor, pieces: list[Piece]) -> torch.Tensor:
    from runtime.stage1.attention import attend

    anchor = torch.zeros(8, dtype=qkv.dtype, device=GPU)
    capacity = needed(pieces)
    numbers = lay_out(pieces, [[] for _ in pieces], shape(qkv.dtype), capacity, anchor.data_ptr()).to(GPU)
    tables = Tables.of(numbers, capacity)
    return attend(qkv, tables.tiles, tables.seen, tables.past, anchor, heads=HEADS, block_frames=50, past_offset=0)


def expected(qkv: torch.Tensor, pieces: list[Piece]) -> torch.Tensor:
    """In float64, one piece and one block of queries at a time, with the keys that it sees and no others."""
    out, begin = [], 0
    for one in pieces:
        own = qkv[:, begin : begin + one.frames].double()
        kv = own[..., WIDTH:]
        if one.past:
            kv = torch.cat((*(block.kv[0, 0].double() for block in one.past.blocks), kv), dim=1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (own[..., :WIDTH], *kv.chunk(2, dim=-1)))
        step = 50 if one.chunked else one.frames
        for first in range(0, one.frames, step):
            seen = one.start + first + step
            heads = F.scaled_dot_product_attention(q[:, :, first : first + step], k[:, :, :seen], v[:, :, :seen])
            out.append(heads.transpose(1, 2).flatten(2))
        begin += one.frames
    return torch.cat(out, dim=1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("length", [1, 49, 50, 51, 99, 424, 2500])
def test_a_query_sees_its_keys(dtype, tolerance, length):
    torch.manual_seed(length)
    past = Past(tuple(shape(dtype).new() for _ in range(3)))
    for block in past.blocks:
        block.kv.normal_()
    pieces = [piece(length), piece(length, False), piece(33, True, past), piece(length, True, past)]
    qkv = torch.randn(2, sum(one.frames for one in pieces), 3 * WIDTH, device=GPU).to(dtype)
    torch.testing.assert_close(attended(qkv, pieces).double(), expected(qkv, pieces), atol=tolerance, rtol=0)


def test_huge_scores_give_unseen_keys_no_weight():
    """Trap 42: scores of 1e5 and more, with which a finite number in place of minus infinity is not enough."""
    qkv = torch.randn(2, 130, 3 * WIDTH, device=GPU)
    qkv[..., : 2 * WIDTH] *= 300
    pieces = [piece(130)]
    clean = attended(qkv, pieces)
    torch.testing.assert_close(clean.double(), expected(qkv, pieces), atol=1e-3, rtol=0)
    qkv[:, 50:, 2 * WIDTH :] = 1e30
    qkv[:, 50:, WIDTH : 2 * WIDTH] *= 30
    assert torch.equal(attended(qkv, pieces)[:, :50], clean[:, :50])


def test_scores_that_are_all_minus_huge_stay_finite():
    qkv = torch.ones(2, 70, 3 * WIDTH, device=GPU)
    qkv[..., :WIDTH] = -1e4
    qkv[..., WIDTH : 2 * WIDTH] = 1e4
    torch.testing.assert_close(attended(qkv, [piece(70)]), torch.ones(2, 70, WIDTH, device=GPU))

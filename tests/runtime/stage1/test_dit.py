"""The DiT estimator against the official one, and what its masks promise.

Trap 19, on the flow's side as well, is held in test_checkpoint.py: released names and shapes, strict loading.
"""

import pytest
import torch
from torch import Tensor

from runtime.errors import CheckpointError, EngineUnavailable
from runtime.settings import EngineSettings
from runtime.stage1.base import build_solver, check_finite, load_flow
from runtime.stage1.conditioning import Flow
from runtime.stage1.dit import DiT, chunk_mask, rotary_frequencies, rotate_first_head, sinusoid
from runtime.stage1.noise import NoiseBank
from tests import golden
from tests.runtime.stage1.tiny_flow import CPU, flow_config, flow_weights, tiny_flow


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return golden.load("flow_io")


@pytest.fixture(scope="module")
def dit() -> DiT:
    return tiny_flow().estimator


def close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, atol=2e-5, rtol=0)


@torch.inference_mode()
def velocity(
    dit: DiT, io: dict[str, Tensor], *, chunked: bool, mask: Tensor | None = None, **changed: Tensor
) -> Tensor:
    given = {name: io[f"dit.{name}"] for name in ("x", "mu", "t", "cond")} | {"speaker": io["dit.spks"]} | changed
    return dit(mask=mask, chunked=chunked, **given)


@pytest.mark.parametrize(("chunked", "name"), [(False, "full"), (True, "stream")])
def test_velocity_matches_golden(dit: DiT, io: dict[str, Tensor], chunked: bool, name: str) -> None:
    close(velocity(dit, io, chunked=chunked), io[f"dit.out_{name}"])
    close(velocity(dit, io, chunked=chunked, mask=io["dit.mask_padded"]), io[f"dit.out_{name}_padded"])


@torch.inference_mode()
def test_embeddings_match_golden(dit: DiT, io: dict[str, Tensor]) -> None:
    close(dit.time_embed(io["dit.t"], torch.float32), io["dit.time_emb"])
    row = {name: io[f"dit.{name}"][:1] for name in ("x", "cond", "mu", "spks")}
    close(dit.input_embed(row["x"], row["cond"], row["mu"], row["spks"]), io["dit.input_emb"])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["full", "stream"])
def test_first_block_matches_golden(dit: DiT, io: dict[str, Tensor], name: str) -> None:
    block, rotary = dit.transformer_blocks[0], dit.rotary_embed(130)
    visible = chunk_mask(130, 50, CPU) if name == "stream" else None
    close(block.attn(io["dit.block0_attn_in"], rotary, visible, None), io[f"dit.{name}.block0_attn"])
    c = torch.nn.functional.silu(io["dit.time_emb"][:1])
    close(block(io["dit.input_emb"], c, rotary, visible, None), io[f"dit.{name}.block0_out"])


@torch.inference_mode()
def test_rotary_turns_head_zero_alone(dit: DiT, io: dict[str, Tensor]) -> None:
    angle = torch.arange(130).float()[:, None] * dit.rotary_embed.inv_freq
    close(angle.repeat_interleave(2, dim=-1), io["dit.rope_freqs"][0])
    projected = dit.transformer_blocks[0].attn.to_q(io["dit.block0_attn_in"])
    close(projected, io["dit.block0_q_projected"])
    rotated = rotate_first_head(projected, dit.rotary_embed(130))
    close(rotated, io["dit.block0_q_rotated"])
    assert torch.equal(rotated[..., 16:], projected[..., 16:])


def test_sinusoid_puts_sines_first() -> None:
    wave = sinusoid(torch.tensor([0.0]), 256)
    assert wave[0].tolist() == [0.0] * 128 + [1.0] * 128


def test_a_mask_of_ones_changes_nothing(dit: DiT, io: dict[str, Tensor]) -> None:
    ones = torch.ones(2, 1, 130)
    for chunked in (False, True):
        close(velocity(dit, io, chunked=chunked, mask=ones), velocity(dit, io, chunked=chunked))


def test_chunk_frames_see_no_later_chunk(dit: DiT, io: dict[str, Tensor]) -> None:
    changed = io["dit.x"].clone()
    changed[:, :, 100:] += 5.0
    before, after = velocity(dit, io, chunked=True), velocity(dit, io, chunked=True, x=changed)
    assert torch.equal(before[:, :, :100], after[:, :, :100])
    assert not torch.equal(
        velocity(dit, io, chunked=False)[:, :, :100], velocity(dit, io, chunked=False, x=changed)[:, :, :100]
    )


@pytest.mark.parametrize("times", [torch.tensor(0.3), torch.tensor([0.3])])
def test_each_row_needs_its_own_time(dit: DiT, io: dict[str, Tensor], times: Tensor) -> None:
    """Trap 32."""
    with pytest.raises(AssertionError, match="one time for each of the 2 rows"):
        velocity(dit, io, chunked=False, t=times)


def test_rows_do_not_see_each_other(dit: DiT, io: dict[str, Tensor]) -> None:
    alone = velocity(dit, io, chunked=False)
    broken = io["dit.x"].clone()
    broken[1] = torch.nan
    close(velocity(dit, io, chunked=False, x=broken)[0], alone[0])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_padding_never_leaks(dit: DiT, io: dict[str, Tensor], chunked: bool, poison: float) -> None:
    """Trap 43: whatever padded frames hold, real frames stay as they were."""
    mask = io["dit.mask_padded"]
    poisoned = {name: io[f"dit.{name}"].masked_fill(mask == 0, poison) for name in ("x", "mu", "cond")}
    clean = velocity(dit, io, chunked=chunked, mask=mask)
    close(velocity(dit, io, chunked=chunked, mask=mask, **poisoned)[1, :, :101], clean[1, :, :101])


@torch.inference_mode()
def test_masked_keys_weigh_nothing_under_huge_logits(dit: DiT) -> None:
    """Trap 42: there is no QK norm, so no finite stand-in for -inf is far enough below the logits."""
    attention = dit.transformer_blocks[0].attn
    u = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(2)) * 1e4  # logits of 1e6 to 1e8
    padding = (torch.arange(8) >= 5)[None, :, None]
    visible = ~padding.transpose(1, 2)[:, None]
    rotary = dit.rotary_embed(8)
    masked = attention(u, rotary, visible, padding)[:, :5]
    short = attention(u[:, :5], dit.rotary_embed(5), None, None)
    torch.testing.assert_close(masked, short, atol=0, rtol=1e-4)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_is_cast_once_and_stays_near(io: dict[str, Tensor], precision: str) -> None:
    half = tiny_flow(EngineSettings(flow_precision=precision)).estimator
    assert {weight.dtype for weight in half.parameters()} == {getattr(torch, precision)} == {half.dtype}
    assert torch.equal(half.rotary_embed.inv_freq, rotary_frequencies(16))  # tables stay in float32
    out = velocity(half, io, chunked=True, mask=io["dit.mask_padded"])
    assert out.dtype == half.dtype
    expected = io["dit.out_stream_padded"]
    assert (out.float() - expected).norm() / expected.norm() < 0.02


def test_precision_that_overflows_is_refused_at_load() -> None:
    """Trap 21."""
    weights = flow_weights()
    weights["decoder.estimator.transformer_blocks.0.attn.to_v.weight"] *= 1e6
    noise = NoiseBank(CPU)
    for precision in ("float16", "bfloat16"):
        flow = load_flow(flow_config(), weights, CPU)
        solver = build_solver(flow, EngineSettings(flow_precision=precision))
        if precision == "bfloat16":
            check_finite(solver, flow, noise)
        else:
            with pytest.raises(EngineUnavailable, match="overflows in float16"):
                check_finite(solver, flow, noise)


def test_every_buffer_comes_from_the_file() -> None:
    """Trap 20: the flow is built without values, so a table outside the file would be left unset."""
    with torch.device("meta"):
        flow = Flow(flow_config())
    assert {name for name, _ in flow.named_buffers()} == {"estimator.rotary_embed.inv_freq"} <= flow.state_dict().keys()


def test_rotary_buffer_is_held_to_the_formula() -> None:
    weights = flow_weights()
    name = "decoder.estimator.rotary_embed.inv_freq"
    weights[name] = weights[name].half().float()  # storage in half precision is forgiven, and undone
    assert torch.equal(load_flow(flow_config(), weights, CPU).estimator.rotary_embed.inv_freq, rotary_frequencies(16))
    weights[name] = weights[name] * 1.1
    with pytest.raises(CheckpointError, match="inv_freq"):
        load_flow(flow_config(), weights, CPU)

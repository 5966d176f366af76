"""The Euler solver. Traps 32 and 33: one time per row, and one documented layout of guidance pairs."""

import torch
from torch import Tensor

from runtime.stage1.noise import NoiseBank
from runtime.stage1.solver import guide, pair, schedule, solve
from tests import golden
from tests.runtime.stage1.tiny_flow import CPU, tiny_flow


class Recorder:
    """An estimator that notes what it is asked and moves each row by a rule of its own."""

    name = "recorder"
    dtype = torch.float32

    def __init__(self) -> None:
        self.asked: list[dict[str, Tensor]] = []

    def __call__(
        self, x: Tensor, mask: Tensor | None, mu: Tensor, t: Tensor, speaker: Tensor, cond: Tensor, *, chunked: bool
    ) -> Tensor:
        self.asked.append({"x": x, "mu": mu, "t": t, "speaker": speaker, "cond": cond})
        return mu + speaker[:, :, None] + cond


def test_schedule_is_the_cosine_one_with_accumulated_time() -> None:
    io = golden.load("flow_io")
    plan = schedule(10)
    torch.testing.assert_close(torch.tensor([t for t, _ in plan]), io["cfm.t_seen"], atol=1e-6, rtol=0)
    ends = torch.tensor([t + width for t, width in plan])
    torch.testing.assert_close(ends, io["cfm.t_span"][1:], atol=1e-6, rtol=0)


def test_guidance_of_rate_zero_is_the_conditional_velocity() -> None:
    conditional, unconditional = torch.randn(2, 1, 80, 7).unbind()
    assert torch.equal(guide(conditional, unconditional, 0.0), conditional)
    torch.testing.assert_close(guide(conditional, unconditional, 0.7), 1.7 * conditional - 0.7 * unconditional)


def test_solver_matches_golden() -> None:
    io = golden.load("flow_io")
    noise = NoiseBank(CPU).flow_noise(64)[None]
    with torch.inference_mode():
        out = solve(
            tiny_flow().estimator,
            noise,
            io["cfm.mu"],
            io["cfm.spks"],
            io["cfm.cond"],
            steps=10,
            rate=0.7,
            chunked=False,
        )
    torch.testing.assert_close(out, io["cfm.out"], atol=5e-5, rtol=0)


def test_rows_are_pairs_with_one_time_each() -> None:
    """Traps 32 and 33."""
    estimator = Recorder()
    mu, speaker, cond = torch.randn(3, 80, 6), torch.randn(3, 80), torch.randn(3, 80, 6)
    solve(estimator, torch.randn(3, 80, 6), mu, speaker, cond, steps=4, rate=0.7, chunked=False)
    for asked in estimator.asked:
        assert asked["t"].shape == (6,)
        for given, rows in ((mu, asked["mu"]), (speaker, asked["speaker"]), (cond, asked["cond"])):
            assert torch.equal(rows[0::2], given)
            assert not rows[1::2].any()
        assert torch.equal(asked["x"][0::2], asked["x"][1::2])


def test_a_stream_gets_the_same_mel_alone_and_in_a_batch() -> None:
    """Padding of a shorter neighbour and its values, NaN included, stay on its own side (trap 43)."""
    estimator = tiny_flow().estimator
    noise, mu, cond = (torch.randn(2, 80, 60) for _ in range(3))
    speaker = torch.randn(2, 80)
    mask = torch.ones(2, 1, 60, dtype=torch.bool)
    mask[1, :, 41:] = False
    mu[1, :, 41:] = torch.nan
    rule = {"steps": 3, "rate": 0.7, "chunked": True}
    with torch.inference_mode():
        both = solve(estimator, noise, mu, speaker, cond, mask=mask, **rule)
        for row, frames in enumerate((60, 41)):
            alone = solve(
                estimator,
                noise[row : row + 1, :, :frames],
                mu[row : row + 1, :, :frames],
                speaker[row : row + 1],
                cond[row : row + 1, :, :frames],
                **rule,
            )
            torch.testing.assert_close(both[row, :, :frames], alone[0], atol=5e-5, rtol=0)


def test_guidance_and_state_stay_in_float32_under_a_half_precision_estimator() -> None:
    velocity = torch.randn(2, 80, 5).bfloat16()

    class Half(Recorder):
        def __call__(self, x: Tensor, *rest: Tensor | None, **attention: bool) -> Tensor:
            assert x.dtype == torch.float32
            return velocity

    noise, zeros = torch.randn(1, 80, 5), torch.zeros(1, 80, 5)
    out = solve(Half(), noise, zeros, zeros[:, :, 0], zeros, steps=2, rate=0.7, chunked=False)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, noise + guide(velocity[:1].float(), velocity[1:].float(), 0.7))


def test_pairs_alternate() -> None:
    assert pair(torch.tensor([1, 2]), torch.tensor([-1, -2])).tolist() == [1, -1, 2, -2]


def test_a_walk_that_starts_late_takes_the_steps_that_are_left():
    class Ones:
        dtype = torch.float32

        def __call__(self, x, *_, **__):
            return torch.ones_like(x)

    between, zeros = torch.randn(1, 80, 6), torch.zeros(1, 80, 6)
    late = schedule(6)[3][0]
    rule = {"steps": 6, "rate": 0.7, "chunked": False}
    out = solve(Ones(), between, zeros, zeros[:, :, 0], zeros, start=late, **rule)
    torch.testing.assert_close(out, between + (1 - late), atol=1e-5, rtol=0)

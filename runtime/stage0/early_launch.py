"""Kernels that start before the one ahead of them has ended (programmatic dependent launch, GPUs from Hopper on).

Such a kernel is launched with `early_launch(device)` and calls `begin` before it reads anything that the kernel ahead
writes. What was there before that one started may be read sooner: weights, and the tables of the work.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """What a kernel is told, EARLY among it."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@triton.jit
def begin(EARLY: tl.constexpr):
    """Waits for what the kernel before this one wrote."""
    if EARLY:
        gdc_wait()


@triton.jit
def nearly_done(EARLY: tl.constexpr):
    """Lets the next kernel start. Any sooner, and kernels far ahead take the place of those that have work."""
    if EARLY:
        gdc_launch_dependents()

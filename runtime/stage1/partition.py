"""A share of a GPU for stage 1, so that the steps of stage 0 find multiprocessors free of its long kernels.

A step is some hundred short kernels. Without a share of their own each waits until one of stage 1's blocks is done.
"""

from functools import cache
from typing import Any

import torch
from torch.cuda.green_contexts import GreenContext

from runtime.errors import EngineUnavailable

GRANULE = 8  # multiprocessors that only come together, on Hopper; older GPUs have smaller ones


def stage1_stream(device: torch.device, reserved: int) -> torch.cuda.Stream:
    """A new stream whose kernels leave so many multiprocessors alone. What is captured on it does so wherever it runs.

    Raises EngineUnavailable when the GPU, its driver or torch cannot divide it so.
    """
    if not reserved:
        return torch.cuda.Stream(device)
    return _share(device.index or 0, reserved).Stream()


def left_over(multiprocessors: int, reserved: int) -> int:
    """Multiprocessors for stage 1 when at least so many are kept from it. Raises EngineUnavailable when none are."""
    left = (multiprocessors - reserved) // GRANULE * GRANULE
    if left <= 0:
        raise EngineUnavailable(
            f"reserved_multiprocessors is {reserved}, and the GPU has {multiprocessors}; leave some to stage 1"
        )
    return left


@cache  # a context lives as long as its streams and graphs: until the process ends
def _share(index: int, reserved: int) -> Any:
    left = left_over(torch.cuda.get_device_properties(index).multi_processor_count, reserved)
    try:
        torch.zeros(1, device=torch.device("cuda", index))  # the share is one of a context that must be there
        share: Any = GreenContext.create(num_sms=left, device_id=index)
        share.Stream()
    except (RuntimeError, AttributeError) as error:
        raise EngineUnavailable(
            f"this GPU cannot be divided between the stages ({error}); set reserved_multiprocessors to 0"
        ) from error
    return share

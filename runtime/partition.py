"""A share of a GPU for stage 1, so that the steps of stage 0 find multiprocessors free of its long kernels.

A step is some hundred short kernels. Without a share of their own each waits until one of stage 1's blocks is done.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch.cuda.green_contexts import GreenContext

from runtime.errors import EngineUnavailable

log = logging.getLogger(__name__)
GRANULE = 8  # multiprocessors that only come together, on Hopper; older GPUs have smaller ones
AUTO_SHARE = 8  # an eighth of them is kept from stage 1 unless the settings say otherwise
AUTO_LEAST = 64  # of a GPU with fewer none is


def stage1_stream(device: torch.device, reserved: int) -> torch.cuda.Stream:
    """A new stream whose kernels leave so many multiprocessors alone. What is captured on it does so wherever it runs.

    Raises EngineUnavailable when the GPU, its driver or torch cannot divide it so.
    """
    if not reserved:
        return torch.cuda.Stream(device)
    return _share(device.index or 0, reserved).Stream()


def reserved_of(device: torch.device, wanted: int | None) -> int:
    """Multiprocessors that are kept from stage 1; None leaves it to the GPU. On a CPU there are none."""
    if device.type != "cuda" or wanted is not None:
        return wanted or 0
    count = torch.cuda.get_device_properties(device).multi_processor_count
    if count < AUTO_LEAST:
        return 0
    try:
        _share(device.index or 0, count // AUTO_SHARE)
    except EngineUnavailable as error:
        log.info("both stages use the whole GPU: %s", error)
        return 0
    return count // AUTO_SHARE


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

"""Which threads' arithmetic may take more than one core of a CPU.

OpenMP keeps a team of helpers for every thread that asks for one. Once all teams together have more members than there
are cores, libgomp has them sleep between two operations, and waking them costs as much as a small operation does. So
one thread alone has a team, the worker of stage 1; on two cores that makes the demo voice a third faster. A language
model whose weights one core cannot read in time keeps a team as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from threadpoolctl import ThreadpoolController
from torch import nn

ONE_CORE_BYTES = 128 * 2**20  # of weights, read 25 times a second and more by one core


def fits_one_core(module: nn.Module) -> bool:
    """Whether one core is enough for a network on a CPU that reads all its weights at each step."""
    weights = list(module.parameters())
    return weights[0].device.type == "cpu" and sum(weight.nbytes for weight in weights) <= ONE_CORE_BYTES


@contextmanager
def one_core() -> Iterator[None]:
    """Within it, the calling thread asks for no team."""
    torch.get_num_threads()  # torch sets its own number when a thread first asks
    with _openmp().limit(limits=1):
        yield


@cache
def _openmp() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")  # looks at what is loaded, torch among it

"""CUDA graphs: a run of kernels recorded once, at load, and started afterwards with one call.

A graph reads and writes fixed memory. What goes in is copied there beforehand by its owner; what comes out lies in the
table's memory until the next replay, and whoever wants to keep it copies it. All graphs of a table share one pool, as
only one of them runs at a time: the largest is captured first, and the others find room in what it left.
"""

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)
KeyT = TypeVar("KeyT", bound=Hashable)
Run = Callable[[], Tensor]


class Replayable(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Captured:
    graph: Replayable
    output: Tensor
    num_bytes: int  # of device memory, the driver's share included


class CudaCapture:
    """Records runs on one device into one pool. Other threads may use CUDA meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin()

    def _begin(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: memory of a pool is reused within a stream only.
        current = torch.cuda.current_stream(self._device)
        on_default = current == torch.cuda.default_stream(self._device)  # which cannot be captured on
        self._side = torch.cuda.Stream(self._device) if on_default else current

    def __call__(self, run: Run) -> Captured:
        """Runs twice to warm up (kernels are compiled, libraries take their workspaces), then records."""
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), self._side
            side.wait_stream(current)
            with torch.cuda.stream(side):
                run(), run()
            current.wait_stream(side)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what the warm-up took would be counted as free
            free, _ = torch.cuda.mem_get_info()
            graph = torch.cuda.CUDAGraph()
            collecting = gc.isenabled()
            gc.disable()  # what a collection frees within a capture would break it; one before each would add up
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                    output = run()
            except BaseException:
                torch.cuda.set_stream(current)  # a capture that broke off leaves its stream behind as the current one
                self._begin()  # and its pool in a state of recording, which no further capture may join
                raise
            finally:
                if collecting:
                    gc.enable()
            graph.replay()  # the first replay moves the graph to the device, which takes memory too
            torch.cuda.synchronize()
            return Captured(graph, output, max(0, free - torch.cuda.mem_get_info()[0]))


class GraphTable(Generic[KeyT]):
    """Graphs by key, bounded in bytes and number. One worker drives it.

    Above the number the least recently used goes. What would pass the bytes is not kept: a shared pool gives memory
    back with its last graph only, so that to put out another one would not make room.
    """

    def __init__(self, capture: Callable[[Run], Captured], *, limit_bytes: int, max_graphs: int = 64) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.replays = self.eager_runs = self.evictions = self.refusals = 0
        self._max_graphs = max_graphs
        self._capture = capture
        self._graphs: OrderedDict[KeyT, Captured] = OrderedDict()
        self._disabled: set[KeyT] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._graphs

    def capture(self, key: KeyT, run: Run) -> bool:
        """Records `run` under `key`. When that fails or does not fit the key is disabled: it runs eagerly for good."""
        if key in self._graphs or key in self._disabled:
            return key in self._graphs
        try:
            captured = self._capture(run)
        except (
            Exception
        ) as error:  # out of memory, an operation that cannot be recorded, a kernel that does not compile
            self._disabled.add(key)
            log.warning("no CUDA graph for %s (%s: %s); it runs eagerly", key, type(error).__name__, error)
            return False
        if self.num_bytes + captured.num_bytes > self.limit_bytes:
            self._disabled.add(key)
            self.refusals += 1
            return False
        self._graphs[key] = captured
        self.num_bytes += captured.num_bytes
        if len(self._graphs) > self._max_graphs:
            _, oldest = self._graphs.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
            self.evictions += 1
        return True

    def run(self, key: KeyT, eagerly: Run) -> Tensor:
        """Replays the graph of a key, or runs what it would have recorded. Read the result before the next call."""
        captured = self._graphs.get(key)
        if captured is None:
            self.eager_runs += 1
            return eagerly()
        self._graphs.move_to_end(key)
        self.replays += 1
        captured.graph.replay()
        return captured.output

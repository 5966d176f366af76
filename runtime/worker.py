"""A thread that owns something: others post calls to its inbox, it works while there is work and waits otherwise.

Nothing polls, and nothing but the inbox is shared.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch

log = logging.getLogger(__name__)


class Worker(ABC):
    """A thread with an inbox of calls."""

    def __init__(self, name: str, on_death: Callable[[BaseException], None]) -> None:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._on_death = on_death
        self._stopping = False
        self.cuda_stream: torch.cuda.Stream | None = None  # that it works on; set before it starts
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Runs the call on the worker's thread, after those posted before it."""
        self._inbox.put(lambda: call(*arguments))

    def stop(self) -> None:
        """Ends the thread after the step in hand, and waits for it."""
        self.post(self._stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _stop(self) -> None:
        self._stopping = True

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether `work` has something to do."""

    @abstractmethod
    def work(self) -> None:
        """One step."""

    def _run(self) -> None:
        # Of this thread and those it starts. Values below 1e-38 are nobody's sound, but a processor that does not take
        # them for zero multiplies them in microcode: a fifth of stage 1 on a CPU, after Mish made them.
        torch.set_flush_denormal(True)
        try:
            with torch.inference_mode(), torch.cuda.stream(self.cuda_stream):
                while not self._stopping:
                    self._take_calls(wait=not self.busy)
                    if self.busy and not self._stopping:
                        self.work()
        except BaseException as error:
            # Only a mistake of ours comes here; requests must hear of it rather than wait for ever.
            log.exception("worker %s died", self._thread.name)
            self._on_death(error)

    def _take_calls(self, wait: bool) -> None:
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

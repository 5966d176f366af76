"""Prepared references kept for the next request: bounded by bytes, each voice extracted once.

A key is a hash of the samples and of all that the extraction depends on, so no two voices ever share an entry.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import numpy as np

from runtime.types import AudioClip, PreparedReference


def clip_key(clip: AudioClip, *parts: object) -> str:
    """Content key of a clip and of what turns it into a reference: checkpoint, provider, fidelity, trim."""
    digest = hashlib.sha256()
    for part in map(str, (clip.sample_rate, *parts)):
        digest.update(f"{len(part)}:{part};".encode())
    digest.update(np.asarray(clip.samples, dtype=np.float32).tobytes())
    return digest.hexdigest()


class ReferenceCache:
    """Least recently used out first. An evicted reference lives on in the requests that hold it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[str, PreparedReference] = OrderedDict()
        self._pending: dict[str, Future[PreparedReference]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: str, make: Callable[[], PreparedReference]) -> PreparedReference:
        """The reference under `key`, made by the first caller while those that come meanwhile wait for it.

        If `make` fails, all of them get its error and the next call tries again.
        """
        while True:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
                pending = self._pending.get(key)
                if pending is None:
                    mine = self._pending[key] = Future()
                    break
            try:
                return pending.result()
            except CancelledError:
                continue  # its maker was interrupted: take its place
        return self._make(key, make, mine)

    def _make(
        self, key: str, make: Callable[[], PreparedReference], mine: Future[PreparedReference]
    ) -> PreparedReference:
        try:
            reference = make()
        except BaseException as error:
            with self._lock:
                del self._pending[key]
            if isinstance(error, Exception):
                mine.set_exception(error)
            else:
                mine.cancel()  # an interrupt is meant for this thread, not for those that wait
            raise
        with self._lock:
            del self._pending[key]
            self._keep(key, reference)
        mine.set_result(reference)
        return reference

    def _keep(self, key: str, reference: PreparedReference) -> None:
        if reference.num_bytes > self.max_bytes:
            return  # would push out everything else and still not fit
        self._kept[key] = reference
        self.num_bytes += reference.num_bytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

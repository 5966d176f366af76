"""What the flow remembers of finished blocks, so that a hop evaluates new frames alone (spec 4.4).

A streaming solve looks back only, and never within a finished block of 50 frames: keys, values and the inputs of the
causal convolutions of such frames are the same in every later solve, at each Euler step. A block is filled by the
solve that makes it and never written to again, so streams may share it, and dropping the last reference is all that
freeing it takes.
"""

from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PastBlock:
    """50 finished frames of one stream, its guidance twin included. Each tensor owns its memory."""

    kv: Tensor  # [steps, layers, 2, frames, 2 W]: rotated keys beside values, W = heads * channels
    tails: Tensor  # [steps, 2, 2, kernel - 1, D]: by step and convolution, its inputs for the last frames of the block

    @property
    def frames(self) -> int:
        return self.kv.shape[3]

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.kv, self.tails))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Past:
    """The first frames of one stream, as blocks of equal length. A prefix of the blocks is a past as well."""

    blocks: tuple[PastBlock, ...]

    @property
    def frames(self) -> int:
        return sum(block.frames for block in self.blocks)

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What the blocks of one flow look like."""

    steps: int
    layers: int
    frames: int
    width: int  # of keys, and of values
    left: int  # inputs that a causal convolution looks back at
    dim: int  # of these inputs
    dtype: torch.dtype
    device: torch.device

    def new(self) -> PastBlock:
        kv = (self.steps, self.layers, 2, self.frames, 2 * self.width)
        tails = (self.steps, 2, 2, self.left, self.dim)
        return PastBlock(*(torch.empty(shape, dtype=self.dtype, device=self.device) for shape in (kv, tails)))

    def num_bytes(self, frames: int) -> int:
        """What a past of so many frames weighs, by the block."""
        numbers = self.layers * self.frames * 2 * self.width + 2 * self.left * self.dim
        return frames // self.frames * 2 * self.steps * numbers * self.dtype.itemsize


class VoiceCache:
    """The past of each voice's prompt, least recently used out first. One worker uses it: it is not thread-safe.

    Keys are those of the prepared references; flow, noise and step schedule are the owner's and never change.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._pasts: OrderedDict[str, Past] = OrderedDict()
        self.num_bytes = 0
        self.hits = self.misses = self.evictions = self.refusals = 0

    def __len__(self) -> int:
        return len(self._pasts)

    def get(self, key: str) -> Past | None:
        past = self._pasts.get(key)
        if past is None:
            self.misses += 1
            return None
        self.hits += 1
        self._pasts.move_to_end(key)
        return past

    def make_room(self, num_bytes: int) -> bool:
        """Evicts until so much fits. False, and nothing is evicted, when it never will."""
        if num_bytes > self.limit_bytes:
            self.refusals += 1
            return False
        while self.num_bytes + num_bytes > self.limit_bytes:
            _, oldest = self._pasts.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
            self.evictions += 1
        return True

    def put(self, key: str, past: Past) -> None:
        """Keeps a past for which `make_room` was asked."""
        if key in self._pasts:  # two streams of a new voice were solved together
            return
        if self.make_room(past.num_bytes):
            self._pasts[key] = past
            self.num_bytes += past.num_bytes


class StreamBudget:
    """How much of the pasts of live streams is their own, in sum: what a voice keeps is counted in its cache.

    A share is held in the name of an object that lives as long as its stream, and goes with it: an aborted stream gives
    back what it had without being asked.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._shares: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self.refusals = 0

    @property
    def num_bytes(self) -> int:
        return sum(self._shares.values())

    def claim(self, owner: object, num_bytes: int) -> bool:
        """Makes the owner's share so large, if that fits."""
        if self.num_bytes - self._shares.get(owner, 0) + num_bytes > self.limit_bytes:
            self.refusals += 1
            return False
        self._shares[owner] = num_bytes
        return True

    def release(self, owner: object) -> None:
        self._shares.pop(owner, None)

"""How we run a model: engines, devices, precision, limits. Built once, in launch.py, and passed down."""

from dataclasses import dataclass
from typing import Literal

from runtime.errors import EngineUnavailable

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine in one process."""

    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    stage0: Literal["auto", "torch"] = "auto"
    estimator: Literal["auto", "torch"] = "auto"
    lm_precision: Precision = "float32"
    flow_precision: Precision = "float32"  # the vocoder stays in float32 (spec 9.31)
    fidelity: Literal["intended", "official"] = "intended"  # official keeps the reference's oddities (spec 9)
    final_attention: Literal["full", "chunked"] = "full"  # of a stream's last chunk; official is full (spec 6.2)
    max_streams: int = 64  # spoken at the same time
    max_waiting: int = 256  # further requests that may wait for their turn
    chunk_queue: int = 4  # chunks made ahead of a consumer that does not read
    sentence_pause_seconds: float = 0.0
    reference_cache_bytes: int = 256 * 2**20
    onnx_threads: int = 0  # 0 leaves it to onnxruntime

    def __post_init__(self) -> None:
        for name in ("lm_precision", "flow_precision"):
            if getattr(self, name) not in ("float32", "bfloat16", "float16"):
                raise EngineUnavailable(f"{name} is {getattr(self, name)!r}; choose float32, bfloat16 or float16")
        for name in ("max_streams", "max_waiting", "chunk_queue"):
            if getattr(self, name) < 1:
                raise EngineUnavailable(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.fidelity not in ("intended", "official"):
            raise EngineUnavailable(f"fidelity is {self.fidelity!r}; choose intended or official")

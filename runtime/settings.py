"""How we run a model: engines, devices, precision, limits. Built once, in launch.py, and passed down."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from runtime.errors import EngineUnavailable

Precision = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine in one process."""

    device: str = "auto"  # auto, cpu, cuda, cuda:1
    stage0: Literal["auto", "torch", "captured", "vllm"] = "auto"  # auto is captured on a GPU, torch elsewhere
    slot_positions: int = 4096  # prompt and tokens of one sentence, with captured; 50 MB a stream at the released size
    stage0_memory_share: float = 0.2  # of the GPU's memory, with vllm; the rest is left to stage 1
    export_folder: Path | None = None  # models written for engines that load from disk; None is ~/.cache/mynah
    estimator: Literal["auto", "torch", "packed", "fused", "tensorrt"] = "auto"  # fused on a GPU, else packed
    estimator_onnx: Path | None = None  # for tensorrt: flow.decoder.estimator.fp32.onnx in place of our own export
    lm_precision: Precision = "auto"  # bfloat16 on a GPU from Ampere on, unless it is to be official; else float32
    flow_precision: Precision = "auto"  # likewise; the vocoder stays in float32 (spec 9.31)
    fidelity: Literal["intended", "official"] = "intended"  # official keeps the reference's oddities (spec 9)
    sampling: Literal["checkpoint", "ras", "standard"] = "checkpoint"  # what requests and checkpoint have to say
    final_attention: Literal["full", "chunked"] = "full"  # of a stream's last chunk; official is full (spec 6.2)
    hops: Literal["auto", "latency", "throughput"] = "auto"  # where a stream is cut (chunking.py); auto is latency
    extra_hops: bool | None = (
        None  # for streams that would run dry: counted, not as they would sound alone; None: on GPU
    )
    max_streams: int = 64  # spoken at the same time
    max_waiting: int = 256  # further requests that may wait for their turn
    chunk_queue: int = 4  # chunks made ahead of a consumer that does not read
    sentence_pause_seconds: float = 0.0
    reference_cache_bytes: int = 256 * 2**20
    group_frames: int | None = None  # solved at once for several streams; None: 8,192 on a GPU, on a CPU one by one
    voice_kv_bytes: int | None = None  # what the flow may keep of prompts; None: 6 GiB on a GPU, 512 MiB on a CPU
    stream_kv_bytes: int | None = None  # and of live streams that are to hop again; None: as much
    flow_graph_bytes: int = 4 * 2**30  # what captured solves of the flow may take of a GPU; 0 captures none
    front_end: Literal["auto", "torch", "onnxruntime"] = "auto"  # encodes references; auto is torch on a GPU
    onnx_threads: int = 0  # 0 leaves it to onnxruntime
    reserved_multiprocessors: int = 0  # of a GPU, that stage 1 leaves to stage 0
    vocoder_graph_bytes: int = 2 * 2**30  # what captured runs of the vocoder may take of a GPU; 0 captures none
    profile: Literal["none", "latency", "throughput", "whole"] = "none"  # sets what PROFILES lists

    def __post_init__(self) -> None:
        given = asdict(self)
        for name, value in PROFILES.get(self.profile, {}).items():
            if given[name] not in (value, _DEFAULTS[name]):
                raise EngineUnavailable(
                    f"the profile {self.profile} sets {name} to {value}, not {given[name]}; leave one of them out"
                )
            object.__setattr__(self, name, value)
        given = asdict(self)
        for name, choices in _CHOICES.items():
            if given[name] not in choices:
                raise EngineUnavailable(f"{name} is {given[name]!r}; choose {' or '.join(choices)}")
        for name in ("max_streams", "max_waiting", "chunk_queue", "slot_positions"):
            if given[name] < 1:
                raise EngineUnavailable(f"{name} is {given[name]}; it must be at least 1")
        if self.estimator_onnx is not None:
            if self.estimator != "tensorrt":
                raise EngineUnavailable(f"estimator_onnx is for tensorrt, and the estimator is {self.estimator}")
            if self.final_attention == "chunked":
                raise EngineUnavailable(f"final_attention is chunked, but {self.no_streaming}")
        if not 0 < self.stage0_memory_share < 1:
            raise EngineUnavailable(f"stage0_memory_share is {self.stage0_memory_share}; it must be between 0 and 1")
        for name in _NOT_NEGATIVE:
            if given[name] is not None and given[name] < 0:
                raise EngineUnavailable(f"{name} is {given[name]}; it must be 0 or more")
        if self.group_frames is not None and self.group_frames < 1:
            raise EngineUnavailable(f"group_frames is {self.group_frames}; it must be at least 1")

    def dtype(self, wanted: Precision, device: torch.device) -> torch.dtype:
        """What a precision means on a device."""
        if wanted != "auto":
            return _DTYPES[wanted]
        halves = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if halves and self.fidelity == "intended" else torch.float32

    @property
    def no_streaming(self) -> str | None:
        """Why no chunk of a stream can be solved; None when it can."""
        if self.estimator_onnx is None:
            return None
        return (
            "the released ONNX file has no chunk mask, so that a chunk would hear what is not there yet; ask for whole "
            "sentences, or leave estimator_onnx out to have a graph with the mask made"
        )


# What belongs together: how many streams are admitted (and with that the graphs of stage 0), how many frames stage 1
# solves at once, where streams are cut, and by which law tokens are drawn.
PROFILES: dict[str, dict[str, Any]] = {
    "latency": {"max_streams": 16, "group_frames": 4096, "hops": "latency", "sampling": "ras"},
    "throughput": {"max_streams": 64, "group_frames": 8192, "hops": "throughput", "sampling": "ras"},
    "whole": {"max_streams": 64, "group_frames": 32_768, "hops": "throughput", "sampling": "ras"},  # and no chunks
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NOT_NEGATIVE = (
    "voice_kv_bytes",
    "stream_kv_bytes",
    "flow_graph_bytes",
    "vocoder_graph_bytes",
    "reserved_multiprocessors",
    "sentence_pause_seconds",
)
_DEFAULTS = {one.name: one.default for one in fields(EngineSettings)}
_CHOICES = {
    "profile": ("none", *PROFILES),
    "sampling": ("checkpoint", "ras", "standard"),
    "stage0": ("auto", "torch", "captured", "vllm"),
    "estimator": ("auto", "torch", "packed", "fused", "tensorrt"),
    "lm_precision": get_args(Precision),
    "flow_precision": get_args(Precision),
    "fidelity": ("intended", "official"),
    "front_end": ("auto", "torch", "onnxruntime"),
    "hops": ("auto", "latency", "throughput"),
    "final_attention": ("full", "chunked"),
}

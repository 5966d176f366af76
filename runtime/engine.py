"""One engine in one process: a request goes in, sound comes out while it is being made.

    with engine.stream(request) as stream:
        for chunk in stream:
            play(chunk.samples)

The front end runs on the caller's thread and refuses bad input there; then two workers carry the request through the
stages (`stage0_worker.py`, `stage1_worker.py`), and the caller reads its end of it (`stream.py`).
"""

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
import psutil
import torch

from runtime.checkpoint import Checkpoint
from runtime.chunking import HopPlan
from runtime.config import ModelConfig
from runtime.cores import one_core
from runtime.errors import EngineUnavailable, GenerationError, Overloaded, RequestError
from runtime.frontend.prepare import Frontend
from runtime.jobs import ChunkJob
from runtime.levelling import SentenceLeveller
from runtime.settings import EngineSettings
from runtime.stage0.base import Stage0, build_stage0
from runtime.stage0_worker import Stage0Worker
from runtime.stage1.base import build_stage1
from runtime.stage1.decoder import Stage1
from runtime.stage1.partition import stage1_stream
from runtime.stage1_worker import Stage1Worker
from runtime.stream import SpeechStream
from runtime.types import AudioClip, PreparedSpeech, SpeechPlan, SpeechRequest, SpokenSentence, StreamStats

# Arithmetic fills a CPU with one stream, so that company would only wait for each other. An H200 is as busy as it gets
# from about 8,000 frames on (442, 466 and 461 TFLOP/s at 3,392, 8,000 and 27,136), which take it 0.13 s.
GROUP_FRAMES = {"cuda": 8192, "cpu": 1}
HOPS: dict[HopPlan, str] = {
    "latency": "growing (latency)",
    "throughput": "one, then the rest (throughput)",
}


class Pipeline:
    """Both stages and their workers: prepared speech in, sound out. Methods may be called from any thread.

    On a GPU each worker has a CUDA stream of its own and none works on the default one, so that the stages run beside
    each other; the language model's goes first, since its steps are short and others wait for them.
    """

    def __init__(
        self, stage0: Stage0, stage1: Stage1, config: ModelConfig, settings: EngineSettings, device: torch.device
    ) -> None:
        self.settings = settings
        self._config, self._device = config, device
        self._stage0, self._stage1 = stage0, stage1
        self._hops: HopPlan = "latency" if settings.hops == "auto" else settings.hops
        self._group_frames = settings.group_frames or GROUP_FRAMES[device.type]
        self._lock = threading.Lock()
        self._streams: set[SpeechStream] = set()
        self._closed: str | None = None  # why no more requests are taken
        may_step = threading.Event()
        may_step.set()
        self._worker0 = Stage0Worker(
            stage0,
            config,
            hops=self._hops,
            max_streams=settings.max_streams,
            capacity_tokens=lambda stream: stage1.capacity_tokens(stream.speech.reference),
            hand_over=self._hand_over,
            announce=lambda stream, segment: self._worker1.post(self._worker1.open, stream, segment),
            may_step=may_step,
            on_death=self._worker_died,
            hop_seconds=(lambda: self._worker1.hop_seconds) if resolve_extra_hops(settings, device) else None,
        )
        self._worker1 = Stage1Worker(
            stage1,
            frame_limit=self._group_frames,
            sentence_pause_seconds=settings.sentence_pause_seconds,
            on_sentence=lambda stream, sentence: self._worker0.post(self._worker0.sentence_begun, stream, sentence),
            others_may_work=may_step,
            others_rest=self._stage0_rests,
            on_death=self._worker_died,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was loaded on the default stream is there
            self._worker0.cuda_stream = torch.cuda.Stream(device, priority=-1)
            self._worker1.cuda_stream = stage1_stream(device, settings.reserved_multiprocessors)
        self._worker0.start()
        self._worker1.start()

    def speak(self, speech: PreparedSpeech, requested_at: float | None = None) -> SpeechStream:
        """A stream of what `Engine.prepare` gave, spoken once it is entered. Raises Overloaded then, if need be."""
        began = time.monotonic()
        requested_at = began if requested_at is None else requested_at
        rate = self._config.sample_rate
        stats = StreamStats(
            mode=speech.mode,
            seed=speech.seed,
            sampling=speech.sampling,
            sentences=len(speech.sentences),
            sample_rate=rate,
            spoken=[SpokenSentence(each.text, each.expected_seconds, rate, each.written) for each in speech.sentences],
            prepare_seconds=began - requested_at,
            warnings=list(speech.warnings),
        )
        return SpeechStream(
            speech,
            stats,
            requested_at=requested_at,
            chunk_queue=self.settings.chunk_queue,
            leveller=self._leveller(speech, rate),
            on_start=self._start,
            on_read=lambda: self._worker1.post(self._worker1.look_again),
            on_end=self._release,
        )

    def describe(self) -> dict[str, str]:
        """What is live: engines, devices, precision and limits as they were resolved."""
        return {
            "profile": self.settings.profile,
            "fidelity": self.settings.fidelity,
            "sampling law": self.settings.sampling,
            "streams": f"{self.settings.max_streams} spoken at a time, {self.settings.max_waiting} waiting",
            **{f"stage 0 {name}": value for name, value in self._stage0.describe().items()},
            **self._stage1.describe(),
            "group": f"{self._group_frames} frames",
            "hops": HOPS[self._hops],
            "multiprocessors kept from stage 1": str(self.settings.reserved_multiprocessors),
        }

    def memory(self) -> str:
        """Memory in use now, for people."""
        in_use = f"{psutil.Process().memory_info().rss / 2**30:.1f} GB"
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            in_use += f", GPU {(total - free) / 2**30:.1f} of {total / 2**30:.1f} GB"
        return in_use

    @property
    def live_streams(self) -> int:
        """Requests that have been entered and have not ended."""
        return len(self._streams)

    def close(self) -> None:
        """Ends every stream and both workers. Calling it again does nothing."""
        self._shut("the engine was closed")
        self._worker0.stop()
        self._worker1.stop()
        self._stage0.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _leveller(self, speech: PreparedSpeech, rate: int) -> SentenceLeveller | None:
        """One for several sentences, or for a part of several; the reference has none (`official`)."""
        alone = len(speech.sentences) == 1 and speech.level_lufs is None
        return None if alone or self.settings.fidelity == "official" else SentenceLeveller(rate, speech.level_lufs)

    # Between stream and workers

    def _start(self, stream: SpeechStream) -> None:
        with self._lock:
            self._check_open()  # under the lock: `_shut` fails every stream that is in, and none may come in after
            if len(self._streams) >= self.settings.max_streams + self.settings.max_waiting:
                raise Overloaded(f"{len(self._streams)} requests are in hand, the limit; try again in a moment")
            self._streams.add(stream)
        self._worker0.post(self._worker0.add, stream)

    def _hand_over(self, job: ChunkJob) -> None:
        self._worker1.post(self._worker1.take, job)

    def _stage0_rests(self, jobs: Sequence[ChunkJob]) -> bool:
        """While somebody's first sound is made: tokens made beside it would wait for it, and take the device from it.

        On a GPU only when nobody else is there, for whom tokens are to be made; on a CPU always then: one stage after
        the other takes all cores in turn, and neither is slowed down by the other's.
        """
        first = sum(job.stream.stats.first_audio_seconds is None for job in jobs)
        if self._device.type == "cpu":
            return first > 0 or len(self._streams) == 1
        return first == len(self._streams)

    def _release(self, stream: SpeechStream) -> None:
        with self._lock:
            self._streams.discard(stream)
        self._worker0.post(self._worker0.drop, stream)
        self._worker1.post(self._worker1.drop, stream)

    def _worker_died(self, error: BaseException) -> None:
        self._shut(f"a worker of the engine died ({type(error).__name__}: {error}); restart it")

    def _shut(self, why: str) -> None:
        with self._lock:
            self._closed = self._closed or why
            streams = list(self._streams)
        for stream in streams:
            stream.fail(GenerationError(why))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EngineUnavailable(self._closed)


class Engine(Pipeline):
    """Loads a checkpoint and speaks requests. Methods may be called from any thread."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings | None = None) -> None:
        """Raises CheckpointError or EngineUnavailable; afterwards the engine is ready."""
        settings = settings or EngineSettings()
        device = resolve_device(settings.device)
        check_law(settings, checkpoint)
        self.checkpoint = checkpoint
        self._cores = one_core if device.type == "cpu" else nullcontext  # of threads that come to prepare
        with self._cores():
            self._frontend = Frontend(checkpoint, settings, device)
            stage0 = build_stage0(checkpoint, settings, device)
            stage1 = build_stage1(checkpoint, settings, device)
        super().__init__(stage0, stage1, checkpoint.config, settings, device)

    def prepare(self, request: SpeechRequest) -> PreparedSpeech:
        """Everything before the stages. Raises RequestError for what the caller can fix."""
        if self.settings.profile == "whole":
            request = replace(request, streaming=False)
        with self._cores():
            speech = self._frontend.prepare(request)
        if self.settings.no_streaming and speech.streaming:
            raise RequestError(self.settings.no_streaming)
        law = self.settings.sampling
        if law not in ("checkpoint", speech.sampling.method):
            raise RequestError(f"the request asks for {speech.sampling.method} sampling, the engine draws by {law}")
        return speech

    def plan(self, request: SpeechRequest) -> SpeechPlan:
        """The sentences as they will be spoken, with estimated lengths. Looks at the text alone: any reference will do.

        Raises RequestError for a text, word list, transcript or instruction that cannot be spoken.
        """
        return self._frontend.plan(request)

    def speaker_vector(self, clip: AudioClip) -> np.ndarray:
        """What the checkpoint's speaker encoder hears in a clip: [E] float32, alike for clips of one voice."""
        with self._cores():
            return self._frontend.speaker_vector(clip).numpy()

    def stream(self, request: SpeechRequest) -> SpeechStream:
        """Prepares a request now and speaks it once the stream is entered.

        Raises RequestError for bad input, Overloaded when too many requests are in hand.
        """
        requested_at = time.monotonic()
        self._check_open()
        return self.speak(self.prepare(request), requested_at)

    def describe(self) -> dict[str, str]:
        return {
            "model": self.checkpoint.folder.name,
            "language model": self.checkpoint.lm_name,
            **self._frontend.describe(),
            **super().describe(),
        }


def check_law(settings: EngineSettings, checkpoint: Checkpoint) -> None:
    """Raises EngineUnavailable when settings and checkpoint name different laws of the next token.

    The recipe of every checkpoint of this family tunes repetition-aware sampling (spec 3.4).
    """
    if settings.sampling == "standard":
        raise EngineUnavailable(
            f"the settings ask for standard sampling, the checkpoint {checkpoint.folder.name} is made for ras; "
            "choose ras or checkpoint as sampling"
        )


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises EngineUnavailable for a device that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as unknown:
        raise EngineUnavailable(f"no device is called {name!r}; choose auto, cpu, cuda or cuda:N") from unknown
    if device.type not in ("cpu", "cuda"):
        raise EngineUnavailable(f"device {name!r} is not supported; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineUnavailable(f"device {name!r} was asked for, but {torch.cuda.device_count()} CUDA devices are here")
    return device


def resolve_extra_hops(settings: EngineSettings, device: torch.device) -> bool:
    """On a CPU a stream that runs dry would only fall further behind by a hop more."""
    return device.type != "cpu" if settings.extra_hops is None else settings.extra_hops

"""One engine in one process: a request goes in, sound comes out while it is being made.

    with engine.stream(request) as stream:
        for chunk in stream:
            play(chunk.samples)

The front end runs on the caller's thread and refuses bad input there; then two workers carry the request through the
stages (`stage0_worker.py`, `stage1_worker.py`), and the caller reads its end of it (`stream.py`).
"""

import threading
import time
from types import TracebackType

import numpy as np
import psutil
import torch

from runtime.checkpoint import Checkpoint
from runtime.chunking import HopPlan
from runtime.errors import EngineUnavailable, GenerationError, Overloaded
from runtime.frontend.prepare import Frontend
from runtime.jobs import ChunkJob
from runtime.levelling import SentenceLeveller
from runtime.settings import EngineSettings
from runtime.stage0.base import build_stage0
from runtime.stage0_worker import Stage0Worker
from runtime.stage1.base import build_stage1
from runtime.stage1_worker import Stage1Worker
from runtime.stream import SpeechStream
from runtime.types import AudioClip, PreparedSpeech, SpeechPlan, SpeechRequest, SpokenSentence, StreamStats

# Arithmetic fills a CPU with one stream, so that company would only wait for each other.
GROUP_FRAMES = {"cuda": 16_384, "cpu": 1}
HOPS: dict[HopPlan, str] = {
    "latency": "growing (latency)",
    "throughput": "one, then the rest (throughput)",
}


class Engine:
    """Loads a checkpoint and speaks requests. Methods may be called from any thread."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings | None = None) -> None:
        """Raises CheckpointError or EngineUnavailable; afterwards the engine is ready."""
        self.checkpoint = checkpoint
        self.settings = settings or EngineSettings()
        self._device = device = resolve_device(self.settings.device)
        self._frontend = Frontend(checkpoint, self.settings)
        self._stage0 = build_stage0(checkpoint, self.settings, device)
        self._stage1 = build_stage1(checkpoint, self.settings, device)
        self._hops = resolve_hops(self.settings, device)
        self._lock = threading.Lock()
        self._streams: set[SpeechStream] = set()
        self._closed: str | None = None  # why no more requests are taken
        self._worker0 = Stage0Worker(
            self._stage0,
            checkpoint.config,
            hops=self._hops,
            max_streams=self.settings.max_streams,
            capacity_tokens=lambda stream: self._stage1.capacity_tokens(stream.speech.reference),
            hand_over=self._hand_over,
            on_death=self._worker_died,
        )
        self._worker1 = Stage1Worker(
            self._stage1,
            frame_limit=self.settings.group_frames or GROUP_FRAMES[device.type],
            sentence_pause_seconds=self.settings.sentence_pause_seconds,
            on_sentence=lambda stream, sentence: self._worker0.post(self._worker0.sentence_begun, stream, sentence),
            on_death=self._worker_died,
        )
        self._worker0.start()
        self._worker1.start()

    def prepare(self, request: SpeechRequest) -> PreparedSpeech:
        """Everything before the stages. Raises RequestError for what the caller can fix."""
        return self._frontend.prepare(request)

    def plan(self, request: SpeechRequest) -> SpeechPlan:
        """The sentences as they will be spoken, with estimated lengths. Looks at the text alone: any reference will do.

        Raises RequestError for a text, word list, transcript or instruction that cannot be spoken.
        """
        return self._frontend.plan(request)

    def speaker_vector(self, clip: AudioClip) -> np.ndarray:
        """What the checkpoint's speaker encoder hears in a clip: [E] float32, alike for clips of one voice."""
        return self._frontend.speaker_vector(clip).numpy()

    def stream(self, request: SpeechRequest) -> SpeechStream:
        """Prepares a request now and speaks it once the stream is entered.

        Raises RequestError for bad input, Overloaded when too many requests are in hand.
        """
        requested_at = time.monotonic()
        self._check_open()
        speech = self.prepare(request)
        rate = self.checkpoint.config.sample_rate
        stats = StreamStats(
            mode=speech.mode,
            seed=speech.seed,
            sampling=speech.sampling,
            sentences=len(speech.sentences),
            sample_rate=rate,
            spoken=[SpokenSentence(each.text, each.expected_seconds, rate, each.written) for each in speech.sentences],
            prepare_seconds=time.monotonic() - requested_at,
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
        """What is live: engines, devices and precision as they were resolved."""
        return {
            "model": self.checkpoint.folder.name,
            "language model": self.checkpoint.lm_name,
            "fidelity": self.settings.fidelity,
            **self._frontend.describe(),
            **{f"stage 0 {name}": value for name, value in self._stage0.describe().items()},
            **self._stage1.describe(),
            "hops": HOPS[self._hops],
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

    def __enter__(self) -> "Engine":
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


def resolve_hops(settings: EngineSettings, device: torch.device) -> HopPlan:
    """On a CPU the arithmetic of a second hop costs more than the wait it saves."""
    if settings.hops != "auto":
        return settings.hops
    return "throughput" if device.type == "cpu" and settings.fidelity == "intended" else "latency"

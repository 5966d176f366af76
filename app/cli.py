"""The command line: flags, and `say`, which speaks into a file or a pipe without a page.

Exit codes: 0 spoken, 1 the generation failed, 2 the input or the checkpoint is at fault, 130 interrupted. Everything
that people read goes to stderr; stdout carries the samples, or the plan or list that was asked for.
"""

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, get_args

from tqdm import tqdm

from app.audio_format import to_pcm16, wav_file
from app.figures import expected_seconds, figures, notice, remarks
from app.script import ScriptStream, parse_script, script_requests
from app.subtitles import subtitles
from app.voice_commands import VOICES_HELP, add_voice_commands, tell
from app.voices import Voice, VoiceLibrary
from runtime import (
    LANGUAGES,
    AudioClip,
    Engine,
    EngineSettings,
    GenerationError,
    Precision,
    RequestError,
    SpeechPlan,
    SpeechRequest,
    StreamStats,
    load_clip,
    load_words,
)

PIPE = "-"


def build_parser() -> ArgumentParser:
    """Flags carry no defaults: what is not given is left to Settings, the only place that knows."""
    engine = _engine_flags()
    parser = ArgumentParser(
        prog="launch.py",
        description="Mynah speaks your text in the voice of a short recording. Without a command it opens the page.",
        parents=[engine],
        argument_default=SUPPRESS,
    )
    parser.add_argument("--host", help="address to listen on; 0.0.0.0 is every interface (default: this machine only)")
    parser.add_argument("--port", type=int, help="port of the page (default: 7860 or the next free one)")
    parser.add_argument("--voices", type=Path, help=VOICES_HELP)
    parser.add_argument("--history", type=Path, help="folder of what the page made (default: likewise)")
    parser.add_argument(
        "--transcription", help="what writes words down: a size of Whisper, or a folder (default: small)"
    )
    parser.add_argument("--no-browser", dest="open_browser", action="store_false", help="do not open a browser")
    commands = parser.add_subparsers(dest="command", title="commands")
    say = commands.add_parser(
        "say",
        help="speak into a WAV file or a pipe",
        description="Speaks a text in the voice of a recording. Exit codes: 0 spoken, 1 not generated, 2 bad input.",
        epilog="To listen while it is made: launch.py say ... --stream-to - | aplay -f S16_LE -r 24000",
        parents=[engine],
        argument_default=SUPPRESS,
    )
    _say_flags(say)
    add_voice_commands(commands)
    return parser


def _engine_flags() -> ArgumentParser:
    flags = ArgumentParser(add_help=False, argument_default=SUPPRESS)
    group = flags.add_argument_group("model")
    group.add_argument("--model", help="demo, a checkpoint folder, or a hub id (default: demo)")
    group.add_argument("--lm", choices=("llm", "llm.rl"), help="which language model of the checkpoint")
    group.add_argument("--source", choices=("hub", "modelscope"), help="where a hub id is fetched from")
    group.add_argument("--device", help="auto, cpu, cuda or cuda:1")
    group.add_argument(
        "--stage0",
        choices=("auto", "torch", "captured", "vllm"),
        help="what runs the language model; captured needs a GPU, vllm the extra",
    )
    group.add_argument(
        "--profile",
        choices=("latency", "throughput", "whole"),
        help="soonest sound for few, most sound for many, or most without streaming",
    )
    group.add_argument(
        "--estimator",
        choices=("auto", "torch", "packed", "fused", "tensorrt"),
        help="what solves the flow; fused needs a GPU, tensorrt the extra",
    )
    group.add_argument("--precision", choices=get_args(Precision), help="of both stages; the vocoder stays in float32")
    group.add_argument(
        "--fidelity", choices=("intended", "official"), help="official keeps the oddities of the reference code"
    )
    return flags


def _say_flags(say: ArgumentParser) -> None:
    voice = say.add_mutually_exclusive_group(required=True)
    voice.add_argument("--reference", type=Path, default=None, help="recording of the voice, 0.5 to 30 s")
    voice.add_argument(
        "--script",
        type=Path,
        default=None,
        help="a file for several saved voices, one line each: `NAME: text`",
    )
    voice.add_argument("--voice", default=None, help="name of a saved voice, as `voices list` shows it")
    say.add_argument("--voices", type=Path, help=VOICES_HELP)
    words = say.add_mutually_exclusive_group()
    words.add_argument("--text", default="", help="what to speak; - reads it from stdin")
    words.add_argument("--text-file", type=Path, default=None, help="a UTF-8 file with what to speak")
    words.add_argument("--source-audio", type=Path, default=None, help="convert this recording instead of a text")
    say.add_argument("--transcript", default=None, help="the words of the reference; makes the likeness closer")
    say.add_argument("--instruct", default=None, help="how to speak, in plain words")
    say.add_argument(
        "--language", choices=LANGUAGES, default="auto", help="of the text: what its figures are written out in"
    )
    say.add_argument("--words", type=Path, default=None, help="a word list: lines `word = reading`, or a JSON object")
    say.add_argument(
        "--plan", action="store_true", default=False, help="print the sentences and their seconds, no sound"
    )
    say.add_argument("--out", type=Path, default=None, help="WAV file to write")
    say.add_argument("--subtitles", type=Path, default=None, help="srt or vtt file with a line for each sentence")
    say.add_argument(
        "--stream-to", choices=(PIPE,), default=None, help="write raw PCM16 mono to stdout while it is made"
    )
    say.add_argument("--speed", type=float, default=1.0, help="1.2 is a fifth faster (default: 1)")
    say.add_argument("--seed", type=int, default=None, help="the same seed gives the same sound")
    say.add_argument("--trim", action="store_true", default=False, help="use the first 30 s of a longer reference")
    say.add_argument("--no-stream", dest="streaming", action="store_false", default=True, help="make it in one piece")
    say.add_argument(
        "--no-normalize",
        dest="normalize",
        action="store_false",
        default=True,
        help="leave numbers and units as written",
    )


def engine_settings(args: Namespace) -> EngineSettings:
    given = vars(args)
    chosen: dict[str, Any] = {
        name: given[name] for name in ("device", "stage0", "estimator", "fidelity", "profile") if name in given
    }
    if "precision" in given:
        chosen |= {"lm_precision": given["precision"], "flow_precision": given["precision"]}
    return EngineSettings(**chosen)


def read_requests(args: Namespace, library: VoiceLibrary | None) -> list[SpeechRequest]:
    """Flags of `say` -> a request, or one for each line of a script.

    Reads every file, so that bad input shows before a model is loaded.
    """
    if args.out is None and args.stream_to is None and not args.plan:
        raise RequestError("nothing to write to; give --out FILE.wav, --stream-to - or both")
    if args.out is not None:
        _check_out(args.out, ".wav")
    if args.subtitles is not None:
        _check_out(args.subtitles, ".srt", ".vtt")
    source = None if args.source_audio is None else load_clip(args.source_audio)
    words = {} if args.words is None else load_words(args.words)

    def make(reference: AudioClip, voice: Voice | None, text: str) -> SpeechRequest:
        known = None if voice is None else voice.transcript
        return SpeechRequest(
            reference=reference,
            text=text,
            transcript=known if args.transcript is None else args.transcript,
            instruction=args.instruct,
            source=source,
            seed=args.seed,
            speed=args.speed,
            streaming=args.streaming,
            normalize=args.normalize,
            language=args.language,
            trim=args.trim,
            words=words,
        )

    if args.reference is not None:
        return [make(load_clip(args.reference), None, _read_text(args))]
    if library is None:
        raise RequestError("no voices are kept here; name their folder with --voices DIR")
    if args.voice is not None:
        return [make(library.clip(args.voice), library.find(args.voice), _read_text(args))]
    if args.text or args.text_file or args.source_audio:
        raise RequestError("a script holds its text; leave --text, --text-file and --source-audio out")
    return script_requests(parse_script(_read_file(args.script, "--script")), library, make)


def say(args: Namespace, requests: Sequence[SpeechRequest], engine: Engine) -> int:
    """Speaks into the outputs that were asked for; a file appears only when it is complete."""
    if args.plan:
        for request in requests:
            _print_plan(engine.plan(request))
        return 0
    if told := notice(engine.checkpoint):
        tell(f"note: {told}")
    try:
        opened = ScriptStream(engine, requests) if len(requests) > 1 else engine.stream(requests[0])
        with opened as stream, ExitStack() as outputs:
            sinks: list[Callable[[bytes], object]] = []
            if args.out is not None:
                sinks.append(outputs.enter_context(wav_file(args.out, stream.stats.sample_rate)).writeframes)
            if args.stream_to == PIPE:
                sinks.append(_pipe(sys.stdout.buffer))
            bar = outputs.enter_context(_progress(sum(map(expected_seconds, requests))))
            for chunk in stream:
                pcm = to_pcm16(chunk.samples)
                for write in sinks:
                    write(pcm)
                seconds = len(chunk.samples) / chunk.sample_rate
                bar.total = max(bar.total or 0, bar.n + seconds)
                bar.update(seconds)
            if not stream.stats.samples:
                raise GenerationError("the model ended without a sound; try another seed or a longer text")
            bar.total = bar.n
        if args.subtitles is not None:
            _write_subtitles(stream.stats, args.subtitles)
    except GenerationError as failed:
        tell(f"error: {failed}")
        return 1
    except OSError as failed:  # a full disk, or the program behind the pipe has ended
        if args.stream_to == PIPE:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # the interpreter flushes it once more at exit
        tell(f"error: the samples cannot be written: {failed.strerror}")
        return 1
    _tell_figures(stream.stats, args.out, judge_lengths=engine.checkpoint.makes_speech)
    return 0


def _check_out(out: Path, *suffixes: str) -> None:
    if out.suffix.lower() not in suffixes:
        raise RequestError(f"{out.name} has to end in {' or '.join(suffixes)}; other formats are not written")
    if out.is_dir():
        raise RequestError(f"{out} is a folder; give a file name")
    if not out.parent.is_dir():
        raise RequestError(f"{out}: there is no folder {out.parent}; make it first")
    if not os.access(out.parent, os.W_OK):
        raise RequestError(f"{out}: the folder {out.parent} cannot be written to")


def _read_text(args: Namespace) -> str:
    if args.text_file is not None:
        return _read_file(args.text_file, "--text-file")
    if args.text != PIPE:
        return str(args.text)
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as failed:
        raise RequestError("the text is not UTF-8; save it as UTF-8") from failed


def _read_file(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as failed:
        raise RequestError(f"{flag} {path} cannot be read: {failed.strerror}") from failed
    except UnicodeDecodeError as failed:
        raise RequestError("the text is not UTF-8; save it as UTF-8") from failed


def _write_subtitles(stats: StreamStats, path: Path) -> None:
    times = [(each.start_seconds, each.start_seconds + each.seconds, each.written) for each in stats.spoken]
    path.write_text(subtitles(times, "vtt" if path.suffix.lower() == ".vtt" else "srt"), encoding="utf-8")


def _pipe(stdout: BinaryIO) -> Callable[[bytes], object]:
    def write(pcm: bytes) -> None:
        stdout.write(pcm)
        stdout.flush()

    return write


def _progress(seconds: float) -> "tqdm[NoReturn]":
    layout = "{desc} {percentage:3.0f}%|{bar}| {n:.1f} of about {total:.0f} s [{elapsed}]"
    return tqdm(total=seconds, desc="speaking", file=sys.stderr, bar_format=layout, leave=True)


def _print_plan(plan: SpeechPlan) -> None:
    for number, sentence in enumerate(plan.sentences, 1):
        if sentence.pause_before_seconds:
            print(f"     {sentence.pause_before_seconds:5.2f} s  (pause)")
        print(f"{number:4} {sentence.expected_seconds:5.1f} s  {sentence.text}")
        if _letters(sentence.written) != _letters(sentence.text):
            print(f"              {' '.join(sentence.written.split())}")
        if sentence.pause_after_seconds:
            print(f"     {sentence.pause_after_seconds:5.2f} s  (pause)")
    tell(f"{len(plan.sentences)} sentences, about {plan.expected_seconds:.0f} s, {plan.mode.value}")
    for warning in plan.warnings:
        tell(f"note: {warning}")


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def _tell_figures(stats: StreamStats, out: Path | None, *, judge_lengths: bool) -> None:
    made = figures(stats)
    tell(
        f"{made['seconds']:.2f} s of speech, first audio after {made['first_audio'] or 0:.2f} s, "
        f"RTF {made['rtf'] or 0:.2f}, {made['tokens']} tokens, "
        f"seed {made['seed']}, {made['mode']}, ended: {made['ended']}"
    )
    for remark in remarks(stats):
        tell(f"note: {remark}")
    for number, sentence in enumerate(stats.spoken, 1):
        if judge_lengths and sentence.odd_length:
            tell(
                f"note: sentence {number} took {sentence.seconds:.1f} s where about {sentence.expected_seconds:.1f} s "
                f"fit its text; listen to it, another seed may mend it: {sentence.text[:60]!r}"
            )
    if out is not None:
        tell(f"wrote {out}")

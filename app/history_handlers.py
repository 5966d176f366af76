"""The functions behind what was made: listed, heard again, gone on with, one sentence said again, settings, subtitles.

The list and the sentences are components of our own (lists.js), which name an entry and a sentence in their events.
"""

import base64
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gradio as gr
import numpy as np

from app.figures import expected_seconds, figures
from app.form import CONVERT, INSTRUCT, SAY, without_tokens
from app.history import History, again
from app.history_entry import Entry, stats_of
from app.script import ScriptStream, locate, parse_script, remaining, script_requests
from app.speaking import Job, Message, Outputs, Speaker, Tabs, files, read_pcm16, sentences
from app.subtitles import SubtitleFormat
from app.ui_handlers import saved_by_the_page, visit_token
from app.visits import Visits
from app.voices import Voice
from runtime import AudioClip, Engine, RequestError, SamplingParams, SpeechError, SpeechRequest, SpeechStream

REPLAY_SECONDS = 5  # of one message; the player takes many at once


class HistoryHandlers:
    """Holds the engine, the visits and the open tabs. Gradio calls its methods from many threads."""

    def __init__(self, engine: Engine, speaker: Speaker, visits: Visits, tabs: Tabs) -> None:
        self._engine = engine
        self._speaker = speaker
        self._visits = visits
        self._tabs = tabs

    # Looking and listening

    def entries(self, visit: str, http: gr.Request) -> tuple[Message, Any]:
        """The list, the newest first, and its fold, which is hidden while there is nothing in it."""
        history = self._history(visit, http)
        shown = [_shown(entry, history.is_live(entry.id)) for entry in history.entries()]
        return {"entries": shown}, gr.update(visible=bool(shown))

    def replay(self, visit: str, job: float, http: gr.Request, event: gr.EventData) -> Iterator[Outputs]:
        """The kept sound of an entry, or of one of its sentences, as the player takes it."""
        history, id, index = self._history(visit, http), _id(event), _index(event)
        try:
            entry = history.find(id)
            pcm = read_pcm16(history.whole(id) if index is None else history.sentence(id, index))
        except RequestError as gone:
            yield {"job": int(job), "state": "failed", "message": str(gone)}, *(gr.skip(),) * 4
            return
        stats = stats_of(entry, len(pcm) // 2)
        told = figures(stats) | {"tokens": None}
        message = {"job": int(job), "earlier": _chunks(pcm, entry.sample_rate), "state": "done", "message": ""}
        if index is not None:
            yield message | {"figures": told}, *(gr.skip(),) * 4
            return
        with files(pcm, stats) as paths:
            yield message | {"figures": told}, *paths, sentences(entry, self._speaker.judges_lengths)

    def subtitles(self, visit: str, http: gr.Request, event: gr.EventData) -> Message:
        """A file that the page saves by itself."""
        id = _id(event)
        kind: SubtitleFormat = "vtt" if event.kind == "vtt" else "srt"
        try:
            text = self._history(visit, http).subtitles(id, kind)
        except RequestError as gone:
            raise gr.Error(str(gone), title="Not found", print_exception=False) from gone
        return saved_by_the_page(f"mynah-{id[:15]}.{kind}", text.encode())

    def remove(self, visit: str, http: gr.Request, event: gr.EventData) -> tuple[Message, Any]:
        try:
            self._history(visit, http).remove(_id(event))
        except RequestError as error:
            raise gr.Error(str(error), title="Not deleted", print_exception=False) from error
        return self.entries(visit, http)

    # Making more of it

    def resume(self, visit: str, job: float, http: gr.Request, event: gr.EventData) -> Iterator[Outputs]:
        """Goes on with a job that broke off, with the sound that it would have had."""
        history, id = self._history(visit, http), _id(event)

        def opening() -> Job:
            entry = history.find(id)
            lines = self._script(entry, visit, http) if entry.script else []
            keeping = history.resume(id)
            try:
                stream: SpeechStream | ScriptStream
                if keeping.request is not None:
                    stream = self._engine.stream(keeping.request)
                else:
                    rest, pause = remaining(self._engine, lines, len(entry.sentences))
                    stream = ScriptStream(self._engine, rest, opens_with_pause=pause, level_lufs=entry.level_lufs)
            except SpeechError:
                with keeping:  # it stays as it was
                    raise
            keeping.hear(stream.stats)
            return Job(stream, sum(sentence.expected_seconds for sentence in stream.stats.spoken), keeping)

        def finish(job: Job, made: bytes) -> tuple[bytes, Entry | None]:
            return read_pcm16(history.whole(id)), history.find(id)

        yield from self._speaker.perform(self._tabs.of(http), int(job), opening, finish)

    def say_again(self, visit: str, job: float, http: gr.Request, event: gr.EventData) -> Iterator[Outputs]:
        """Speaks one sentence with another seed, and puts it in place of the kept one."""
        history, id, index, seed = self._history(visit, http), _id(event), _index(event), secrets.randbits(31)

        def opening() -> Job:
            if index is None:
                raise RequestError("choose a sentence")
            entry = history.find(id)
            text = next((each.text for each in entry.sentences if each.index == index), "")
            if history.is_live(id) or not text:
                raise RequestError("this sentence is not made yet; wait until the job has ended")
            stream: SpeechStream | ScriptStream
            if entry.script:
                requests = self._script(entry, visit, http)
                request = again(requests[locate(self._engine, requests, index)[0]], text, seed)
                stream = ScriptStream(self._engine, [request], level_lufs=entry.level_lufs)
            else:
                request = replace(again(history.request(id), text, seed), level_lufs=entry.level_lufs)
                stream = self._engine.stream(request)
            return Job(stream, expected_seconds(request))

        def finish(job: Job, made: bytes) -> tuple[bytes, Entry | None]:
            stats = job.stream.stats
            if stats.ended is not None and stats.ended.value in ("stop", "length"):  # and not when it was stopped
                samples = np.frombuffer(made, "<i2").astype(np.float32) / 32767
                odd = any(each.odd_length for each in stats.spoken)
                history.replace_sentence(id, index or 0, AudioClip(samples, stats.sample_rate), seed, odd)
            return read_pcm16(history.whole(id)), history.find(id)

        yield from self._speaker.perform(self._tabs.of(http), int(job), opening, finish)

    def _script(self, entry: Entry, visit: str, http: gr.Request) -> list[SpeechRequest]:
        """The lines of a kept script as requests; its voices are looked up by their names again."""
        settings = dict(entry.settings)
        lines = parse_script(settings.pop("text"))
        sampling = settings.pop("sampling")
        settings["sampling"] = None if sampling is None else SamplingParams(**sampling)
        knows_words = entry.mode != "instruct"

        def make(clip: AudioClip, voice: Voice, text: str) -> SpeechRequest:
            words = without_tokens(voice.transcript) or None if knows_words else None
            return replace(SpeechRequest(clip, **settings), text=text, transcript=words)

        return script_requests(lines, self._visits.voices(visit_token(visit, http)), make)

    # Its settings

    def reuse(self, visit: str, http: gr.Request, event: gr.EventData) -> tuple[Any, ...]:
        """All fields of the page as they were, in the order of `REUSED`; without a saved voice the recording too."""
        history, id = self._history(visit, http), _id(event)
        try:
            entry = history.find(id)
            request = None if entry.script else history.request(id)
        except RequestError as gone:
            raise gr.Error(str(gone), title="Not found", print_exception=False) from gone
        settings = entry.settings
        sampling = settings["sampling"] or {}
        ras = self._engine.checkpoint.config.lm.ras
        voices = self._visits.voices(visit_token(visit, http))
        names = [voice.name for voice in voices.voices()]
        saved = entry.voice if entry.voice in names else ""
        reference = _heard(request.reference) if request is not None and not saved else None
        source = _heard(request.source) if request is not None and request.source is not None else None
        task = {"instruct": INSTRUCT, "voice conversion": CONVERT}.get(entry.mode, SAY)
        words = "\n".join(f"{word} = {reading}" for word, reading in settings["words"].items())
        shown = {
            **{"task": task, "saved": saved, "reference": reference, "consent": True, "source": source},
            **{name: settings[name] or "" for name in ("transcript", "instruction")},
            **{name: settings[name] for name in ("text", "speed", "trim", "normalize")},
            **{"language": settings.get("language", "auto"), "seed": str(settings["seed"])},
            **{"temperature": 1.0, "top_p": ras.top_p, "top_k": ras.top_k},
            **{name: sampling[name] for name in ("temperature", "top_p", "top_k") if sampling},
            **{"words": words, "script": entry.script},
        }
        return tuple(shown[name] for name in REUSED)

    def _history(self, visit: str, http: gr.Request) -> History:
        return self._visits.history(visit_token(visit, http))


REUSED = (
    *(
        "task",
        "saved",
        "reference",
        "consent",
        "transcript",
        "instruction",
        "source",
        "text",
        "language",
        "speed",
        "seed",
    ),
    *("temperature", "top_p", "top_k", "trim", "normalize", "words", "script"),
)


def _shown(entry: Entry, live: bool) -> Message:
    return {
        "id": entry.id,
        "made": entry.made.isoformat(),
        "text": entry.settings["text"][:160],
        "mode": entry.mode,
        "voice": entry.voice,
        "seconds": entry.seconds,
        "sentences": len(entry.sentences),
        "planned": entry.planned,
        "live": live,
        "resumable": entry.resumable and not live,
    }


def _chunks(pcm: bytes, rate: int) -> list[Message]:
    size = 2 * rate * REPLAY_SECONDS
    parts = [pcm[at : at + size] for at in range(0, len(pcm), size)]
    return [
        {"index": i, "rate": rate, "pcm": base64.b64encode(part).decode("ascii"), "last": i + 1 == len(parts)}
        | {"pace": None, "expected": 0.0}
        for i, part in enumerate(parts)
    ]


def _heard(clip: AudioClip) -> tuple[int, np.ndarray]:
    return clip.sample_rate, np.rint(clip.samples * 32767).astype(np.int16)


def _id(event: gr.EventData) -> str:
    return str(event.id)


def _index(event: gr.EventData) -> int | None:
    index = event._data.get("sentence")
    return None if index is None else int(index)

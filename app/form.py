"""What the fields of the page say, as requests to the engine. Everything that a person can mend is a RequestError."""

import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from app import languages
from app.reference_check import close_end, cut, transcript_doubt
from app.reference_handlers import Part, ReferenceHandlers, Shown
from app.script import parse_script, script_requests
from app.settings import Settings
from app.voices import Voice, VoiceLibrary
from runtime import (
    AudioClip,
    Engine,
    RequestError,
    SamplingParams,
    SpeechRequest,
    load_clip,
    parse_words,
)

SAY, INSTRUCT, CONVERT = "say", "instruct", "convert"  # what the page offers; the engine's mode follows from the fields

_PASTED_PROMPT = re.compile(r"^\s*You are a helpful assistant\..{0,300}?<\|endofprompt\|>", re.DOTALL)
_CONTROL_TOKEN = re.compile(r"<\|\s*([^<>|]*?)\s*\|>")
_ANY_VOICE = AudioClip(np.zeros(24_000, np.float32), 24_000)  # a plan looks at the text alone


@dataclass(frozen=True)
class Form:
    """The fields, as Gradio hands them over: one that was never shown holds None."""

    reference: str | None  # path of the recording
    part: Shown | None
    consent: bool
    task: str
    transcript: str | None
    instruction: str | None
    source: str | None  # path of the recording whose words are spoken
    text: str | None
    language: str
    speed: float
    seed: str | None
    temperature: float
    top_p: float
    top_k: float
    trim: bool
    normalize: bool
    saved: str | None = ""  # name of a saved voice in place of the recording
    words: str | None = ""  # lines `word = reading`
    script: bool = False  # the text has lines `NAME: text`

    @property
    def is_script(self) -> bool:
        return bool(self.script) and self.task != CONVERT

    @property
    def voice_name(self) -> str | None:
        """What the history calls the voice."""
        return None if self.is_script else written(self.saved) or None


class FormReader:
    """Knows what a form is held to: the checkpoint's own sampling, the limits of the settings."""

    def __init__(self, engine: Engine, settings: Settings, references: ReferenceHandlers) -> None:
        self._engine = engine
        self._settings = settings
        self._references = references

    def requests(self, form: Form, library: VoiceLibrary) -> list[SpeechRequest]:
        """One request, or one for each line of a script."""
        if form.is_script:
            one = replace(form, seed=written(form.seed) or str(secrets.randbits(31)))  # for all of its lines
            lines = parse_script(self._text(form))
            return script_requests(lines, library, lambda clip, voice, text: self._request(one, clip, voice, text))
        text = "" if form.task == CONVERT else self._text(form)
        if name := written(form.saved):
            return [self._request(form, library.clip(name), library.find(name), text)]
        return [self._request(form, new_voice(form.reference, form.part, form.consent), None, text)]

    def plans(self, form: Form) -> list[SpeechRequest]:
        """The same for `Engine.plan`, which asks for no voice."""
        if form.is_script:
            return [self._request(form, _ANY_VOICE, None, line.text) for line in parse_script(self._text(form))]
        return [self._request(form, _ANY_VOICE, None, self._text(form))]

    def doubt(self, form: Form, voice: AudioClip) -> str | None:
        """A question about the words of a new recording, which may belong to another one."""
        words, part = written(form.transcript), Part.of(form.part)
        if form.task != SAY or form.is_script or written(form.saved) or not words:
            return None
        stale = "The recording has changed since its words were written." if words == part.stale_words else None
        doubts = filter(None, (stale, transcript_doubt(words, self._references.speech_seconds(voice))))
        return " ".join(doubts) or None

    def _request(self, form: Form, clip: AudioClip, voice: Voice | None, text: str) -> SpeechRequest:
        known = written(form.transcript) if voice is None else voice.transcript
        return SpeechRequest(
            reference=clip,
            text=text,
            transcript=without_tokens(known) or None if form.task == SAY else None,
            instruction=_instruction(form.instruction) if form.task == INSTRUCT else None,
            source=opened(form.source, "add the recording whose words should be spoken")
            if form.task == CONVERT
            else None,
            sampling=self._sampling(form),
            seed=_seed(form.seed),
            speed=form.speed,
            normalize=form.normalize,
            language=form.language,
            trim=form.trim,
            words=parse_words(written(form.words)),
        )

    def _text(self, form: Form) -> str:
        text, limit = without_tokens(written(form.text)), self._settings.longest_text
        if len(text) > limit:
            raise RequestError(f"the text has {len(text)} characters; shorten it to {limit} or speak it in parts")
        return text

    def _sampling(self, form: Form) -> SamplingParams | None:
        """None where nothing was changed: then the checkpoint's own holds, its window and threshold included."""
        ras = self._engine.checkpoint.config.lm.ras
        temperature, top_p, top_k = form.temperature, form.top_p, int(form.top_k)
        if (temperature, top_p, top_k) == (1.0, ras.top_p, ras.top_k):
            return None
        return SamplingParams("ras", temperature, top_p, top_k, window=ras.win_size, repeat_threshold=ras.tau_r)


def new_voice(reference: str | None, part: Shown | None, consent: bool) -> AudioClip:
    """The part of a recording that is to be cloned, with an end."""
    clip = opened(reference, "add a voice first: upload or record a few seconds of somebody speaking")
    if not consent:
        raise RequestError("a voice belongs to a person: tick that it is yours or that its owner agrees")
    return close_end(cut(clip, Part.of(part).window))


def without_tokens(text: str) -> str:
    """A control token that somebody typed is text: its brackets go, its word stays.

    A prompt that was pasted from elsewhere goes as a whole: nobody wants to hear it, and the front end adds its own.
    """
    return _CONTROL_TOKEN.sub(r" \1 ", _PASTED_PROMPT.sub("", text)).strip()


def text_notices(text: str | None, language: str) -> str:
    """What to know before a text is spoken, as Markdown lines."""
    said = languages.notices(written(text), language)
    if without_tokens(written(text)) != written(text):
        said.append("Control tokens are not needed; what stands in their brackets is read as text.")
    return "\n\n".join(said)


def written(field: str | None) -> str:
    """What was written into a field; one that was never shown holds None."""
    return (field or "").strip()


def opened(path: str | None, missing: str) -> AudioClip:
    if path is None:
        raise RequestError(missing)
    return load_clip(Path(path))


def _seed(field: str | None) -> int | None:
    try:
        return int(written(field)) if written(field) else None
    except ValueError:
        raise RequestError(f"the seed is {field!r}; write a whole number, or nothing for a new one") from None


def _instruction(field: str | None) -> str:
    instruction = without_tokens(written(field))
    if not instruction:
        raise RequestError("write how it should be said, or choose to speak the text as it is")
    return instruction

"""The functions behind Speak and Stop, and behind the preview of what will be spoken."""

import base64
import secrets
from collections.abc import Iterator
from typing import Any

import gradio as gr

from app.figures import expected_seconds
from app.form import CONVERT, INSTRUCT, SAY, Form, FormReader, written
from app.history import History
from app.reference_handlers import Shown
from app.script import ScriptStream
from app.speaking import Job, Outputs, Speaker, Tabs
from app.visits import Visits
from runtime import Engine, RequestError, SpeechError, SpeechPlan, SpeechRequest


class Handlers:
    """Holds the engine and the open tabs. Gradio calls its methods from many threads."""

    def __init__(self, engine: Engine, speaker: Speaker, reader: FormReader, visits: Visits, tabs: Tabs) -> None:
        self._engine = engine
        self._speaker = speaker
        self._reader = reader
        self._visits = visits
        self._tabs = tabs

    def speak(
        self,
        reference: str | None,
        part: Shown | None,
        consent: bool,
        task: str,
        transcript: str | None,
        instruction: str | None,
        source: str | None,
        text: str | None,
        language: str,
        speed: float,
        seed: str | None,
        temperature: float,
        top_p: float,
        top_k: float,
        trim: bool,
        normalize: bool,
        saved: str | None,
        words: str | None,
        script: bool,
        visit: str,
        job: float,
        http: gr.Request,
    ) -> Iterator[Outputs]:
        """One click on Speak."""
        sound = (speed, seed, temperature, top_p, top_k, trim, normalize)
        form = Form(
            reference,
            part,
            consent,
            task,
            transcript,
            instruction,
            source,
            text,
            language,
            *sound,
            saved,
            words,
            script,
        )
        token, tab = visit_token(visit, http), self._tabs.of(http)

        def opening() -> Job:
            requests = self._reader.requests(form, self._visits.voices(token))
            if question := self._reader.doubt(form, requests[0].reference):
                tab.ask((form.transcript, str(form.part)), question)
            return self._open(requests, form, self._visits.history(token))

        yield from self._speaker.perform(tab, int(job), opening)

    def _open(self, requests: list[SpeechRequest], form: Form, history: History) -> Job:
        stream = ScriptStream(self._engine, requests) if form.is_script else self._engine.stream(requests[0])
        job = Job(stream, sum(map(expected_seconds, requests)))
        try:
            script = written(form.text) if form.is_script else None
            job.keeping = history.begin(requests[0], stream.stats, form.voice_name, script)
        except RequestError as full:  # it is spoken all the same
            job.note = str(full)
        return job

    def enter(self, visit: str, words: str, http: gr.Request) -> tuple[str, str, str]:
        """The page was opened: the visit gets its token, and the fields what the browser kept."""
        token = visit or secrets.token_urlsafe(16)
        self._visits.enter(token, str(http.session_hash))
        return token, token, words

    def leave(self, http: gr.Request) -> None:
        """The tab was closed: nobody listens any more."""
        self._tabs.leave(http)
        self._visits.leave(str(http.session_hash))

    def stop(self, job: float, http: gr.Request) -> None:
        """Ends the tab's stream at once, or keeps a job that still waits in line from speaking."""
        self._tabs.of(http).stop(int(job))

    def plan(
        self,
        task: str,
        transcript: str | None,
        instruction: str | None,
        text: str | None,
        language: str,
        speed: float,
        normalize: bool,
        words: str | None,
        script: bool,
    ) -> dict[str, Any]:
        """The sentences as they will be spoken, with estimated lengths, for the preview (lists.js)."""
        if task == CONVERT or not written(text):
            return {}
        ras = self._engine.checkpoint.config.lm.ras
        sampling = (1.0, ras.top_p, ras.top_k)
        form = Form(
            *(None, None, True, task, transcript, instruction, None, text, language),
            *(speed, "", *sampling, False, normalize),
            words=words,
            script=script,
        )
        try:
            return shown_plan([self._engine.plan(request) for request in self._reader.plans(form)])
        except SpeechError as error:
            return {"problem": str(error)}


def shown_plan(plans: list[SpeechPlan]) -> dict[str, Any]:
    return {
        "seconds": sum(plan.expected_seconds for plan in plans),
        "warnings": list(dict.fromkeys(warning for plan in plans for warning in plan.warnings)),
        "sentences": [
            {
                "text": sentence.text,
                "written": "" if _letters(sentence.written) == _letters(sentence.text) else sentence.written.strip(),
                "seconds": sentence.expected_seconds,
                "before": sentence.pause_before_seconds,
                "after": sentence.pause_after_seconds,
            }
            for plan in plans
            for sentence in plan.sentences
        ],
    }


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def visit_token(visit: str | None, http: gr.Request) -> str:
    """What names the visit: the token that the browser keeps, or the session of a script."""
    return visit or str(http.session_hash)


def saved_by_the_page(name: str, content: bytes) -> dict[str, str]:
    """A file that no URL leads to: it is in the answer itself (lists.js)."""
    return {"key": secrets.token_hex(4), "name": name, "content": base64.b64encode(content).decode("ascii")}


def show_fields(task: str) -> tuple[Any, ...]:
    """Visibility of the transcript's box, instruction, source and text's box for what is to be done."""
    return tuple(
        gr.update(visible=shown) for shown in (task == SAY, task == INSTRUCT, task == CONVERT, task != CONVERT)
    )

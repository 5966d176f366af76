"""The functions behind the saved voices: choose, keep, change, listen, carry, delete.

No sound of a saved voice becomes a file of Gradio's cache: what the page needs of it is in the answer itself, and the
upload that a voice was made of is deleted there.
"""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gradio as gr
import soundfile
import soxr

from app.form import new_voice, written
from app.reference_check import transcript_doubt
from app.reference_handlers import ReferenceHandlers, Shown
from app.ui_handlers import saved_by_the_page, visit_token
from app.visits import Visits
from app.voice_files import encode_clip, file_name
from app.voices import Voice, VoiceLibrary
from runtime import RequestError

NEW = ""  # in the list of voices: the recording on the page
STATEMENT = "This voice is mine, or its owner agrees to being cloned"  # what is ticked, kept as the record of consent
HEARD_AT = 24_000  # Hz; a rate that MP3 has

Update = Any
Changes = tuple[Update, ...]  # the list of voices, and what `show` gives


class VoiceHandlers:
    """Holds the visits and the speech detector. Gradio calls its methods from many threads."""

    def __init__(self, visits: Visits, references: ReferenceHandlers) -> None:
        self._visits = visits
        self._references = references

    def voices(self, visit: str, http: gr.Request) -> Update:
        """The list of voices, with the recording on the page chosen; hidden until there is one."""
        return self._choices(self._library(visit, http), NEW)

    def show(self, name: str | None, visit: str, http: gr.Request) -> Changes:
        """Card of the chosen voice and its fields, in place of the recording on the page."""
        return self._shown(self._library(visit, http), written(name))

    def keep(
        self,
        reference: str | None,
        part: Shown | None,
        consent: bool,
        transcript: str | None,
        name: str | None,
        description: str | None,
        owner: str | None,
        visit: str,
        http: gr.Request,
    ) -> tuple[Update, ...]:
        """Saves the used part of the recording on the page and chooses it. Consent was for this recording alone."""
        library = self._library(visit, http)
        with _told("Not saved"):
            clip = new_voice(reference, part, consent)
            statement = ". ".join(filter(None, (STATEMENT, written(owner))))
            voice = library.add(
                written(name),
                encode_clip(clip)[1],
                consent=statement,
                transcript=written(transcript),
                description=written(description),
            )
        if written(transcript) and (
            doubt := transcript_doubt(written(transcript), self._references.speech_seconds(clip))
        ):
            gr.Warning(doubt, title="Saved, with a doubt")
        Path(reference or "").unlink(missing_ok=True)  # nobody with its address shall fetch it any more
        return self._choices(library, voice.name), *self._shown(library, voice.name), None, False, "", "", ""

    def change(
        self,
        chosen: str,
        name: str | None,
        description: str | None,
        transcript: str | None,
        visit: str,
        http: gr.Request,
    ) -> Changes:
        """Gives the chosen voice another name, description or words."""
        library = self._library(visit, http)
        with _told("Not changed"):
            if written(name) != chosen:
                chosen = library.rename(chosen, written(name)).name
            library.change(chosen, transcript=written(transcript), description=written(description))
        return self._choices(library, chosen), *self._shown(library, chosen)

    def remove(self, chosen: str, visit: str, http: gr.Request) -> Changes:
        library = self._library(visit, http)
        with _told("Not deleted"):
            library.remove(chosen)
        return self._choices(library, NEW), *self._shown(library, NEW)

    def export(self, chosen: str, visit: str, http: gr.Request) -> dict[str, str]:
        """The voice as one zip file, which the page saves by itself."""
        with _told("Not exported"), TemporaryDirectory(prefix="mynah-") as folder:
            archive = Path(folder) / "voice.zip"
            self._library(visit, http).export(chosen, archive)
            return saved_by_the_page(file_name(chosen), archive.read_bytes())

    def import_(self, archive: str, visit: str, http: gr.Request) -> Changes:
        """Takes in an exported voice and chooses it."""
        library, path = self._library(visit, http), Path(archive)
        try:
            with _told("Not imported"):
                voice = library.import_(path)
        finally:
            path.unlink(missing_ok=True)
        return self._choices(library, voice.name), *self._shown(library, voice.name)

    def listen(self, chosen: str, visit: str, http: gr.Request) -> dict[str, str]:
        """Sound of the voice for the page's own ears, as an MP3 inside the answer."""
        with _told("Cannot be heard"):
            clip = self._library(visit, http).clip(chosen)
        file = io.BytesIO()
        samples = soxr.resample(clip.samples, clip.sample_rate, HEARD_AT)
        soundfile.write(file, samples, HEARD_AT, format="MP3", subtype="MPEG_LAYER_III")
        return {"sound": f"data:audio/mpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"}

    def _library(self, visit: str, http: gr.Request) -> VoiceLibrary:
        return self._visits.voices(visit_token(visit, http))

    def _choices(self, library: VoiceLibrary, chosen: str) -> Update:
        names = [voice.name for voice in library.voices()]
        choices = [("A new recording", NEW), *((name, name) for name in names)]
        return gr.update(choices=choices, value=chosen, visible=bool(names))

    def _shown(self, library: VoiceLibrary, name: str) -> Changes:
        """Visibility of the two places, the card, and what stands in the fields that change it."""
        if not name:
            return gr.update(visible=True), gr.update(visible=False), {}, "", "", ""
        with _told("Not found"):
            voice = library.find(name)
        card = _card(voice)
        return gr.update(visible=False), gr.update(visible=True), card, voice.name, voice.description, voice.transcript


def _card(voice: Voice) -> dict[str, Any]:
    return {
        "name": voice.name,
        "description": voice.description,
        "seconds": voice.seconds,
        "transcript": voice.transcript,
        "consent": voice.consent.statement,
        "agreed": voice.consent.at.isoformat(),
    }


@contextmanager
def _told(title: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise gr.Error(str(error), title=title, print_exception=False) from error

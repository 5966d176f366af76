"""Layout of the left column: the voice, new or saved, and the settings that few people change."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from app.examples import Example
from app.form import CONVERT, INSTRUCT, SAY
from app.reference_handlers import ReferenceHandlers, import_recording
from app.voice_handlers import NEW, STATEMENT, VoiceHandlers
from runtime import Engine

REFERENCE = Path(__file__).parent / "reference.html"

_NO_MICROPHONE = """<p class="mynah-no-microphone">No microphone here: browsers give it to https pages and to this
machine's own. Upload a recording instead.</p>"""

_ON_LOAD_REFERENCE = "mynahReference(element, props, watch);"
_WORDS_ARE_NEW = "() => dispatchEvent(new Event('mynah-words'))"
_ASK_AGAIN = "() => false"  # another recording is another person's

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}  # events of the page alone


@dataclass(frozen=True)
class VoiceColumn:
    """What other parts of the page read or write."""

    saved: gr.Dropdown
    new_box: gr.Column
    shown: list[gr.components.Component]  # outputs of VoiceHandlers.show
    card: gr.HTML
    reference: gr.Audio
    part: gr.HTML
    consent: gr.Checkbox
    transcript_box: gr.Column
    transcript: gr.Textbox


def task_radio() -> gr.Radio:
    return gr.Radio(
        [("A text", SAY), ("A text, in a certain way", INSTRUCT), ("A recording", CONVERT)],
        value=SAY,
        label="What to speak",
        elem_id="task",
    )


def voice_column(
    voices: VoiceHandlers, references: ReferenceHandlers, visit: gr.Textbox, carrier: gr.HTML
) -> VoiceColumn:
    """The place for a voice: a recording with its verdict and consent, or one that was saved."""
    saved = gr.Dropdown(
        [("A new recording", NEW)],
        value=NEW,
        label="Speak with",
        allow_custom_value=True,  # scripts may name a voice without opening the list
        visible=False,
        elem_id="saved",
    )
    with gr.Column() as new_box:
        reference, video = recording("Voice", "reference")
        gr.HTML(_NO_MICROPHONE)
        examples = _examples(references.examples)
        part = gr.HTML(
            {},
            html_template=REFERENCE.read_text(encoding="utf-8"),
            js_on_load=_ON_LOAD_REFERENCE,
            apply_default_css=False,
            elem_id="part",
        )
        consent = gr.Checkbox(label=STATEMENT, elem_id="consent")
        transcript_box, transcript = _transcript(references, reference, part)
        keeping = _keep_fold()
    with gr.Column(visible=False) as kept_box:
        card, change, *fields = _kept_voice()
    chosen = [reference, transcript, consent]
    examples.click(references.example, examples, chosen, queue=False, api_visibility="private")
    # In a line of its own: only queued events may send more than one value.
    reference.change(references.judge, reference, part, concurrency_limit=4, show_progress="hidden", api_name="judge")
    # Not when an upload has ended: somebody may have ticked the box meanwhile, and before another one comes a clear.
    for event in (reference.start_recording, reference.clear, video.upload):
        event(None, None, consent, js=_ASK_AGAIN)

    shown = [new_box, kept_box, card, *fields]
    saved.input(voices.show, [saved, visit], shown, **QUIET)
    name, description, owner, keep, import_ = keeping
    keep.click(
        voices.keep,
        [reference, part, consent, transcript, name, description, owner, visit],
        [saved, *shown, reference, consent, name, description, owner],
        **QUIET,
    )
    import_.upload(voices.import_, [import_, visit], [saved, *shown], **QUIET)
    change.click(voices.change, [saved, *fields, visit], [saved, *shown], **QUIET)
    card.play(voices.listen, [saved, visit], carrier, **QUIET)
    card.download(voices.export, [saved, visit], carrier, **QUIET)
    card.delete(voices.remove, [saved, visit], [saved, *shown], **QUIET)
    return VoiceColumn(saved, new_box, shown, card, reference, part, consent, transcript_box, transcript)


def recording(label: str, name: str) -> tuple[gr.Audio, gr.UploadButton]:
    """A recording: uploaded, recorded, or taken by the button out of a file that browsers call a video."""
    audio = gr.Audio(label=label, type="filepath", sources=["upload", "microphone"], elem_id=name)
    with gr.Column(elem_id=f"{name}-video-box", elem_classes="mynah-below"):
        other = gr.UploadButton("Take it from a video", size="sm")
    other.upload(import_recording, other, audio, queue=False, show_progress="hidden", api_visibility="private")
    return audio, other


def _transcript(references: ReferenceHandlers, reference: gr.Audio, part: gr.HTML) -> tuple[gr.Column, gr.Textbox]:
    with gr.Column(elem_classes="mynah-tight") as box:
        transcript = gr.Textbox(
            "",
            label="Words spoken in the voice recording",
            info="Optional. With them the likeness is closer; without, the text may be in another language.",
            elem_id="transcript",
        )
        write = gr.Button("Write the words down", size="sm", elem_id="write")
    write.click(
        references.transcribe, [reference, part], transcript, concurrency_limit=1, api_name="transcribe"
    ).success(None, js=_WORDS_ARE_NEW)
    return box, transcript


def _examples(examples: list[Example]) -> gr.Dataset:
    return gr.Dataset(
        components=[gr.Textbox(visible=False)],
        samples=[[example.name] for example in examples],
        label="Voices to try",
        type="index",
        visible=bool(examples),
        elem_id="examples",
    )


def _keep_fold() -> tuple[gr.Textbox, gr.Textbox, gr.Textbox, gr.Button, gr.UploadButton]:
    with gr.Accordion("Keep this voice", open=False, elem_id="keep-fold"):
        name = gr.Textbox("", label="Name", max_lines=1, elem_id="keep-name")
        description = gr.Textbox("", label="Description", max_lines=1, placeholder="Calm, close to the microphone.")
        owner = gr.Textbox("", label="Whose voice it is", max_lines=1, placeholder="Ada Lovelace, who agreed by letter")
        with gr.Row(elem_classes="mynah-buttons"):
            import_ = gr.UploadButton("Import a voice", size="sm", file_types=[".zip"], elem_id="import")
            keep = gr.Button("Keep", size="sm", elem_id="keep")
    return name, description, owner, keep, import_


def _kept_voice() -> tuple[gr.HTML, gr.Button, gr.Textbox, gr.Textbox, gr.Textbox]:
    """Card of a saved voice, and the fields that change it behind their button."""
    card = gr.HTML(
        {},
        html_template='<section class="mynah-list mynah-voice" data-list></section>',
        js_on_load="mynahVoiceCard(element, props, watch, trigger);",
        apply_default_css=False,
        elem_id="voice-card",
    )
    with gr.Accordion("Change this voice", open=False, elem_id="change-fold"):
        name = gr.Textbox("", label="Name", max_lines=1, elem_id="change-name")
        description = gr.Textbox("", label="Description", max_lines=1, elem_id="change-description")
        transcript = gr.Textbox("", label="Words spoken in the voice recording", elem_id="change-transcript")
        with gr.Row(elem_classes="mynah-buttons"):
            change = gr.Button("Save the changes", size="sm", elem_id="change")
    return card, change, name, description, transcript


def advanced_settings(engine: Engine) -> dict[str, gr.components.Component]:
    """What few people change."""
    ras = engine.checkpoint.config.lm.ras
    with gr.Accordion("More settings", open=False, elem_id="settings-fold"):
        with gr.Row():
            speed = gr.Slider(0.5, 2.0, value=1.0, step=0.05, label="Speed")
            seed = gr.Textbox("", label="Seed", placeholder="a new one each time", elem_id="seed")
        with gr.Row():
            temperature = gr.Slider(0.0, 1.5, value=1.0, step=0.05, label="Temperature", min_width=200)
            top_p = gr.Slider(0.05, 1.0, value=ras.top_p, step=0.05, label="Top-p", min_width=200)
            top_k = gr.Slider(1, 100, value=ras.top_k, step=1, label="Top-k", min_width=200)
        trim = gr.Checkbox(label="Use only the first 30 s of a longer recording whose words are spoken")
        normalize = gr.Checkbox(value=True, label="Write numbers, units and symbols out as words")
    return {
        "speed": speed,
        "seed": seed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "trim": trim,
        "normalize": normalize,
    }

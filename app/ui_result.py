"""Layout of what comes out: the player, the files, the sentences, and what was made before."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from app.audio_format import FILE_FORMATS
from app.history_handlers import REUSED, HistoryHandlers
from app.settings import Settings
from app.ui_voice import QUIET, VoiceColumn
from app.voice_handlers import VoiceHandlers

HERE = Path(__file__).parent

_ON_LOAD = "mynahPanel(element, mynahPlayer); watch('value', () => mynahPlayer.take(props.value));"
_KEYS = """<p class="mynah-keys"><kbd>Ctrl</kbd> <kbd>Enter</kbd> <span>speaks</span> · <kbd>Esc</kbd>
<span>stops</span> · <kbd>Space</kbd> <span>plays and pauses</span></p>"""
BEGIN = "(...inputs) => [...inputs.slice(0, -1), mynahPlayer.begin()]"  # the last input is the job's number
ON_FAILURE = "() => mynahPlayer.fail('the page lost the engine; reload it and try again')"
# The recording that comes back is the part that was used: all of it counts.
_WHOLE = "(recording) => recording && dispatchEvent(new Event('mynah-whole'))"


@dataclass(frozen=True)
class Results:
    """Outputs of whatever speaks, in its order, and the history."""

    player: gr.HTML
    outputs: list[gr.components.Component]
    sentences: gr.HTML
    fold: gr.Accordion
    history: gr.HTML

    @property
    def listed(self) -> list[gr.blocks.Block]:
        """Outputs of HistoryHandlers.entries."""
        return [self.history, self.fold]


def results() -> Results:
    player = gr.HTML(
        html_template=(HERE / "panel.html").read_text(encoding="utf-8"),
        js_on_load=_ON_LOAD,
        apply_default_css=False,
        elem_id="player",
    )
    result = gr.Audio(label="Result", interactive=False, buttons=["download"], elem_id="result")
    with gr.Row(elem_classes="mynah-files"):
        files = [gr.DownloadButton(name.upper(), size="sm", elem_id=f"save-{name}") for name in FILE_FORMATS[1:]]
    sentences = gr.HTML(
        {},
        html_template='<details class="mynah-list" data-list hidden><summary></summary><div></div></details>',
        js_on_load="mynahSentences(element, props, watch, trigger);",
        apply_default_css=False,
        elem_id="sentences",
    )
    with gr.Accordion("What was made", open=False, visible=False, elem_id="history-fold") as fold:
        history = gr.HTML(
            {},
            html_template='<div class="mynah-list mynah-history" data-list></div>',
            js_on_load="mynahHistory(element, props, watch, trigger);",
            apply_default_css=False,
            elem_id="history",
        )
    gr.HTML(_KEYS)
    return Results(player, [player, result, *files, sentences], sentences, fold, history)


def speaking_event(settings: Settings) -> dict[str, Any]:
    """What all events have in common that use the engine: one line for them all."""
    return {
        "js": BEGIN,
        "trigger_mode": "multiple",
        "concurrency_id": "engine",
        "concurrency_limit": settings.page_streams,
        "show_progress": "minimal",
    }


def wire_history(
    made: Results,
    handlers: HistoryHandlers,
    settings: Settings,
    voice: VoiceColumn,
    voices: VoiceHandlers,
    fields: dict[str, gr.components.Component],
    carrier: gr.HTML,
) -> None:
    """Listens to the buttons of the list and of the sentences."""
    visit, job = fields["visit"], fields["job"]
    again = speaking_event(settings) | {"show_progress_on": made.player, "api_visibility": "private"}
    for list_ in (made.history, made.sentences):
        list_.play(handlers.replay, [visit, job], made.outputs, js=BEGIN, trigger_mode="multiple", **QUIET).failure(
            None, js=ON_FAILURE
        )
    more = [
        made.history.submit(handlers.resume, [visit, job], made.outputs, **again),
        made.sentences.retry(handlers.say_again, [visit, job], made.outputs, **again),
    ]
    for event in more:
        event.failure(None, js=ON_FAILURE)
        event.then(handlers.entries, visit, made.listed, **QUIET)
    made.history.download(handlers.subtitles, visit, carrier, **QUIET)
    made.history.delete(handlers.remove, visit, made.listed, **QUIET)
    reused = made.history.edit(handlers.reuse, visit, [fields[name] for name in REUSED], **QUIET)
    reused.success(None, voice.reference, js=_WHOLE)
    reused.success(voices.show, [voice.saved, visit], voice.shown, **QUIET)
    made.fold.expand(handlers.entries, visit, made.listed, **QUIET)

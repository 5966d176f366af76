"""Layout of the page and nothing else: which component is where, and which handler it calls."""

import html
from pathlib import Path

import gradio as gr

from app.examples import load_examples
from app.figures import notice
from app.form import FormReader
from app.history_handlers import HistoryHandlers
from app.reference_handlers import ReferenceHandlers
from app.settings import Settings
from app.speaking import Speaker, Tabs
from app.transcribe import Transcriber
from app.ui_handlers import Handlers, show_fields
from app.ui_result import ON_FAILURE, results, speaking_event, wire_history
from app.ui_text import text_column, wire_plan
from app.ui_voice import QUIET, advanced_settings, task_radio, voice_column
from app.visits import Visits
from app.voice_handlers import VoiceHandlers
from runtime import OFFICIAL, Engine

HERE = Path(__file__).parent
STYLE = HERE / "page.css"
_SCRIPTS = (
    *("answers", "language", "sinks", "player", "drawings", "panel"),
    *("reference", "dropzone", "lists", "keys", "status"),
)

_HEADER = """<header class="mynah-header"><h1>Mynah</h1>
<p>Give it a few seconds of a voice and a text, and hear it speak while it is still being made.</p>
<button type="button" class="pill" id="language">中文</button></header>"""
_KEPT = ("visit", "words")  # in the browser: what finds the visit again, and the word list
_ON_LOAD_CARRIER = "watch('value', () => mynahSave(props.value));"
_ON_STOP = "() => [mynahPlayer.stop()]"


def scripts() -> list[str]:
    """Texts of the page's scripts, in order; the first is the table of Chinese strings."""
    chinese = (HERE / "chinese.json").read_text(encoding="utf-8")
    return [
        f"window.mynahChinese = {chinese};",
        *((HERE / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS),
    ]


def theme() -> gr.themes.Base:
    """Fonts of the system: a page that has to fetch them from elsewhere waits for it, or fails without a network."""
    amber = dict.fromkeys(("button_primary_background_fill", "button_primary_background_fill_dark"), "*primary_400")
    bright = {f"button_primary_background_fill_hover{mode}": "*primary_300" for mode in ("", "_dark")}
    black = {
        f"button_primary_text_color{mode}": "*neutral_900" for mode in ("", "_dark")
    }  # on amber white is unreadable
    grey = ("body_text_color_subdued", "block_info_text_color", "input_placeholder_color", "block_label_text_color")
    return gr.themes.Default(
        primary_hue="amber",
        neutral_hue="stone",
        radius_size="lg",
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
    ).set(
        body_background_fill="*neutral_50",
        **dict.fromkeys(grey, "*neutral_600"),
        **dict.fromkeys([f"{name}_dark" for name in grey], "*neutral_300"),
        **amber,
        **bright,
        **black,
    )


def build_page(engine: Engine, settings: Settings) -> gr.Blocks:
    """The page as Gradio blocks, not yet mounted anywhere."""
    embed = engine.speaker_vector if engine.checkpoint.makes_speech else None
    references = ReferenceHandlers(Transcriber(settings.transcription), load_examples(), embed)
    visits, tabs, speaker = Visits(settings), Tabs(), Speaker(engine)
    handlers = Handlers(engine, speaker, FormReader(engine, settings, references), visits, tabs)
    voices = VoiceHandlers(visits, references)
    with gr.Blocks(title="Mynah", analytics_enabled=False, delete_cache=(600, settings.cache_seconds)) as page:
        # Fields hold "" and not None, so that scripts may leave them out.
        kept_visit, kept_words = (gr.BrowserState("", storage_key=f"mynah-{name}", secret="mynah") for name in _KEPT)
        visit = gr.Textbox("", visible="hidden", elem_id="visit")
        carrier = gr.HTML({}, js_on_load=_ON_LOAD_CARRIER, html_template="", visible="hidden", elem_id="carrier")
        job = gr.Number(visible="hidden", precision=0, value=0)
        gr.HTML(_HEADER)
        if told := notice(engine.checkpoint):
            told = html.escape(told).replace(OFFICIAL, f"<code>{OFFICIAL}</code>")
            gr.HTML(f'<div class="mynah-notice" role="note">{told}</div>')
        with gr.Row(equal_height=False):
            with gr.Column(min_width=320):
                task = task_radio()
                voice = voice_column(voices, references, visit, carrier)
                advanced = advanced_settings(engine)
            with gr.Column(min_width=320):
                column = text_column()
                with gr.Row():
                    speak = gr.Button("Speak", variant="primary", scale=3, elem_id="speak")
                    stop = gr.Button("Stop", scale=1, min_width=96, elem_id="stop")
                made = results()
        gr.HTML(_status(engine))

        fields = {
            **{"reference": voice.reference, "part": voice.part, "consent": voice.consent, "task": task},
            **{"transcript": voice.transcript, "instruction": column.instruction, "source": column.source},
            **{"text": column.text, "language": column.language, **advanced, "saved": voice.saved},
            **{"words": column.words, "script": column.script, "visit": visit, "job": job},
        }
        speaking = speak.click(
            handlers.speak,
            list(fields.values()),
            made.outputs,
            api_name="speak",
            show_progress_on=made.player,
            **speaking_event(settings),
        )
        speaking.failure(None, js=ON_FAILURE)
        jobs = HistoryHandlers(engine, speaker, visits, tabs)
        speaking.then(jobs.entries, visit, made.listed, **QUIET)
        stop.click(handlers.stop, job, None, js=_ON_STOP, queue=False, api_visibility="private")
        shown = [voice.transcript_box, column.instruction, column.source_box, column.box]
        task.change(show_fields, task, shown, queue=False, **QUIET)
        wire_plan(column, handlers, fields)
        wire_history(made, jobs, settings, voice, voices, fields, carrier)
        column.words.change(lambda words: words, column.words, kept_words, queue=False, **QUIET)
        arrived = page.load(handlers.enter, [kept_visit, kept_words], [kept_visit, visit, column.words], **QUIET)
        arrived.then(voices.voices, visit, voice.saved, **QUIET)
        arrived.then(jobs.entries, visit, made.listed, **QUIET)
        page.unload(handlers.leave)
    page.queue(max_size=settings.page_waiting)
    return page


def _status(engine: Engine) -> str:
    """The status line; status.js keeps its memory up to date."""
    live = engine.describe()
    short = " · ".join(
        html.escape(live[name]) for name in ("model", "stage 0 engine", "stage 0 device") if name in live
    )
    whole = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in live.items())
    return (
        f'<details class="mynah-status" id="status"><summary><span class="dot"></span>{short} · '
        f'<span>memory</span> <span data-status="memory">{html.escape(engine.memory())}</span></summary>'
        f"<dl>{whole}</dl></details>"
    )

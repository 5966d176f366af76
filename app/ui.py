"""Layout of the page and nothing else: which component is where, and which handler it calls."""

import html
from pathlib import Path

import gradio as gr

from app.audio_format import FILE_FORMATS
from app.examples import load_examples
from app.figures import notice
from app.languages import AUTO, KNOWN
from app.reference_handlers import ReferenceHandlers, import_recording
from app.settings import Settings
from app.transcribe import Transcriber
from app.ui_handlers import CONVERT, INSTRUCT, SAY, Handlers, show_fields, text_notices
from runtime import OFFICIAL, Engine

HERE = Path(__file__).parent
STYLE = HERE / "page.css"
_SCRIPTS = ("language", "sinks", "player", "drawings", "panel", "reference", "dropzone", "keys", "status")

_HEADER = """<header class="mynah-header"><h1>Mynah</h1>
<p>Give it a few seconds of a voice and a text, and hear it speak while it is still being made.</p>
<button type="button" class="pill" id="language">中文</button></header>"""
_NO_MICROPHONE = """<p class="mynah-no-microphone">No microphone here: browsers give it to https pages and to this
machine's own. Upload a recording instead.</p>"""
_KEYS = """<p class="mynah-keys"><kbd>Ctrl</kbd> <kbd>Enter</kbd> <span>speaks</span> · <kbd>Esc</kbd>
<span>stops</span> · <kbd>Space</kbd> <span>plays and pauses</span></p>"""

_ON_LOAD = "mynahPanel(element, mynahPlayer); watch('value', () => mynahPlayer.take(props.value));"
_ON_LOAD_REFERENCE = "mynahReference(element, props, watch);"
_ON_SPEAK = "(...inputs) => [...inputs.slice(0, -1), mynahPlayer.begin()]"  # the last input is the job's number
_ON_STOP = "() => [mynahPlayer.stop()]"
_ON_FAILURE = "() => mynahPlayer.fail('the page lost the engine; reload it and try again')"
_WORDS_ARE_NEW = "() => dispatchEvent(new Event('mynah-words'))"


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
    voices = ReferenceHandlers(Transcriber(settings.transcription), load_examples())
    handlers = Handlers(engine, settings, voices)
    with gr.Blocks(title="Mynah", analytics_enabled=False, delete_cache=(600, settings.cache_seconds)) as page:
        # Fields hold "" and not None, so that scripts may leave them out.
        gr.HTML(_HEADER)
        if told := notice(engine.checkpoint):
            told = html.escape(told).replace(OFFICIAL, f"<code>{OFFICIAL}</code>")
            gr.HTML(f'<div class="mynah-notice" role="note">{told}</div>')
        with gr.Row(equal_height=False):
            with gr.Column(min_width=320):
                task = _task()
                reference, part, consent = _voice(voices)
                transcript_box, transcript = _transcript(voices, reference, part)
                advanced = _settings(engine)
            with gr.Column(min_width=320):
                text_box, text, language = _text()
                instruction = _instruction()
                with gr.Column(visible=False) as source_box:
                    source = _recording("Recording whose words are spoken", "source")
                with gr.Row():
                    speak = gr.Button("Speak", variant="primary", scale=3, elem_id="speak")
                    stop = gr.Button("Stop", scale=1, min_width=96, elem_id="stop")
                player = gr.HTML(
                    html_template=_markup("panel"), js_on_load=_ON_LOAD, apply_default_css=False, elem_id="player"
                )
                result, files = _result()
                gr.HTML(_KEYS)
        gr.HTML(_status(engine))
        job = gr.Number(visible="hidden", precision=0, value=0)

        fields = [reference, part, consent, task, transcript, instruction, source, text, language, *advanced, job]
        speaking = speak.click(
            handlers.speak,
            fields,
            [player, result, *files],
            js=_ON_SPEAK,
            api_name="speak",
            trigger_mode="multiple",
            concurrency_id="engine",
            concurrency_limit=settings.page_streams,
            show_progress="minimal",
            show_progress_on=player,
        )
        speaking.failure(None, js=_ON_FAILURE)
        stop.click(handlers.stop, job, None, js=_ON_STOP, queue=False, api_visibility="private")
        task.change(
            show_fields,
            task,
            [transcript_box, instruction, source_box, text_box],
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
        page.unload(handlers.leave)
    page.queue(max_size=settings.page_waiting)
    return page


def _markup(name: str) -> str:
    return (HERE / f"{name}.html").read_text(encoding="utf-8")


def _task() -> gr.Radio:
    return gr.Radio(
        [("A text", SAY), ("A text, in a certain way", INSTRUCT), ("A recording", CONVERT)],
        value=SAY,
        label="What to speak",
        elem_id="task",
    )


def _voice(voices: ReferenceHandlers) -> tuple[gr.Audio, gr.HTML, gr.Checkbox]:
    """The place for a voice: recording, verdict with the part that is used, and consent."""
    reference = _recording("Voice", "reference")
    gr.HTML(_NO_MICROPHONE)
    part = gr.HTML(
        {},
        html_template=_markup("reference"),
        js_on_load=_ON_LOAD_REFERENCE,
        apply_default_css=False,
        elem_id="part",
    )
    consent = gr.Checkbox(label="This voice is mine, or its owner agrees to being cloned", elem_id="consent")
    # In a line of its own: only queued events may send more than one value.
    reference.change(voices.judge, reference, part, concurrency_limit=4, show_progress="hidden", api_name="judge")
    return reference, part, consent


def _recording(label: str, name: str) -> gr.Audio:
    """A recording: uploaded, recorded, or taken out of a file that browsers call a video."""
    audio = gr.Audio(label=label, type="filepath", sources=["upload", "microphone"], elem_id=name)
    with gr.Column(elem_id=f"{name}-video-box", elem_classes="mynah-below"):
        other = gr.UploadButton("Take it from a video", size="sm")
    other.upload(import_recording, other, audio, queue=False, show_progress="hidden", api_visibility="private")
    return audio


def _transcript(voices: ReferenceHandlers, reference: gr.Audio, part: gr.HTML) -> tuple[gr.Column, gr.Textbox]:
    with gr.Column(elem_classes="mynah-tight") as box:
        transcript = gr.Textbox(
            "",
            label="Words spoken in the voice recording",
            info="Optional. With them the likeness is closer; without, the text may be in another language.",
            elem_id="transcript",
        )
        write = gr.Button("Write the words down", size="sm", elem_id="write")
    write.click(voices.transcribe, [reference, part], transcript, concurrency_limit=1, api_name="transcribe").success(
        None, js=_WORDS_ARE_NEW
    )
    examples = voices.examples
    if examples:
        row = gr.Dataset(
            components=[gr.Textbox(visible=False)],
            samples=[[f"{example.name} ({example.licence})"] for example in examples],
            label="Voices to try",
            type="index",
            elem_id="examples",
        )
        row.click(voices.example, row, [reference, transcript], queue=False, api_visibility="private")
    return box, transcript


def _text() -> tuple[gr.Column, gr.Textbox, gr.Dropdown]:
    with gr.Column(elem_classes="mynah-tight") as box:
        text = gr.Textbox("", label="Text", lines=4, placeholder="What should it say?", elem_id="text")
        language = gr.Dropdown(
            [("Auto", AUTO), *((name, code) for code, name in KNOWN.items())],
            value=AUTO,
            label="Language of the text",
            elem_id="spoken-language",
        )
        notices = gr.Markdown(elem_classes="mynah-said", elem_id="notices")
    for event in (text.blur, language.change):
        event(text_notices, [text, language], notices, queue=False, show_progress="hidden", api_visibility="private")
    return box, text, language


def _instruction() -> gr.Textbox:
    return gr.Textbox(
        "",
        label="How to say it",
        placeholder="Slowly and softly, as if telling a secret.",
        visible=False,
        elem_id="instruction",
    )


def _settings(engine: Engine) -> list[gr.components.Component]:
    """What few people change, in the order of `speak`."""
    ras = engine.checkpoint.config.lm.ras
    with gr.Accordion("More settings", open=False):
        with gr.Row():
            speed = gr.Slider(0.5, 2.0, value=1.0, step=0.05, label="Speed")
            seed = gr.Textbox("", label="Seed", placeholder="a new one each time", elem_id="seed")
        with gr.Row():
            temperature = gr.Slider(0.0, 1.5, value=1.0, step=0.05, label="Temperature")
            top_p = gr.Slider(0.05, 1.0, value=ras.top_p, step=0.05, label="Top-p")
            top_k = gr.Slider(1, 100, value=ras.top_k, step=1, label="Top-k")
        trim = gr.Checkbox(label="Use only the first 30 s of a longer recording whose words are spoken")
        normalize = gr.Checkbox(value=True, label="Write numbers, units and symbols out as words")
    return [speed, seed, temperature, top_p, top_k, trim, normalize]


def _result() -> tuple[gr.Audio, list[gr.DownloadButton]]:
    """The finished sound: a player of Gradio's own with the WAV, and the other formats."""
    result = gr.Audio(label="Result", interactive=False, buttons=["download"], elem_id="result")
    with gr.Row(elem_classes="mynah-files"):
        files = [gr.DownloadButton(name.upper(), size="sm", elem_id=f"save-{name}") for name in FILE_FORMATS[1:]]
    return result, files


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

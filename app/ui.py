"""Layout of the page and nothing else: which component is where, and which handler it calls."""

import html
from pathlib import Path

import gradio as gr

from app.figures import NOISE_NOTICE
from app.settings import Settings
from app.ui_handlers import CONVERT, INSTRUCT, SAY, Handlers, import_recording, judge_reference, show_fields
from runtime import OFFICIAL, Engine

STYLE = Path(__file__).with_name("page.css")
SCRIPTS = (Path(__file__).with_name("player.js"), Path(__file__).with_name("panel.js"))

_HEADER = """<header class="mynah-header"><h1>Mynah</h1>
<p>Give it a few seconds of a voice and a text, and hear it speak while it is still being made.</p></header>"""

_FIGURES = {
    "wait": "Wait in line",
    "engine": "First audio, engine",
    "heard": "First audio, heard",
    "rtf": "Real-time factor",
    "sound": "Speech",
    "tokens": "Tokens",
    "underruns": "Underruns",
    "seed": "Seed",
    "mode": "Mode",
}

_PANEL = """<section class="mynah-card" data-mynah="card" data-state="idle">
<div class="row"><span class="dot"></span><span data-mynah="state" role="status">Ready</span>
<button type="button" data-mynah="listen" hidden>Tap to listen</button><span data-mynah="clock"></span></div>
<p data-mynah="message" role="alert"></p>
<canvas data-mynah="wave" aria-hidden="true"></canvas>
<dl>{figures}</dl></section>""".format(
    figures="".join(f'<div><dt>{label}</dt><dd data-mynah="{name}">–</dd></div>' for name, label in _FIGURES.items())
)

_ON_LOAD = "mynahPanel(element, mynahPlayer); watch('value', () => mynahPlayer.take(props.value));"
_ON_SPEAK = "(...inputs) => [...inputs.slice(0, -1), mynahPlayer.begin()]"  # the last input is the job's number
_ON_STOP = "() => [mynahPlayer.stop()]"
_ON_FAILURE = "() => mynahPlayer.fail('the page lost the engine; reload it and try again')"


def theme() -> gr.themes.Base:
    """Fonts of the system: a page that has to fetch them from elsewhere waits for it, or fails without a network."""
    amber = dict.fromkeys(("button_primary_background_fill", "button_primary_background_fill_dark"), "*primary_400")
    bright = {f"button_primary_background_fill_hover{mode}": "*primary_300" for mode in ("", "_dark")}
    black = {
        f"button_primary_text_color{mode}": "*neutral_900" for mode in ("", "_dark")
    }  # on amber white is unreadable
    grey = ("body_text_color_subdued", "block_info_text_color", "input_placeholder_color")
    return gr.themes.Default(
        primary_hue="amber",
        neutral_hue="stone",
        radius_size="lg",
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
    ).set(body_background_fill="*neutral_50", **dict.fromkeys(grey, "*neutral_500"), **amber, **bright, **black)


def build_page(engine: Engine, settings: Settings) -> gr.Blocks:
    """The page as Gradio blocks, not yet mounted anywhere."""
    handlers = Handlers(engine)
    with gr.Blocks(title="Mynah", analytics_enabled=False, delete_cache=(600, settings.cache_seconds)) as page:
        gr.HTML(_HEADER)
        if not engine.checkpoint.makes_speech:
            notice = html.escape(NOISE_NOTICE).replace(OFFICIAL, f"<code>{OFFICIAL}</code>")
            gr.HTML(f'<div class="mynah-notice" role="note">{notice}</div>')
        with gr.Row(equal_height=False):
            with gr.Column(min_width=320):
                task = gr.Radio(
                    [("A text", SAY), ("A text, in a certain way", INSTRUCT), ("A recording", CONVERT)],
                    value=SAY,
                    label="What to speak",
                    elem_id="task",
                )
                reference, verdict = _recording("Voice", "reference")
                transcript = gr.Textbox(
                    label="Words spoken in the voice recording",
                    info="Optional. With them the likeness is closer; without, the text may be in another language.",
                    elem_id="transcript",
                )
                with gr.Accordion("More settings", open=False):
                    with gr.Row():
                        speed = gr.Slider(0.5, 2.0, value=1.0, step=0.05, label="Speed")
                        seed = gr.Textbox(label="Seed", placeholder="a new one each time")
                    trim = gr.Checkbox(label="Use only the first 30 s of a longer voice recording")
                    normalize = gr.Checkbox(value=True, label="Write numbers, units and symbols out as words")
            with gr.Column(min_width=320):
                text = gr.Textbox(label="Text", lines=4, placeholder="What should it say?", elem_id="text")
                instruction = gr.Textbox(
                    label="How to say it",
                    placeholder="Slowly and softly, as if telling a secret.",
                    visible=False,
                    elem_id="instruction",
                )
                with gr.Column(visible=False) as source_box:
                    source, _ = _recording("Recording whose words are spoken", "source")
                with gr.Row():
                    speak = gr.Button("Speak", variant="primary", scale=3, elem_id="speak")
                    stop = gr.Button("Stop", scale=1, min_width=96, elem_id="stop")
                player = gr.HTML(html_template=_PANEL, js_on_load=_ON_LOAD, apply_default_css=False, elem_id="player")
                result = gr.Audio(label="Result", interactive=False, buttons=["download"], elem_id="result")
                gr.HTML(
                    f'<details class="mynah-engine"><summary>What is running</summary>{_described(engine)}</details>'
                )
        job = gr.Number(visible="hidden", precision=0, value=0)

        task.change(show_fields, task, [transcript, instruction, source_box, text], queue=False, show_progress="hidden")
        speaking = speak.click(
            handlers.speak,
            [reference, task, transcript, instruction, source, text, speed, seed, trim, normalize, job],
            [player, result],
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
        page.unload(handlers.leave)
        reference.change(judge_reference, reference, verdict, queue=False, show_progress="hidden")
    page.queue(max_size=settings.page_waiting)
    return page


def _recording(label: str, name: str) -> tuple[gr.Audio, gr.HTML]:
    """A place for a recording: uploaded, recorded, or taken out of a file that browsers call a video."""
    audio = gr.Audio(label=label, type="filepath", sources=["upload", "microphone"], elem_id=name)
    with gr.Row(elem_classes="mynah-below"):
        verdict = gr.HTML()
        other = gr.UploadButton("Take it from a video", size="sm", elem_id=f"{name}-video")
    other.upload(import_recording, other, audio, queue=False, show_progress="hidden")
    return audio, verdict


def _described(engine: Engine) -> str:
    return html.escape(" · ".join(f"{name}: {value}" for name, value in engine.describe().items()))

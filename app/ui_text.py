"""Layout of what is to be spoken: the text with its tools, the instruction, or a recording."""

from dataclasses import dataclass

import gradio as gr

from app.form import text_notices
from app.languages import AUTO, KNOWN
from app.ui_handlers import Handlers
from app.ui_voice import recording

_MARKS = """<p class="mynah-hint"><code>[pause 1.5s]</code> <span>is that much silence</span> ·
<code>[hang2][zhang3]</code> <span>is pinyin</span> · <code>[HH][AH0][L][OW1]</code> <span>is ARPAbet</span></p>"""


@dataclass(frozen=True)
class TextColumn:
    """What other parts of the page read or write."""

    box: gr.Column
    text: gr.Textbox
    language: gr.Dropdown
    instruction: gr.Textbox
    source_box: gr.Column
    source: gr.Audio
    words: gr.Textbox
    script: gr.Checkbox
    fold: gr.Accordion
    plan: gr.HTML


def text_column() -> TextColumn:
    with gr.Column(elem_classes="mynah-tight") as box:
        text = gr.Textbox("", label="Text", lines=4, placeholder="What should it say?", elem_id="text")
        language = gr.Dropdown(
            [("Auto", AUTO), *((name, code) for code, name in KNOWN.items())],
            value=AUTO,
            label="Language of the text",
            elem_id="spoken-language",
        )
        notices = gr.Markdown(elem_classes="mynah-said", elem_id="notices")
        fold, plan, words, script = _tools()
    for event in (text.blur, language.change):
        event(text_notices, [text, language], notices, queue=False, show_progress="hidden", api_visibility="private")
    instruction = gr.Textbox(
        "",
        label="How to say it",
        placeholder="Slowly and softly, as if telling a secret.",
        visible=False,
        elem_id="instruction",
    )
    with gr.Column(visible=False) as source_box:
        source, _ = recording("Recording whose words are spoken", "source")
    return TextColumn(box, text, language, instruction, source_box, source, words, script, fold, plan)


def _tools() -> tuple[gr.Accordion, gr.HTML, gr.Textbox, gr.Checkbox]:
    with gr.Accordion("Text tools", open=False, elem_id="tools-fold") as fold:
        plan = gr.HTML(
            {},
            label="As it will be spoken",
            html_template='<h2>As it will be spoken</h2><div class="mynah-list mynah-plan" data-list></div>',
            js_on_load="mynahPlan(element, props, watch);",
            apply_default_css=False,
            elem_id="plan",
        )
        gr.HTML(_MARKS)
        words = gr.Textbox(
            "",
            label="Word list",
            info="One word and its reading a line. Kept in this browser.",
            placeholder="PyTorch = pie torch",
            lines=2,
            elem_id="words",
        )
        script = gr.Checkbox(
            label="A script: each line begins with a saved voice",
            info="Ada: Where have you been?",
            elem_id="script",
        )
    return fold, plan, words, script


def wire_plan(column: TextColumn, handlers: Handlers, fields: dict[str, gr.components.Component]) -> None:
    """The preview follows whatever changes it."""
    names = ("task", "transcript", "instruction", "text", "language", "speed", "normalize", "words", "script")
    inputs = [fields[name] for name in names]
    events = (column.fold.expand, column.text.blur, column.words.blur, column.script.change, column.language.change)
    gr.on(
        events,
        handlers.plan,
        inputs,
        column.plan,
        queue=False,
        show_progress="hidden",
        api_name="plan",
        trigger_mode="always_last",  # a change that comes while a plan is made would be left out otherwise
    )

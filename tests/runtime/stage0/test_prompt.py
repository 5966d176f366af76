"""Layout and limits of the LM's input. The layout's numbers are held to the reference in test_lm.py."""

import pytest
import torch

from runtime.errors import RequestError
from runtime.stage0.prompt import check_prompt, embed_prompt, prompt_length
from tests.runtime.stage0.models import golden_config, prompt, seeded_lm


def test_layout_is_sos_text_task_speech():
    lm = seeded_lm()
    x = embed_prompt(lm, prompt(text=[5, 6], speech=[7]))
    text, speech = lm.backbone.embed_tokens.weight, lm.speech_embedding.weight
    expected = torch.stack((speech[lm.config.sos], text[5], text[6], speech[lm.config.task_id], speech[7]))
    assert torch.equal(x, expected)
    assert prompt_length(prompt(text=[5, 6], speech=[7])) == len(x)


def test_absent_parts_have_length_zero():
    lm = seeded_lm()
    assert len(embed_prompt(lm, prompt(text=[]))) == 2


@pytest.mark.parametrize("text", [[-1], [512], [3, 100_000]])
def test_text_ids_outside_the_table_are_refused(text):
    with pytest.raises(RequestError, match=r"text token id .* outside 0\.\.511"):
        check_prompt(golden_config(), prompt(text=text))


@pytest.mark.parametrize("speech", [[-1], [6561], [6562], [7000]])
def test_speech_ids_that_are_no_sound_are_refused(speech):
    """Trap 27: a control id or a negative one never reaches the embedding."""
    with pytest.raises(RequestError, match=r"reference speech token id .* outside 0\.\.6560"):
        check_prompt(golden_config(), prompt(speech=speech))


def test_prompt_longer_than_the_model_is_refused():
    with pytest.raises(RequestError, match="32769 positions, the model has 32768"):
        check_prompt(golden_config(), prompt(text=[1] * 32767))


def test_length_limit_below_one_is_refused():
    """Trap 68: there is no prompt that decodes without an end or without a token."""
    with pytest.raises(RequestError, match="max_tokens is 0"):
        check_prompt(golden_config(), prompt(max_tokens=0))

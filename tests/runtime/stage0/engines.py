"""Builds the engines that keep streams in slots, as TorchStage0 is built: (lm, max_streams, fidelity)."""

from copy import deepcopy
from typing import Literal

from runtime.stage0.lm import SpeechLM
from runtime.stage0.plain_steps import PlainSteps
from runtime.stage0.slot_engine import SlotStage0

POSITIONS = 1024  # of a slot


def build_slots(
    lm: SpeechLM, max_streams: int = 64, fidelity: Literal["intended", "official"] = "intended"
) -> SlotStage0:
    return SlotStage0(lm.config, PlainSteps(lm, max_streams, POSITIONS, fidelity))


def build_captured(
    lm: SpeechLM, max_streams: int = 64, fidelity: Literal["intended", "official"] = "intended"
) -> SlotStage0:
    from runtime.stage0.captured import CapturedSteps

    on_gpu = deepcopy(lm).to("cuda")  # the caller's stays where it is
    return SlotStage0(lm.config, CapturedSteps(on_gpu, max_streams, POSITIONS, fidelity))

"""Engines of vLLM for tests, where it is installed."""

import hashlib
from collections.abc import Callable

import pytest
import torch

from runtime.stage0.base import Stage0
from runtime.stage0.lm import SpeechLM
from tests.runtime.stage0.models import widened


@pytest.fixture(scope="session")
def build_vllm(tmp_path_factory) -> Callable[..., Stage0]:
    """Builds as TorchStage0 does. An idle engine with the same weights is given again, since a start takes a second;
    what an earlier stream left behind must not matter anyway.
    """
    from runtime.stage0.vllm_engine import VllmStage0

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = tmp_path_factory.mktemp("exports")
    started: dict[tuple[str, int, str], Stage0] = {}

    def build(lm: SpeechLM, max_streams: int = 64, fidelity: str = "intended") -> Stage0:
        digest = hashlib.sha256(repr(lm.config).encode())
        for weight in lm.state_dict().values():
            digest.update(weight.numpy().data)
        key = (digest.hexdigest(), max_streams, fidelity)
        if key not in started or started[key].live_streams:
            # On a GPU all of them live beside each other, and none is worth compiling.
            started[key] = VllmStage0(widened(lm), device, folder, max_streams, fidelity, 0.02, eager=True)
        return started[key]

    return build

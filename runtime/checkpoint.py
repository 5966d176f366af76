"""Opens a checkpoint folder in the released layout (spec 1.1) and gives its weights to modules, strictly.

A weight file is `<part>.safetensors` where there is one, else `<part>.pt`, read with `weights_only=True`. Three things
are settled here and known nowhere else: the storage form (half precision and int8 with per-channel scales become
float32), the old and new names of weight norm, and which of the file's names belongs to which module.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.recipe import read_recipe

Part = Literal["llm", "flow", "hift"]

DEMO_FOLDER = Path(__file__).resolve().parents[1] / "assets" / "demo"
RECIPE = "cosyvoice3.yaml"
TEXT_FOLDER = "CosyVoice-BlankEN"
SPEECH_TOKENIZER = "speech_tokenizer_v3.onnx"
SPEAKER_ENCODER = "campplus.onnx"
SCALE = ".int8_scale"  # beside an int8 tensor: its scale per row of the first dimension

# Name prefix in the file -> attribute of our module.
_PREFIXES: dict[Part, tuple[tuple[str, str], ...]] = {
    "llm": (("llm.model.model.", "backbone."),),
    "flow": (("decoder.estimator.", "estimator."),),
    "hift": (),
}
_TIED = {"llm.model.lm_head.weight": "llm.model.model.embed_tokens.weight"}  # present, equal and unused (spec 1.3)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened folder: what it is, and where its files lie."""

    folder: Path
    config: ModelConfig
    lm_name: str  # "llm" or "llm.rl": which file holds the language model
    fingerprint: str  # changes with the front-end files, so that cached references do not outlive them

    @property
    def text_folder(self) -> Path:
        return self.folder / TEXT_FOLDER

    @property
    def speech_tokenizer(self) -> Path:
        return self.folder / SPEECH_TOKENIZER

    @property
    def speaker_encoder(self) -> Path:
        return self.folder / SPEAKER_ENCODER

    @property
    def makes_speech(self) -> bool:
        """False for seeded weights that were never trained: they make noise, and say so with a file."""
        return not (self.folder / "UNTRAINED").exists()

    @property
    def is_demo(self) -> bool:
        """The small voice that comes with Mynah."""
        return self.folder == DEMO_FOLDER

    def weights(self, part: Part) -> dict[str, Tensor]:
        """Tensors of one part under the file's own names, expanded to float32."""
        return read_weights(self.folder, self.lm_name if part == "llm" else part)


def open_checkpoint(folder: Path, lm_name: str = "llm") -> Checkpoint:
    """Opens a folder in the released layout. Raises CheckpointError that lists every missing file."""
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder at {folder}; give a folder, a hub id or 'demo'")
    wanted: list[tuple[str, ...]] = [(RECIPE,), (SPEECH_TOKENIZER,), (SPEAKER_ENCODER,)]
    wanted += [(f"{TEXT_FOLDER}/{name}",) for name in ("config.json", "vocab.json", "merges.txt")]
    wanted += [(f"{name}.safetensors", f"{name}.pt") for name in (lm_name, "flow", "hift")]
    missing = [" or ".join(names) for names in wanted if not any((folder / name).is_file() for name in names)]
    if missing:
        raise CheckpointError(f"the checkpoint in {folder} lacks: {', '.join(missing)}")
    try:
        qwen = json.loads((folder / TEXT_FOLDER / "config.json").read_text(encoding="utf-8"))
    except ValueError as broken:
        raise CheckpointError(f"{TEXT_FOLDER}/config.json is not valid JSON: {broken}") from broken
    config = ModelConfig.from_recipe(read_recipe(folder / RECIPE), qwen)
    return Checkpoint(folder, config, lm_name, _fingerprint(folder))


def _fingerprint(folder: Path) -> str:
    """Identity of the front end by name, size and time of its files: hashing 1 GB at each start would be felt."""
    digest = hashlib.sha256()
    for name in (RECIPE, SPEECH_TOKENIZER, SPEAKER_ENCODER):
        stat = (folder / name).stat()
        digest.update(f"{name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()[:16]


def read_weights(folder: Path, name: str) -> dict[str, Tensor]:
    """Reads `name`.safetensors or `name`.pt. Raises CheckpointError when the file is missing or no state dict."""
    path = folder / f"{name}.safetensors"
    try:
        if path.is_file():
            stored = load_file(path)
        else:
            path = folder / f"{name}.pt"
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as missing:
        raise CheckpointError(f"{path.parent} holds neither {name}.safetensors nor {name}.pt") from missing
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as broken:
        raise CheckpointError(f"{path.name} cannot be read ({broken}); download it again") from broken
    except Exception as refused:  # unpickling raises what it likes; weights_only refuses anything but tensors
        raise CheckpointError(f"{path.name} holds more than tensors and was not opened: {refused}") from refused
    if not isinstance(stored, Mapping) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise CheckpointError(f"{path.name} is no state dict of tensors")
    return expand(stored)


def expand(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Storage form -> plain float32 tensors: int8 rows times their scale, half precision widened."""
    plain = {}
    for name, value in stored.items():
        if name.endswith(SCALE):
            continue
        if value.dtype == torch.int8:
            scale = stored.get(name + SCALE)
            if scale is None:
                raise CheckpointError(f"{name} is stored as int8 without {name + SCALE}")
            value = value.float() * scale.float().reshape(-1, *[1] * (value.dim() - 1))
        plain[name] = value.float() if value.is_floating_point() else value
    return plain


def load_strict(module: nn.Module, part: Part, weights: Mapping[str, Tensor]) -> None:
    """Fills a module from tensors under the file's names.

    Raises CheckpointError that lists missing, unexpected and misshapen names as the file spells them; a module is
    either filled whole or left alone.
    """
    given = {
        _modern(name.replace("generator.", "") if part == "hift" else name): value for name, value in weights.items()
    }
    for alias, original in _TIED.items():
        tied = given.pop(alias, None)
        if tied is not None and original in given and not torch.equal(tied, given[original]):
            raise CheckpointError(f"{alias} should be tied to {original}, but their values differ")
    expected = {released_name(part, name): value for name, value in module.state_dict(keep_vars=True).items()}
    problems = [f"missing {name}" for name in sorted(expected.keys() - given.keys())]
    problems += [f"unexpected {name}" for name in sorted(given.keys() - expected.keys())]
    problems += [
        f"{name} is {list(given[name].shape)}, the config says {list(expected[name].shape)}"
        for name in sorted(expected.keys() & given.keys())
        if given[name].shape != expected[name].shape
    ]
    problems += [
        f"{name} has NaN or infinite values"
        for name in sorted(expected.keys() & given.keys())
        if given[name].is_floating_point() and not torch.isfinite(given[name]).all()
    ]
    if problems:
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise CheckpointError(f"the {part} weights do not fit the model: {shown}")
    with torch.no_grad():
        module.load_state_dict({name: given[released_name(part, name)] for name in module.state_dict()}, assign=False)


def released_name(part: Part, ours: str) -> str:
    """Name in the released file of a tensor of our module."""
    for theirs, prefix in _PREFIXES[part]:
        if ours.startswith(prefix):
            return theirs + ours.removeprefix(prefix)
    return ours


def _modern(name: str) -> str:
    """Weight norm's older names -> the parametrisation's (spec 1.3)."""
    for old, new in ((".weight_g", "original0"), (".weight_v", "original1")):
        if name.endswith(old):
            return f"{name.removesuffix(old)}.parametrizations.weight.{new}"
    return name

"""Turns what a user calls a model into an opened checkpoint: `demo`, a folder, or a hub id that is fetched.

The official model is fetched at one pinned revision, only the files we use (4.4 GB of 9.7), resumed where it broke off.
Sizes are compared at each start, the two ONNX files by hash when they arrive. Files that a hub cache already holds are
taken without asking the network.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]  # requests', httpx', ...

from runtime.checkpoint import DEMO_FOLDER, Checkpoint, open_checkpoint
from runtime.errors import CheckpointError, EngineUnavailable

OFFICIAL = "FunAudioLLM/Fun-CosyVoice3-0.5B-2512"
OFFICIAL_REVISION = "29e01c4e8d000f4bcd70751be16fa94bf3d85a18"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a hub repository. Size and hash are known for the official release only."""

    name: str
    size: int | None = None  # bytes
    sha256: str | None = None


_RELEASED = (
    HubFile("cosyvoice3.yaml", 6_934),
    HubFile("CosyVoice-BlankEN/config.json"),
    HubFile("CosyVoice-BlankEN/vocab.json", 2_776_833),
    HubFile("CosyVoice-BlankEN/merges.txt", 1_402_109),
    HubFile("campplus.onnx", 28_303_423, "a6ac6a63997761ae2997373e2ee1c47040854b4b759ea41ec48e4e42df0f4d73"),
    HubFile(
        "speech_tokenizer_v3.onnx", 969_451_503, "23236a74175dbdda47afc66dbadd5bcb41303c467a57c261cb8539ad9db9208d"
    ),
    HubFile("hift.pt", 83_202_622),
    HubFile("flow.pt", 1_329_116_148),
)
_LANGUAGE_MODELS = {"llm": HubFile("llm.pt", 2_024_669_519), "llm.rl": HubFile("llm.rl.pt", 2_024_682_701)}


def resolve_checkpoint(model: str, *, lm_name: str = "llm", source: Literal["hub", "modelscope"] = "hub") -> Checkpoint:
    """Opens `model`: "demo", a folder in the released layout, or a hub id such as the official one.

    Raises CheckpointError when it is neither, when files are missing or damaged, when the disk is too full, and,
    without a network, with the list of what to fetch and where to put it. Raises EngineUnavailable when `source` is
    ModelScope and its library is not installed.
    """
    if model == "demo":
        return open_checkpoint(DEMO_FOLDER, lm_name)
    if Path(model).is_dir():
        return open_checkpoint(Path(model), lm_name)
    if model.count("/") != 1 or model.startswith((".", "/", "~")) or "\\" in model:
        raise CheckpointError(f"{model!r} is no folder here and no hub id; give a folder, an owner/name or 'demo'")
    files = wanted_files(model, lm_name)
    folder = _from_modelscope(model, files) if source == "modelscope" else _from_hub(model, files)
    _check_sizes(folder, files)
    return open_checkpoint(folder, lm_name)


def wanted_files(model: str, lm_name: str) -> tuple[HubFile, ...]:
    """The files we use of a repository in the released layout; sizes and hashes only for the official one."""
    if lm_name not in _LANGUAGE_MODELS:
        raise CheckpointError(f"no language model is called {lm_name!r}; choose one of {', '.join(_LANGUAGE_MODELS)}")
    files = (*_RELEASED, _LANGUAGE_MODELS[lm_name])
    return files if model == OFFICIAL else tuple(HubFile(file.name) for file in files)


def _from_hub(model: str, files: Sequence[HubFile]) -> Path:
    revision = OFFICIAL_REVISION if model == OFFICIAL else None
    held = {file.name: try_to_load_from_cache(model, file.name, revision=revision) for file in files}
    absent = [file for file in files if not isinstance(held[file.name], str)]
    _check_disk(Path(constants.HF_HUB_CACHE), absent)
    path = None
    for file in files:
        if file not in absent:
            path = Path(str(held[file.name]))
        else:
            path = _download(model, file, revision, absent)
            if file.sha256:
                _check_hash(path, file)
    assert path is not None
    return path.parents[files[-1].name.count("/")]


def _download(model: str, file: HubFile, revision: str | None, absent: Sequence[HubFile]) -> Path:
    try:
        return Path(hf_hub_download(model, file.name, revision=revision))  # resumes, and draws its own progress bar
    except GatedRepoError as gated:
        raise CheckpointError(
            f"{model} asks for an accepted licence and a login: `hf auth login`, then again"
        ) from gated
    except EntryNotFoundError as missing:
        if isinstance(missing, FileNotFoundError):  # the library's way to say: not in the cache and no network
            raise CheckpointError(_by_hand(model, absent)) from missing
        raise CheckpointError(f"{model} has no file {file.name}; is it a CosyVoice3 checkpoint?") from missing
    except RepositoryNotFoundError as missing:
        raise CheckpointError(f"the hub knows no repository {model}, or it is private") from missing
    except (TransportError, OSError) as offline:
        raise CheckpointError(_by_hand(model, absent)) from offline


def _from_modelscope(model: str, files: Sequence[HubFile]) -> Path:
    try:
        from modelscope.hub.errors import HubError
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError as missing:
        raise EngineUnavailable(
            "ModelScope's library is not installed; `pip install 'mynah[modelscope]'` or take the other hub"
        ) from missing
    _check_disk(Path.home(), files)
    try:
        folder = Path(snapshot_download(model, allow_patterns=[file.name for file in files]))
    except (HubError, OSError) as offline:
        raise CheckpointError(_by_hand(model, files)) from offline
    for file in files:
        if file.sha256 and (folder / file.name).is_file():
            _check_hash(folder / file.name, file)
    return folder


def _check_disk(folder: Path, files: Sequence[HubFile]) -> None:
    needed = sum(file.size or 0 for file in files)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"the model needs {needed / 1e9:.1f} GB more on the disk of {existing}, which has {free / 1e9:.1f} GB "
            "free; make room, or set HF_HOME to a folder on another disk"
        )


def _check_sizes(folder: Path, files: Sequence[HubFile]) -> None:
    for file in files:
        path = folder / file.name
        if file.size is not None and path.is_file() and path.stat().st_size != file.size:
            raise CheckpointError(
                f"{file.name} has {path.stat().st_size} bytes, the release has {file.size}; "
                f"delete {path} and start again"
            )


def _check_hash(path: Path, file: HubFile) -> None:
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != file.sha256:
        raise CheckpointError(f"{file.name} arrived damaged (sha256 {digest[:12]}…); delete {path} and start again")


def _by_hand(model: str, files: Sequence[HubFile]) -> str:
    revision = OFFICIAL_REVISION if model == OFFICIAL else "main"
    names = "".join(f"\n  {file.name}" + (f" ({file.size:,} bytes)" if file.size else "") for file in files)
    return (
        f"{model} could not be fetched: no network, or the hub does not answer. What arrived is kept, so that starting "
        f"again goes on from there. To do it by hand, take{names}\n"
        f"from https://huggingface.co/{model}/tree/{revision}, put them into one folder with these names, "
        "and start with --model FOLDER. Without any download, --model demo works."
    )

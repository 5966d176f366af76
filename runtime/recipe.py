"""The checkpoint's YAML as plain data. Nothing in it is executed.

The released file uses object tags (`!new:`, `!name:`, `!apply:`) and references (`!ref <a> * <b>`). Here a tag is a
label without effect: a tagged block becomes its mapping, list or scalar, and a reference becomes its number.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import CheckpointError

_REFERENCE = re.compile(r"<([\w.\[\]]+)>")
_PRODUCT = re.compile(r"\s*(-?[\d.]+(?:e-?\d+)?)\s*(?:\*\s*(-?[\d.]+(?:e-?\d+)?)\s*)?", re.IGNORECASE)


class _DataLoader(yaml.SafeLoader):
    """SafeLoader that reads unknown tags as the plain node below them."""


class _Reference(str):
    """The text behind `!ref`, resolved once the whole file is read."""


def _plain(loader: _DataLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    assert isinstance(node, yaml.ScalarNode)
    text = loader.construct_scalar(node)
    return _Reference(text) if suffix.startswith("ref") else text


_DataLoader.add_multi_constructor("!", _plain)
# YAML 1.1 takes 1e-06 for a string; the released file writes its numbers so.
_DataLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^-?\d+(\.\d*)?e[-+]?\d+$", re.IGNORECASE), list("-0123456789")
)


def read_recipe(path: Path) -> dict[str, Any]:
    """Reads a checkpoint's YAML file. Raises CheckpointError when it is no mapping or a reference leads nowhere."""
    try:
        top = yaml.load(path.read_text(encoding="utf-8"), Loader=_DataLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as broken:
        raise CheckpointError(f"{path.name} is not valid YAML: {broken}") from broken
    if not isinstance(top, dict):
        raise CheckpointError(f"{path.name} holds no mapping of settings; is the download complete?")
    return {key: _resolve(value, top, path.name, 0) for key, value in top.items()}


def _resolve(value: Any, top: dict[str, Any], file: str, depth: int) -> Any:
    if depth > 32:
        raise CheckpointError(f"{file}: references go round in a circle")
    if isinstance(value, dict):
        return {key: _resolve(inner, top, file, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, top, file, depth + 1) for inner in value]
    if not isinstance(value, _Reference):
        return value

    def look_up(name: str) -> Any:
        if name not in top:
            raise CheckpointError(f"{file}: reference to <{name}>, which is not defined")
        return _resolve(top[name], top, file, depth + 1)

    if whole := _REFERENCE.fullmatch(value.strip()):
        return look_up(whole[1])
    text = _REFERENCE.sub(lambda match: str(look_up(match[1])), value)
    product = _PRODUCT.fullmatch(text)
    if not product:
        return text
    left, right = (_number(part) for part in (product[1], product[2] or "1"))
    return left * right


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)

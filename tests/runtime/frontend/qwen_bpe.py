"""Qwen's text vocabulary, rebuilt from `golden/qwen_bpe.xz`: each merge as the pair of ids it joins, 24 bits each.

Token ids 0-255 are the single bytes, id 256 + i is what merge i makes, so the pairs give vocabulary and merges alike.
"""

import json
import lzma
from pathlib import Path

import numpy as np

from tests.golden import FOLDER


def byte_alphabet() -> list[str]:
    """The 256 signs that stand for bytes in byte-level BPE, in the order of their ids: printable bytes first."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def write_text_folder(folder: Path, pairs: np.ndarray | None = None) -> Path:
    """Writes vocab.json and merges.txt of a vocabulary whose merges are given as id pairs [n, 2]; default Qwen's."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens, merges = byte_alphabet(), []
    for left, right in (qwen_pairs() if pairs is None else pairs).tolist():
        merges.append(f"{tokens[left]} {tokens[right]}")
        tokens.append(tokens[left] + tokens[right])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    return folder


def qwen_pairs() -> np.ndarray:
    rows = np.frombuffer(lzma.decompress((FOLDER / "qwen_bpe.xz").read_bytes()), dtype=np.uint8).reshape(-1, 2, 3)
    return rows.astype(np.int64) @ np.array([65536, 256, 1])

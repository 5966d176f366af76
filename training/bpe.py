"""The demo's text vocabulary: a small byte-level BPE in the files of the released one.

    python -m training.bpe --text DIR --out DIR

256 bytes and the merges that fit; the control tokens follow in their listed order when the runtime reads it.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtime.frontend.tokenizer import SPECIAL_TOKENS, TextTokenizer
from training.shapes import TEXT_ROWS


def train_bpe(lines: Iterable[str], folder: Path, rows: int = TEXT_ROWS) -> None:
    """Learns the merges and writes vocab.json and merges.txt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=rows - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    write_json(folder / "vocab.json", model["vocab"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


class Spelling:
    """Encodes sentences for training: plainly, or with merges left out at random so that rare words are spelt."""

    def __init__(self, folder: Path) -> None:
        self.plain = TextTokenizer(folder)
        self._varied = TextTokenizer(folder)._tokenizer  # merge dropout is a matter of training alone
        self._varied.model.dropout = 0.1

    def encode(self, lines: list[str], varied: bool) -> list[list[int]]:
        if not varied:
            return [self.plain.encode(line) for line in lines]
        return [encoding.ids for encoding in self._varied.encode_batch(lines, add_special_tokens=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="folder with train.txt")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    train_bpe((options.text / "train.txt").read_text(encoding="utf-8").splitlines(), options.out)
    spelling = TextTokenizer(options.out)
    print(f"{spelling.size} rows of text; {spelling.encode('You are a helpful assistant.<|endofprompt|>Hello there.')}")


if __name__ == "__main__":
    main()

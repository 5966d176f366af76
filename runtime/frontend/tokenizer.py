"""Text to token ids: Qwen2's byte-level BPE plus the control tokens of CosyVoice3 (spec 2.9).

No id is typed here. The vocabulary comes from the checkpoint, the control tokens are appended after it in list order,
so a checkpoint with a small vocabulary of its own has ids of its own.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from runtime.errors import CheckpointError

END_OF_PROMPT = "<|endofprompt|>"

_EVENTS = """
    <|endoftext|> <|im_start|> <|im_end|> <|endofprompt|>
    [breath] <strong> </strong> [noise] [laughter] [cough] [clucking] [accent] [quick_breath] <laughter> </laughter>
    [hissing] [sigh] [vocalized-noise] [lipsmack] [mn] <|endofsystem|>
"""
_ARPABET = """
    AA* AE* AH* AO* AW* AY* B CH D DH EH* ER* EY* F G HH IH* IY* JH K L M N NG OW* OY* P R S SH T TH UH* UW* V W Y Z ZH
"""  # a star stands for the vowel's four forms: plain, and with stress 0, 1 and 2
_PINYIN = """
    a ai an ang ao b c ch d e ei en eng f g h i ian in ing iu ià iàn iàng iào iá ián iáng iáo iè ié iòng ióng iù iú
    iā iān iāng iāo iē iě iōng iū iǎ iǎn iǎng iǎo iǒng iǔ j k l m n o ong ou p q r s sh t u uang ue un uo
    uà uài uàn uàng uá uái uán uáng uè ué uì uí uò uó uā uāi uān uāng uē uě uī uō uǎ uǎi uǎn uǎng uǐ uǒ vè w x y z zh
    à ài àn àng ào á ái án áng áo è èi èn èng èr é éi én éng ér ì ìn ìng í ín íng ò òng òu ó óng óu ù ùn ú ún
    ā āi ān āng āo ē ēi ēn ēng ě ěi ěn ěng ěr ī īn īng ō ōng ōu ū ūn ǎ ǎi ǎn ǎng ǎo ǐ ǐn ǐng ǒ ǒng ǒu ǔ ǔn ǘ ǚ ǜ
"""


def _arpabet(symbol: str) -> list[str]:
    forms = ("", "0", "1", "2") if symbol.endswith("*") else ("",)
    return [f"[{symbol.rstrip('*')}{form}]" for form in forms]


SPECIAL_TOKENS: tuple[str, ...] = (
    *_EVENTS.split(),
    *(form for symbol in _ARPABET.split() for form in _arpabet(symbol)),
    *(f"[{syllable}]" for syllable in _PINYIN.split()),
)

# Qwen2's cut into words before any merge: contractions, letters with one leading sign, single digits, signs, blanks.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


class TextTokenizer:
    """The tokenizer of one checkpoint. Reading only, so threads may share it."""

    marker = END_OF_PROMPT

    def __init__(self, folder: Path) -> None:
        """Reads `vocab.json`, `merges.txt` and, where there is one, `special_tokens.json` (a list of strings)."""
        self._tokenizer = Tokenizer(_read_bpe(folder))
        self._tokenizer.normalizer = normalizers.NFC()
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        self.special_tokens = _read_special_tokens(folder)
        self._tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in self.special_tokens])

    @property
    def size(self) -> int:
        """Rows that the text embedding must have at least."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def end_of_prompt(self) -> int:
        return self.id_of(self.marker)

    def id_of(self, token: str) -> int:
        """Id of one token by name. Raises CheckpointError when the checkpoint does not have it."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise CheckpointError(f"the checkpoint's text vocabulary has no token {token}")
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Control tokens are recognised anywhere; nothing is added at either end."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        return len(self.encode(text))


def _read_bpe(folder: Path) -> models.BPE:
    vocabulary = _read_json(folder / "vocab.json")
    if not isinstance(vocabulary, dict) or sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise CheckpointError(f"{folder.name}/vocab.json does not number its tokens from 0 without gaps")
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
    if missing:
        # BPE drops what it has no token for, and a dropped byte would be a word that is never spoken.
        raise CheckpointError(f"{folder.name}/vocab.json lacks {len(missing)} of the 256 byte tokens")
    try:
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as broken:
        raise CheckpointError(f"{folder.name}/merges.txt cannot be read: {broken}") from broken
    merges = []
    for line in filter(None, lines[1:] if lines[0].startswith("#version") else lines):
        left, _, right = line.rstrip("\r").partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise CheckpointError(f"{folder.name}/merges.txt has a line that vocab.json does not know: {line!r}")
        merges.append((left, right))
    return models.BPE(vocabulary, merges)


def _read_special_tokens(folder: Path) -> tuple[str, ...]:
    path = folder / "special_tokens.json"
    if not path.is_file():
        return SPECIAL_TOKENS
    names = _read_json(path)
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(f"{folder.name}/{path.name} is no list of strings")
    if END_OF_PROMPT not in names:
        raise CheckpointError(f"{folder.name}/{path.name} lacks {END_OF_PROMPT}")
    return tuple(names)


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as broken:
        raise CheckpointError(f"{path.parent.name}/{path.name} cannot be read: {broken}") from broken

"""Trains the language model: text (and the tokens of other utterances of the speaker) -> speech tokens.

    python -m training.train_lm --corpus DIR --text DIR --vocabulary DIR --out DIR --seconds 600

A row is laid out as the runtime does it: sos, assistant sentence and marker, transcripts of the prompt, the sentence,
task, tokens of the prompt, tokens of the sentence, eos. Half of the rows have no prompt. Tokens are the loss wherever
they are speech; some inputs are replaced, so that the model learns to go on from its own mistakes.
Shapes: B rows, L positions.
"""

import argparse
import math
import queue
import threading
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.config import LMConfig
from runtime.frontend.prepare import ASSISTANT, MARKER
from runtime.stage0.lm import SpeechLM
from training import loop
from training.bpe import Spelling
from training.corpus import NEW_SPEAKERS, TRAIN, Corpus
from training.encode import Encoded
from training.shapes import LM

UNSCORED = -100
FILE = "llm.safetensors"


def begin_small(lm: SpeechLM) -> None:
    """Weights of deviation .02, and less where a layer writes into the residual."""
    layers = lm.config.qwen.num_hidden_layers
    for name, parameter in lm.named_parameters():
        if parameter.ndim < 2:
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if writes else 0.02)


class Rows:
    """Draws rows of text and tokens on the host. Groups of lengths are fixed, so that a step can be captured."""

    def __init__(
        self, corpus: Corpus, encoded: Encoded, spelling: Spelling, text: Path, options: argparse.Namespace
    ) -> None:
        self.corpus, self.spelling, self.noisy = corpus, spelling, options.noisy
        self.config = options.shape
        self.tokens, self.spoiled = encoded.tokens.cpu().numpy(), encoded.noisy.cpu().numpy()
        self.lines = [(text / name).read_text(encoding="utf-8").splitlines() for name in ("train.txt", "test.txt")]
        self.before = spelling.plain.encode(ASSISTANT + MARKER)
        self.limits = sorted(options.lengths)
        self.budget = options.batch_positions
        speakers = corpus.table[:, 2]
        self.train = corpus.rows(TRAIN)
        self.by_speaker = {int(s): self.train[speakers[self.train] == s] for s in np.unique(speakers[self.train])}
        self.rng = np.random.default_rng(options.seed)
        self.waiting: dict[int, list[tuple[np.ndarray, int, int]]] = {limit: [] for limit in self.limits}
        # every utterance as ids, spelt anew at each pass over the text
        self.spell()

    def spell(self) -> None:
        used = {False: set(), True: set()}
        for split, sentence in self.corpus.table[:, 3:5].tolist():
            used[bool(split)].add(sentence)
        self.spelt = {}
        for test, sentences in used.items():
            ordered = sorted(sentences)
            for lead in ("", " "):  # within a transcript a sentence follows a blank
                lines = [lead + self.lines[int(test)][i] for i in ordered]
                for i, ids in zip(ordered, self.spelling.encode(lines, varied=not test), strict=True):
                    self.spelt[test, i, lead] = ids

    def text(self, row: int, first: bool) -> list[int]:
        _, _, _, split, sentence = self.corpus.table[row].tolist()
        return self.spelt[bool(split), sentence, "" if first else " "]

    def speech(self, row: int, spoiled: bool) -> np.ndarray:
        start, frames = self.corpus.table[row, :2]
        return (self.spoiled if spoiled else self.tokens)[start // 2 : (start + frames) // 2]

    def lay_out(self, row: int, prompts: list[int]) -> tuple[np.ndarray, int, int]:
        """Ids of a row, where its speech begins (after task), and where the sentence's own begins."""
        spoiled = bool(self.rng.random() < self.noisy)
        text = [*self.before]
        for i, prompt in enumerate(prompts):
            text += self.text(prompt, first=i == 0)
        # runtime: the sentence is encoded by itself, so it has no blank before it
        text += self.text(row, first=True)
        heard = [self.speech(prompt, spoiled) for prompt in prompts]
        c = self.config
        ids = np.concatenate([[c.sos], text, [c.task_id], *heard, self.speech(row, False), [c.eos]])
        begin = len(text) + 2
        return ids.astype(np.int64), begin, begin + sum(map(len, heard))

    def draw(self) -> tuple[np.ndarray, int, int]:
        row = int(self.rng.choice(self.train))
        prompts: list[int] = []
        if self.rng.random() < 0.6:
            count = int(self.rng.choice([1, 1, 1, 2, 3, 4]))
            others = self.by_speaker[int(self.corpus.table[row, 2])]
            prompts = [int(p) for p in self.rng.choice(others, min(count, len(others)), replace=False) if p != row]
        return self.lay_out(row, prompts)

    def batch(self) -> tuple[int, np.ndarray, np.ndarray]:
        """A full group: its length, ids [B, L + 1] (eos behind the end) and first speech position [B]."""
        while True:
            row = self.draw()
            fitting = [limit for limit in self.limits if len(row[0]) <= limit + 1]
            if not fitting:
                continue
            group = self.waiting[fitting[0]]
            group.append(row)
            if len(group) == self.size(fitting[0]):
                self.waiting[fitting[0]] = []
                return fitting[0], *self.padded(group, fitting[0])

    def size(self, limit: int) -> int:
        return max(1, self.budget // limit)

    def padded(self, rows: list[tuple[np.ndarray, int, int]], limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows [B, L + 1] with -1 behind their ends, and begins [B]."""
        ids = np.full((len(rows), limit + 1), -1, np.int64)
        for line, (row, _, _) in zip(ids, rows, strict=True):
            line[: len(row)] = row
        return ids, np.array([begin for _, begin, _ in rows])


def predict(lm: SpeechLM, ids: Tensor, begin: Tensor, replaced: float = 0.0) -> tuple[Tensor, Tensor]:
    """Scores [B, L, V] and targets [B, L] of rows ids [B, L + 1]; `replaced` of the speech inputs become random."""
    config = lm.config
    position = torch.arange(ids.shape[1] - 1, device=ids.device)
    given, target = ids[:, :-1].clamp(min=0), ids[:, 1:]
    is_text = (position > 0) & (position < begin[:, None] - 1)
    if replaced:
        random = torch.randint(config.speech_tokens, given.shape, device=ids.device)
        swap = (torch.rand(given.shape, device=ids.device) < replaced) & (position >= begin[:, None])
        given = torch.where(swap, random, given)
    text = lm.backbone.embed_tokens(torch.where(is_text, given, 0))
    speech = lm.speech_embedding(torch.where(is_text, 0, given))
    hidden = lm(torch.where(is_text[..., None], text, speech))
    scored = (position >= begin[:, None] - 1) & (target >= 0)
    return lm.logits(hidden), torch.where(scored, target, UNSCORED)


class Trainer:
    def __init__(self, corpus: Corpus, rows: Rows, options: argparse.Namespace, device: torch.device) -> None:
        self.corpus, self.rows, self.device, self.replaced = corpus, rows, device, options.replaced
        self.lm = SpeechLM(options.shape).to(device)
        begin_small(self.lm)
        self.optimizer = loop.Optimizer({"lm": self.lm}, device, options.decay, (0.9, 0.98), limit=1.0, average=0.999)
        self.meter = loop.Meter(["bits"], device)
        self.best = math.inf
        self.batches: queue.Queue = queue.Queue(maxsize=16)
        self.inputs = {
            limit: (
                torch.zeros(rows.size(limit), limit + 1, dtype=torch.long, device=device),
                torch.full((rows.size(limit),), 2, device=device),
            )
            for limit in rows.limits
        }

    def capture(self, options: argparse.Namespace) -> None:
        capture = loop.Capture([self.optimizer], options)
        self.steps = {limit: capture(lambda at=limit: self.step(*self.inputs[at])) for limit in self.inputs}
        threading.Thread(target=self.feed, daemon=True).start()

    def feed(self) -> None:
        made = 0
        while True:
            self.batches.put(self.rows.batch())
            made += 1
            if made % 400 == 0:
                self.rows.spell()

    def step(self, ids: Tensor, begin: Tensor) -> None:
        with loop.half(self.device):
            scores, target = predict(self.lm, ids, begin, self.replaced)
        loss = F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=UNSCORED)
        self.optimizer.step(loss)
        self.meter.update({"bits": loss / math.log(2)})

    def choose(self, clock: loop.Clock):
        limit, ids, begin = self.batches.get()
        static_ids, static_begin = self.inputs[limit]
        static_ids.copy_(torch.from_numpy(ids))
        static_begin.copy_(torch.from_numpy(begin))
        return self.steps[limit]

    @torch.no_grad()
    def measure(self, most: int = 300) -> dict[str, float]:
        """Held-out sentences of held-out speakers, one utterance as prompt: bits per token of the sentence alone."""
        table, total, right, count = self.corpus.table, 0.0, 0, 0
        rows = [int(row) for row in self.corpus.rows(NEW_SPEAKERS)[:most]]
        laid = []
        for i, row in enumerate(rows):
            near = [other for other in (rows[i - 1], rows[(i + 1) % len(rows)]) if table[other, 2] == table[row, 2]]
            laid.append(self.rows.lay_out(row, near[:1]))
        for i in range(0, len(laid), 32):
            group = laid[i : i + 32]
            ids, begin = (
                torch.from_numpy(x).to(self.device) for x in self.rows.padded(group, max(len(x[0]) for x in group))
            )
            own = torch.tensor([own for *_, own in group], device=self.device)
            with loop.half(self.device):
                scores, target = predict(self.lm, ids, begin)
            position = torch.arange(target.shape[1], device=self.device)
            target = torch.where(position >= own[:, None] - 1, target, UNSCORED)
            total += float(
                F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=UNSCORED, reduction="sum")
            )
            right += int((scores.argmax(-1) == target).sum())
            count += int((target != UNSCORED).sum())
        return {"bits": round(total / max(count, 1) / math.log(2), 4), "accuracy": round(right / max(count, 1), 4)}

    def save(self, folder: Path, bits: float) -> None:
        """The state always; the weights while they get better: this model learns its speech by heart in time."""
        loop.save_state(folder / "lm.state", {"lm": self.lm}, self.optimizer)
        if bits < self.best:
            self.best = bits
            self.optimizer.swap()
            loop.save_weights(folder / FILE, self.lm.state_dict(), int8=True)
            self.optimizer.swap()


def main() -> None:
    parser = loop.arguments(__doc__, seconds=600, rate=1.5e-3)
    parser.add_argument("--text", type=Path, required=True, help="folder with train.txt and test.txt")
    parser.add_argument("--vocabulary", type=Path, required=True, help="folder that training.bpe wrote")
    parser.add_argument("--start", type=Path, help="weights to go on from")
    parser.add_argument("--batch-positions", type=int, default=32_768)
    parser.add_argument("--lengths", type=int, nargs="+", default=[96, 128, 192, 256, 384, 640], help="row lengths")
    parser.add_argument("--decay", type=float, default=0.3)
    parser.add_argument("--noisy", type=float, default=0.25, help="share of rows whose prompt comes from spoiled sound")
    parser.add_argument("--replaced", type=float, default=0.1, help="share of speech inputs that become random ids")
    train(parser.parse_args())


def train(options: argparse.Namespace, shape: LMConfig = LM) -> None:
    device = loop.prepare(options)
    options.shape = shape
    corpus = Corpus(options.corpus, torch.device("cpu"), sound=False)
    encoded = Encoded.load(options.corpus, torch.device("cpu"))
    rows = Rows(corpus, encoded, Spelling(options.vocabulary), options.text, options)
    trainer = Trainer(corpus, rows, options, device)
    if options.start:
        loop.start_from(trainer.lm, options.start, trainer.optimizer, "llm")
    resumed = loop.load_state(options.out / "lm.state", {"lm": trainer.lm}, trainer.optimizer)
    trainer.capture(options)
    log = loop.Log(options.out / "lm.log")
    log.write(tokens=len(encoded.tokens), resumed=resumed, started=str(options.start))

    def report(clock: loop.Clock) -> None:
        trainer.optimizer.swap()
        figures = trainer.measure()
        trainer.optimizer.swap()
        log.write(step=clock.step, seconds=round(clock.seconds, 1), **trainer.meter.read(), held_out=figures)
        trainer.save(options.out, figures["bits"])

    loop.run(options, trainer.choose, [trainer.optimizer], report)


if __name__ == "__main__":
    main()

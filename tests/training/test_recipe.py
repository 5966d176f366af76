"""The whole recipe at a tiny size: every part takes two steps on the CPU, resumes, and the export opens strictly."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.checkpoint import SPEAKER_ENCODER, SPEECH_TOKENIZER, expand
from runtime.frontend.speaker import CAMPPlusConfig
from runtime.frontend.speech_tokens import SpeechTokenizer, SpeechTokenizerConfig
from runtime.stage1.conditioning import Flow
from training import encode, export, loop, shapes, train_flow, train_lm, train_speaker, train_tokenizer, train_vocoder
from training.corpus import Corpus

TINY = Path(__file__).parents[1] / "tiny"
TOKENIZER = SpeechTokenizerConfig(width=64, heads=1, layers=1)
SPEAKER = CAMPPlusConfig(growth_rate=4, bn_size=2, init_channels=16, blocks=((2, 1), (2, 2), (2, 2)))
DIT = replace(shapes.FLOW.dit, dim=64, depth=1, heads=4, head_dim=16)
FLOW = replace(shapes.FLOW, lookahead_channels=16, euler_steps=2, dit=DIT)
HIFT = replace(shapes.HIFT, base_channels=16, f0=replace(shapes.HIFT.f0, channels=8))
QWEN = replace(shapes.LM.qwen, vocab_size=560, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
LM = replace(shapes.LM, qwen=replace(QWEN, num_attention_heads=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the parts leave their weights for the parts that follow."""
    return tmp_path_factory.mktemp("weights")


def options(main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *flags: object) -> argparse.Namespace:
    """What `main` would hand to `train` for these flags."""
    module = sys.modules[main.__module__]
    caught: list[argparse.Namespace] = []
    monkeypatch.setattr(module, "train", caught.append)
    monkeypatch.setattr(sys, "argv", ["train", *map(str, flags)])
    main()
    monkeypatch.undo()
    return caught[0]


def common(corpus: Path, out: Path) -> list[object]:
    return ["--corpus", corpus, "--out", out, "--steps", 2, "--device", "cpu", "--warm-up", 1]


def figures(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_tokenizer_trains_reports_and_resumes(corpus_folder: Path, folder: Path, monkeypatch) -> None:
    flags = [*common(corpus_folder, folder), "--batch-seconds", 4, "--windows", 1, 0.8]
    chosen = options(train_tokenizer.main, monkeypatch, *flags)
    train_tokenizer.train(chosen, TOKENIZER)
    before = load_file(folder / "tokenizer.state")
    train_tokenizer.train(chosen, TOKENIZER)
    log = figures(folder / "tokenizer.log")
    assert [line["resumed"] for line in log if "resumed" in line] == [False, True]
    assert log[-1]["held_out"]["tokens"] > 0
    after = load_file(folder / "tokenizer.state")
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("net."))


def test_speaker_encoder_trains_and_resumes(corpus_folder: Path, folder: Path, dvectors: Path, monkeypatch) -> None:
    flags = [*common(corpus_folder, folder), "--dvectors", dvectors, "--batch-seconds", 8, "--windows", 2.1, 2.3]
    chosen = options(train_speaker.main, monkeypatch, *flags)
    for _ in range(2):
        train_speaker.train(chosen, SPEAKER)
    log = figures(folder / "speaker.log")
    assert log[-2]["resumed"] and 0 <= log[-1]["held_out"]["equal_error"] <= 1


def test_vocoder_trains_with_and_without_critics(corpus_folder: Path, folder: Path, monkeypatch) -> None:
    flags = ["--rows", 2, "--frames", 8, "--mel-share", 0.5, "--period-width", 1, "--spectrum-width", 2]
    train_vocoder.train(options(train_vocoder.main, monkeypatch, *common(corpus_folder, folder), *flags), HIFT)
    last = figures(folder / "vocoder.log")[-1]
    assert last["critics"] > 0 and last["held_out"]["mel_l1"] > 0


def test_corpus_is_encoded_with_frozen_nets(corpus_folder: Path, folder: Path) -> None:
    given = argparse.Namespace(
        corpus=corpus_folder,
        tokenizer=folder / "tokenizer.safetensors",
        speaker=folder / "speaker.safetensors",
        device="cpu",
    )
    encode.write(given, TOKENIZER, SPEAKER)
    encoded = encode.Encoded.load(corpus_folder, torch.device("cpu"))
    assert encoded.tokens.min() >= 0 and encoded.tokens.max() < 6561
    assert encoded.speakers.shape[1] == 192 and encoded.speakers.abs().sum(1).gt(0).all()


def test_flow_trains_both_masks(corpus_folder: Path, folder: Path, monkeypatch) -> None:
    flags = ["--batch-seconds", 4, "--windows", 1, 1.5]
    train_flow.train(options(train_flow.main, monkeypatch, *common(corpus_folder, folder), *flags), FLOW)
    held_out = figures(folder / "flow.log")[-1]["held_out"]
    assert held_out["mel_l1_whole"] > 0 and held_out["mel_l1_chunked"] > 0


def test_flow_is_pulled_towards_mels_that_are_read_right(corpus_folder: Path, folder: Path, monkeypatch) -> None:
    flags = [*common(corpus_folder, folder), "--batch-seconds", 4, "--windows", 1.5, "--phones", 1]
    chosen = options(train_flow.main, monkeypatch, *flags)
    device = loop.prepare(chosen)
    corpus = Corpus(chosen.corpus, device)
    trainer = train_flow.Trainer(corpus, encode.Encoded.load(chosen.corpus, device), chosen, device, FLOW)
    trainer.capture(chosen)
    torch.manual_seed(0)
    trainer.mel = (torch.randn(256, 80)[corpus.phone.long()] - 5.5).half()  # each phoneme has a sound of its own
    _, _, mel, phone = trainer.batch(trainer.windows[0])
    everywhere = torch.ones(phone.shape)
    before = trainer.read(mel, mel, phone, everywhere)
    trainer.optimizer.set_rate(0)
    trainer.reading.set_rate(1e-3)
    for _ in range(30):  # it learns from the flow's own steps
        trainer.steps[0]()
    after = trainer.read(mel, mel, phone, everywhere)
    assert after["reader"] < 0.8 * before["reader"]
    made = mel.roll(1, 1).requires_grad_()
    unclear = trainer.read(mel, made, phone, everywhere)["phones"]
    (slope,) = torch.autograd.grad(unclear, made)
    clearer = trainer.read(mel, made - 5 * slope / slope.norm(), phone, everywhere)["phones"]
    assert clearer < unclear and trainer.read(mel, mel, phone, everywhere)["phones"] < unclear
    assert trainer.read(mel, made, phone, 0 * everywhere)["phones"] == 0
    asked: list[float] = []
    monkeypatch.setattr(trainer.optimizer, "step", lambda loss: asked.append(float(loss)))
    trainer.reading.set_rate(0)
    for trainer.clarity in (0.0, 1.0, 2.0):  # the flow pays for what is unclear, by its weight
        torch.manual_seed(1)
        trainer.step(trainer.windows[0], chunked=False)
    plain, once, twice = asked
    assert once > plain and twice - plain == pytest.approx(2 * (once - plain), rel=1e-3)


def test_language_model_trains_on_laid_out_rows(
    corpus_folder: Path, folder: Path, text_folder: Path, vocabulary: Path, monkeypatch
) -> None:
    flags = ["--text", text_folder, "--vocabulary", vocabulary, "--batch-positions", 512]
    train_lm.train(options(train_lm.main, monkeypatch, *common(corpus_folder, folder), *flags), LM)
    assert figures(folder / "lm.log")[-1]["held_out"]["bits"] > 0


def test_exported_stages_open_strictly_and_can_be_gone_on_from(folder: Path, vocabulary: Path, tmp_path: Path) -> None:
    for name in (SPEECH_TOKENIZER, SPEAKER_ENCODER):
        shutil.copy(TINY / name, tmp_path / name)
    export.write_stages(folder, vocabulary, tmp_path, LM, FLOW, HIFT)
    checkpoint = export.check(tmp_path)
    assert checkpoint.config.silent_tokens == frozenset() and checkpoint.makes_speech
    flow = Flow(FLOW)
    optimizer = loop.Optimizer({"flow": flow}, torch.device("cpu"), 0.0, (0.9, 0.99), limit=1.0)
    loop.start_from(flow, tmp_path / "flow.safetensors", optimizer, "flow")
    trained = load_file(folder / "flow.safetensors")["estimator.proj_out.bias"].float()
    torch.testing.assert_close(flow.estimator.proj_out.bias.detach(), trained)


def test_halved_onnx_file_says_the_same(tmp_path: Path) -> None:
    path = Path(shutil.copy(TINY / SPEECH_TOKENIZER, tmp_path))
    size = path.stat().st_size
    samples = torch.sin(torch.arange(32_000) * 0.05) * 0.1
    before = SpeechTokenizer(path).encode(samples)
    export.halve(path)
    after = SpeechTokenizer(path).encode(samples)
    assert path.stat().st_size < 0.8 * size
    assert (before == after).float().mean() > 0.8  # a digit at its rounding edge may turn


def test_storage_form_keeps_values_within_half_a_step() -> None:
    torch.manual_seed(0)
    weights = {"matrix": torch.randn(64, 128), "bias": torch.randn(64)}
    stored = loop.compact(weights, int8=True)
    assert stored["matrix"].dtype == torch.int8 and stored["bias"].dtype == torch.half
    step = weights["matrix"].abs().amax(1, keepdim=True) / 127
    assert ((expand(stored)["matrix"] - weights["matrix"]).abs() <= step * 0.501).all()

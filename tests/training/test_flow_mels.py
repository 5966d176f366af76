"""Mels that the flow makes of the corpus's own tokens: on its grid, aligned with its sound, heard by the vocoder."""

import argparse
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.frontend.mel import PromptMel
from runtime.stage1.conditioning import Flow
from runtime.stage1.solver import schedule, solve
from tests.training.test_recipe import FLOW, HIFT, common, figures, options
from training import flow_mels, loop, train_vocoder
from training.corpus import TRAIN, Corpus
from training.encode import FILE as ENCODED
from training.encode import Encoded
from training.shapes import MEL

CPU = torch.device("cpu")
VOCODER = ["--rows", 2, "--frames", 8, "--mel-share", 0, "--period-width", 1, "--spectrum-width", 2]


@pytest.fixture(scope="module")
def flow() -> Flow:
    torch.manual_seed(0)
    return Flow(FLOW).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory, flow: Flow) -> Path:
    """A corpus with seeded tokens and speaker vectors, and what a seeded flow makes of them."""
    folder = tmp_path_factory.mktemp("solved")
    for shard in corpus_folder.glob("corpus-*.safetensors"):
        shutil.copy(shard, folder)
    corpus, generator = Corpus(folder, CPU), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, FLOW.speech_tokens, (len(corpus.phone) // 2,), generator=generator).short()
    speakers = torch.randn(len(corpus), FLOW.speaker_dim, generator=generator).half()
    save_file({"tokens": tokens, "noisy": tokens.clone(), "speakers": speakers}, folder / ENCODED)
    loop.save_weights(folder / "flow.safetensors", flow.state_dict(), int8=True)
    flow_mels.write(
        argparse.Namespace(
            corpus=folder, flow=folder / "flow.safetensors", noise_time=0.2, batch_seconds=16, device="cpu"
        ),
        FLOW,
    )
    return folder


def make(folder: Path, flow: Flow, noise_time: float, turn: int = 0) -> tuple[Corpus, Tensor, Tensor]:
    """The corpus, its true mel and the flow's; with `turn` every token is another one."""
    corpus, encoded = Corpus(folder, CPU), Encoded.load(folder, CPU)
    encoded.tokens.add_(turn).remainder_(FLOW.speech_tokens)
    true = corpus.mel(PromptMel(MEL))
    start = flow_mels.first_time(noise_time, FLOW.euler_steps)
    return corpus, true, flow_mels.flow_mels(corpus, encoded, flow, true, start, 16)


def test_training_rows_are_solved_and_held_out_rows_stay_true(folder: Path) -> None:
    corpus = Corpus(folder, CPU)
    made, true = flow_mels.load(corpus, folder), corpus.mel(PromptMel(MEL))
    assert made.shape == true.shape and made.dtype == torch.half
    assert len(list(corpus.batches(corpus.rows(TRAIN), 16, flow_mels.prompts(corpus)))) > 1  # whole and chunked
    for start, frames, _, split, _ in corpus.table:
        same = (made == true)[start : start + frames].float().mean()
        assert same < 0.01 if split == TRAIN else same == 1
    with safe_open(folder / flow_mels.FILE, "pt") as file:
        assert file.metadata()["flow"] == "flow.safetensors" and float(file.metadata()["time"]) == pytest.approx(0.2929)


def test_prompt_is_the_speakers_stream_right_before(folder: Path) -> None:
    corpus = Corpus(folder, CPU)
    lead = flow_mels.prompts(corpus)
    # two utterances of each speaker in a shard: nothing before the first, all of it before the second
    assert [int(count) for count in lead[:6]] == [0, 96, 0, 104, 0, 112]
    assert not lead[corpus.table[:, 3] != TRAIN].any() and not (lead % 2).any()
    index, real = corpus.grid([1, 2], lead)
    assert index[:, 0].tolist() == [0, 192] and real.sum(1).tolist() == [192, 104]


def test_mel_hangs_on_the_tokens_and_lies_nearer_the_later_it_begins(folder: Path, flow: Flow) -> None:
    _, true, early = make(folder, flow, 0)
    corpus, _, late = make(folder, flow, 0.29)
    _, _, other = make(folder, flow, 0.29, turn=1)
    training = (corpus.table[:, 3] == TRAIN).repeat(corpus.table[:, 1])
    assert not torch.equal(late, other)
    assert (late - true)[training].abs().mean() < 0.9 * (early - true)[training].abs().mean()
    moved = (late[2:] - true[:-2])[training[2:]].abs().mean()
    assert (late - true)[training].abs().mean() < moved


def test_row_solved_beside_a_longer_one_is_the_row_solved_alone(flow: Flow) -> None:
    torch.manual_seed(1)
    noise, mel = torch.randn(2, 2, 80, 120)
    tokens, voice = torch.randint(0, FLOW.speech_tokens, (2, 60)), torch.randn(2, FLOW.speaker_dim)
    given, frames = torch.tensor([30, 20]), torch.tensor([120, 70])
    start = flow_mels.first_time(0, FLOW.euler_steps)
    for chunked in (False, True):
        real = torch.arange(120) < frames[:, None]
        both = flow_mels.solve_rest(flow, start, noise, mel, tokens, voice, given, real, chunked)
        for i in range(2):
            n = int(frames[i])
            cond = mel[i : i + 1, :, :n] * (torch.arange(n) < given[i])
            alone = solve(
                flow.estimator,
                noise[i : i + 1, :, :n],
                flow.mu(tokens[i : i + 1, : n // 2], is_last=True),
                flow.speaker(voice[i : i + 1]),
                cond,
                steps=FLOW.euler_steps,
                rate=FLOW.guidance_rate,
                chunked=chunked,
            )
            torch.testing.assert_close(both[i, :, :n], alone[0], atol=1e-4, rtol=1e-4)


def test_beginning_behind_the_last_knot_is_refused() -> None:
    start = flow_mels.first_time(0.293, 6)
    assert [round(time, 3) for time, _ in schedule(6) if time >= start] == [0.293, 0.5, 0.741]
    with pytest.raises(ValueError, match=r"last of 6 begins at 0\.741"):
        flow_mels.first_time(0.8, 6)


def test_vocoder_trains_on_mels_of_the_flow(folder: Path, tmp_path: Path, monkeypatch) -> None:
    chosen = options(train_vocoder.main, monkeypatch, *common(folder, tmp_path), *VOCODER, "--flow-mels", 0.5)
    train_vocoder.train(chosen, HIFT)
    assert figures(tmp_path / "vocoder.log")[-1]["critics"] > 0


def test_a_share_of_the_vocoders_rows_hears_the_flow(folder: Path, tmp_path: Path, monkeypatch) -> None:
    flags = [*common(folder, tmp_path), *VOCODER, "--rows", 64, "--flow-mels", 0.25]
    trainer = train_vocoder.Trainer(
        Corpus(folder, CPU), options(train_vocoder.main, monkeypatch, *flags), CPU, shape=HIFT
    )
    assert trainer.flow_mel is not None
    trainer.flow_mel.fill_(7)  # no true mel has it
    heard: list[Tensor] = []

    def listen(mel: Tensor) -> tuple[Tensor, Tensor]:
        heard.append(mel)
        raise InterruptedError

    monkeypatch.setattr(trainer, "generate", listen)
    with pytest.raises(InterruptedError):
        trainer.step(adversarial=False)
    rows = (heard[0][..., : trainer.frames] == 7).float().mean((1, 2))
    assert set(rows.tolist()) == {0.0, 1.0} and 6 <= rows.sum() <= 27


def test_vocoder_asks_for_the_flows_mels_only_where_it_hears_them(
    folder: Path, corpus_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    def trainer(share: float) -> train_vocoder.Trainer:
        flags = [*common(corpus_folder, tmp_path), *VOCODER, "--flow-mels", share]
        return train_vocoder.Trainer(
            Corpus(corpus_folder, CPU), options(train_vocoder.main, monkeypatch, *flags), CPU, HIFT
        )

    assert trainer(0).flow_mel is None
    with pytest.raises(FileNotFoundError, match=r"run training\.flow_mels first"):
        trainer(0.5)
    shutil.copy(folder / flow_mels.FILE, tmp_path)
    shorter = Corpus(corpus_folder, CPU)
    shorter.phone = shorter.phone[:-2]
    with pytest.raises(ValueError, match="again"):
        flow_mels.load(shorter, tmp_path)

"""Speech on its grid: windows stay inside a speaker's stream, features and labels fit their frames."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from runtime.frontend.mel import PromptMel
from tests.training.conftest import make_shard
from training.corpus import FRAME_16K, NEW_SPEAKERS, TRAIN, Corpus, Windows, sound
from training.data import share
from training.heads import Prosody
from training.labels import SILENCE, Phones, silent, voiced
from training.prompts import record
from training.shapes import MEL
from training.speakers import Line, held_out_speakers, make_speakers

CPU = torch.device("cpu")


def test_windows_start_on_a_token_inside_one_speakers_stream(corpus_folder: Path) -> None:
    corpus = Corpus(corpus_folder, CPU)
    windows = Windows(corpus, 100)
    starts, speakers = windows.draw(500)
    for start, speaker in zip(starts.tolist(), speakers.tolist(), strict=True):
        stream = next(s for s in corpus.streams if s[0] <= start < s[1])
        assert stream[2] == speaker and start % 2 == 0 and start + 100 <= stream[1]


def test_shards_join_without_mixing_their_streams(corpus_folder: Path) -> None:
    corpus = Corpus(corpus_folder, CPU)
    assert len(corpus.streams) == 6  # three training speakers in each of two shards
    assert {int(corpus.table[row, 2]) for row in corpus.rows(NEW_SPEAKERS)} == {3, 4}
    assert not {3, 4} & {int(corpus.table[row, 2]) for row in corpus.rows(TRAIN)}


def test_a_corpus_that_nothing_can_be_measured_on_is_refused(tmp_path: Path) -> None:
    make_shard(tmp_path / "corpus-1.safetensors", 1, tests=False)
    with pytest.raises(ValueError, match="first shard"):
        Corpus(tmp_path, torch.device("cpu"))


def test_prompts_are_recorded_by_the_speakers_in_turn_with_their_words(tmp_path: Path) -> None:
    class Teacher:
        speakers = make_speakers(["af_one", "am_two"], 4)

        def speak(self, lines: list[Line], ids: list[np.ndarray], seed: int) -> SimpleNamespace:
            assert ids == [(lines[0].sentence, False)]
            return SimpleNamespace(samples=torch.full((1, 100), lines[0].speaker / 10), lengths=torch.tensor([90]))

    said = SimpleNamespace(phonemes=lambda sentence, british: (sentence, british))
    record(Teacher(), said, ["none", "one", "two", "three"], [3, 1, 2], [0, 2], tmp_path)  # type: ignore[arg-type]
    names = [("000-003", "three", 0.0), ("001-001", "one", 0.2), ("002-002", "two", 0.0)]
    for name, words, level in names:
        assert (tmp_path / f"{name}.txt").read_text() == words
        samples, rate = soundfile.read(tmp_path / f"{name}.wav")
        assert rate == 24_000 and len(samples) == 90 and abs(samples - level).max() < 1e-4


def test_features_lie_where_their_utterance_lies(corpus_folder: Path) -> None:
    corpus = Corpus(corpus_folder, CPU)
    extract = PromptMel(MEL)
    start, frames = corpus.table[3, :2]
    wave = sound(corpus.pcm, torch.arange(start, start + frames)[None])
    mel = corpus.mel(extract)[start : start + frames].float()
    # in a batch the last two frames meet silence instead of their reflection
    torch.testing.assert_close(mel[:-2], extract(wave)[0, :-2], atol=0.02, rtol=0.01)
    assert corpus.at_16k().shape == (len(corpus.phone), FRAME_16K)


def test_prosody_is_normalised_per_speaker(corpus_folder: Path) -> None:
    corpus = Corpus(corpus_folder, CPU)
    prosody = Prosody(corpus, corpus.mel(PromptMel(MEL)))
    assert prosody.f0.abs().max() < 0.05  # every speaker of this corpus holds one pitch
    energy = prosody.energy.float()
    assert abs(float(energy.mean())) < 0.05 and abs(float(energy.std()) - 1) < 0.1


def test_every_shard_has_every_speaker_and_one_has_the_tests() -> None:
    lines = [Line(i, i % 7, 1.0) for i in range(100)] + [Line(0, 9, 1.0, NEW_SPEAKERS)]
    parts = [share(lines, k, 3) for k in range(3)]
    assert sorted(line.sentence for part in parts for line in part if not line.split) == list(range(100))
    assert all({line.speaker for line in part if not line.split} == set(range(7)) for part in parts)
    assert [sum(line.split > 0 for line in part) for part in parts] == [1, 0, 0]


def test_speakers_follow_from_the_seed_and_tests_are_never_pure_voices() -> None:
    names = [f"{accent}{sex}_{i}" for accent in "abj" for sex in "fm" for i in range(8)]
    one, other = (make_speakers(names, 60) for _ in range(2))
    assert all(np.array_equal(a.timbre, b.timbre) and a.warp == b.warp for a, b in zip(one, other, strict=True))
    assert all(abs(speaker.timbre.sum() - 1) < 1e-4 for speaker in one)
    assert min(held_out_speakers(60, 10)) >= 28


def test_stress_and_length_marks_belong_to_their_sound() -> None:
    phones = Phones(np.array([0, 16, 50, 60, 156, 158]))
    classes = phones.classes(np.array([156, 50, 158, 16, 60, 4]))
    fifty, sixty = 1, 2
    assert classes.tolist() == [SILENCE, fifty, fifty, fifty, -2, sixty, SILENCE, SILENCE]


def test_voicing_and_silence_are_heard_not_believed() -> None:
    time = torch.arange(32_000) / 16_000
    tone = 0.3 * torch.sin(2 * torch.pi * 125 * time)
    tone[16_000:] = 0.0
    tone[24_000:] = 0.1 * torch.randn(8000, generator=torch.Generator().manual_seed(0))
    heard = voiced(tone[None], torch.full((1, 100), 125.0))[0]
    assert heard[5:45].all() and not heard[55:].any()
    quiet = silent(tone[None], 100)[0]
    assert quiet[52:74].all() and not quiet[:49].any() and not quiet[76:].any()

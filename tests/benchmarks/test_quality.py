"""The judge of speech: pairing, lengths, what survives an interruption, and one run from end to end."""

import argparse
import importlib.util
import json
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import quality
from benchmarks.ledger import forget, keep, kept, partial
from benchmarks.quality import Verdict, collect, outliers, pair, read_voices, summary

ROOT = Path(__file__).parents[2]
VERDICT = Verdict(0, "ada", "a" * 40, "", 1, 10, 0.8, 0.5, 3.0, 2.0, 1.0, 0.5)


def test_sentences_go_round_the_voices_and_each_is_held_against_the_next():
    assert [pair(number, 3) for number in range(4)] == [(0, 1), (1, 2), (2, 0), (0, 1)]


@pytest.mark.parametrize(("seconds", "odd"), [(2.0, 0), (3.1, 0), (3.3, 0.1), (1.3, 0), (1.2, 0.1)])
def test_a_length_is_odd_beyond_1_6_times_the_usual_pace(seconds, odd):
    assert outliers([VERDICT] * 9 + [replace(VERDICT, seconds=seconds)]) == pytest.approx(odd)


def test_length_is_counted_by_letters():
    """A long sentence is no outlier for being long."""
    assert outliers([VERDICT] * 9 + [replace(VERDICT, text="a" * 400, seconds=20.0)]) == 0


def test_word_error_rate_weighs_words_and_not_sentences():
    figures = summary([VERDICT, replace(VERDICT, errors=0, words=30)], timed=True)
    assert figures["word_error_rate"] == 0.025
    assert (figures["sentences"], figures["likeness"], figures["real_time_factor"]) == (2, 0.8, 0.5)


def test_times_of_processes_that_share_the_cores_are_left_out():
    assert not {"real_time_factor", "first_audio_seconds"} & summary([VERDICT], timed=False).keys()


def test_a_voice_has_the_words_that_lie_beside_it(tmp_path: Path):
    recording = (ROOT / "assets" / "voices" / "wren.wav").read_bytes()
    for name in ("b.wav", "a.wav"):
        (tmp_path / name).write_bytes(recording)
    (tmp_path / "b.txt").write_text(" Words. \n")
    assert [(voice.name, voice.transcript) for voice in read_voices(tmp_path)] == [("a", None), ("b", "Words.")]
    with pytest.raises(SystemExit, match="no recordings"):
        read_voices(ROOT / "benchmarks")


# What survives an interruption


def test_rows_of_all_processes_are_found_again_but_for_the_line_that_was_cut(tmp_path: Path):
    out, run = tmp_path / "out.json", {"model": "m"}
    keep(partial(out, 0), run, {"a": 1}, {"a": 2})
    keep(partial(out, 1), run, {"a": 3})
    with partial(out, 1).open("a") as file:
        file.write('{"a": 4')
    for _ in range(2):  # what was put together is found as well
        assert kept(out, run) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert len(list(tmp_path.iterdir())) == 1
    forget(out)
    assert kept(out, run) == []


def test_rows_of_another_run_are_refused_and_left_alone(tmp_path: Path):
    out = tmp_path / "out.json"
    keep(partial(out, 0), {"model": "old"}, {"a": 1})
    with pytest.raises(SystemExit, match="another checkpoint"):
        kept(out, {"model": "new"})
    assert kept(out, {"model": "old"}) == [{"a": 1}]


def options(folder: Path, **changes) -> argparse.Namespace:
    values = {"model": "demo", "voices": ROOT / "assets" / "voices", "out": folder / "out.json", "jobs": 1}
    return argparse.Namespace(
        **values | {"no_transcript": False, "sources": None, "whole": False, "device": "cpu"} | changes
    )


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch):
    sentences, spoken = [f"Sentence {number}." for number in range(5)], []

    def share(todo, options, file, last=None):
        verdicts = []
        for number, text in todo.items():
            if number == last:
                raise KeyboardInterrupt
            spoken.append(number)
            verdicts.append(replace(VERDICT, number=number, text=text))
            keep(file, quality.run_of(options), asdict(verdicts[-1]))
        return verdicts

    monkeypatch.setattr(quality, "judge_share", lambda *args: share(*args, last=3))
    with pytest.raises(KeyboardInterrupt):
        collect(sentences, options(tmp_path))
    monkeypatch.setattr(quality, "judge_share", share)
    assert [verdict.text for verdict in collect(sentences, options(tmp_path))] == sentences
    assert spoken == [0, 1, 2, 3, 4]
    sentences[1] = "Another one."
    assert [verdict.text for verdict in collect(sentences, options(tmp_path))] == sentences
    assert spoken == [0, 1, 2, 3, 4, 1]
    with pytest.raises(SystemExit, match="other settings"):
        collect(sentences, options(tmp_path, whole=True))


# The whole


class Spectrum:
    """Stands in for Resemblyzer where it is not installed: the louder frames' mean log spectrum without its level."""

    def __init__(self, device: str, verbose: bool) -> None: ...

    def embed_utterance(self, samples: np.ndarray) -> np.ndarray:
        frames = samples[: len(samples) // 400 * 400].reshape(-1, 400)
        spectra = np.abs(np.fft.rfft(frames * np.hanning(400)))
        energy = spectra.sum(1)
        vector = np.log(spectra[energy > np.median(energy)] + 1e-6).mean(0)
        vector -= vector.mean()
        return vector / np.linalg.norm(vector)


class Loudness(torch.nn.Module):
    """Stands in for DistillMOS."""

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return samples.square().mean()


@pytest.mark.timeout(300)
def test_sentences_are_spoken_judged_and_written_down(tmp_path: Path, monkeypatch, capsys):
    for name, member in (
        ("resemblyzer", {"VoiceEncoder": Spectrum}),
        ("distillmos", {"ConvTransformerSQAModel": Loudness}),
    ):
        if importlib.util.find_spec(name) is None:
            module = types.ModuleType(name)
            vars(module).update(member)
            monkeypatch.setitem(sys.modules, name, module)
    sentences = ("Every dog has its day.", "What are we going to do?")
    (tmp_path / "sentences.txt").write_text("\n".join((*sentences, "This one is left out.")))
    for name in ("heron.wav", "heron.txt", "wren.wav", "wren.txt"):
        (tmp_path / "voices").mkdir(exist_ok=True)
        (tmp_path / "voices" / name).write_bytes((ROOT / "assets" / "voices" / name).read_bytes())
    out = tmp_path / "out.json"
    told = ["--sentences", str(tmp_path / "sentences.txt"), "--voices", str(tmp_path / "voices"), "--count", "2"]
    quality.main([*told, "--threads", "1", "--out", str(out)])
    written = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == written["figures"]
    assert [verdict["text"] for verdict in written["verdicts"]] == list(sentences)
    assert [verdict["voice"] for verdict in written["verdicts"]] == ["heron", "wren"]
    assert written["figures"]["word_error_rate"] <= 0.2
    assert all(1 < verdict["seconds"] < 4 for verdict in written["verdicts"])
    assert all(verdict["likeness"] > verdict["floor"] for verdict in written["verdicts"])
    assert not list(tmp_path.glob("*.partial"))
    quality.main(["--sources", *told[3:4], *told[2:4], "--count", "1", "--threads", "1"])  # says its own words again
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["sentences"], said["word_error_rate"] <= 0.2) == (1, True)

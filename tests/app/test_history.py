"""The history: what is kept while it is made, found again, gone on with and spoken again."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pysubs2
import pytest
import soundfile

from app import history as history_module
from app.audio_format import to_pcm16
from app.history import History, again
from app.subtitles import subtitles
from runtime import AudioClip, EndReason, GenerationError, RequestError, SamplingParams, SpeechRequest
from tests.app.fake_engine import RATE, FakeEngine
from tests.conftest import TESTS

TEXT = "[pause 0.5s] It costs 5 euros. [pause 1s] 你好。 [pause 0.25s] The end. [pause 0.75s]"


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "history")


def make(engine, history: History, request: SpeechRequest, stop_after: int | None = None):
    """Speaks and keeps; gives the entry and all samples. `stop_after` sentences the tab is closed."""
    made = []
    with engine.stream(request) as stream, history.begin(request, stream.stats, voice="Ada") as keeping:
        for chunk in stream:
            if chunk.sentence == stop_after:
                break
            keeping.take(chunk)
            made.append(chunk.samples)
    return history.find(keeping.entry.id), np.concatenate(made) if made else np.empty(0, np.float32)


def pcm(path: Path) -> np.ndarray:
    samples, rate = soundfile.read(path, dtype="int16")
    assert rate == RATE and soundfile.info(path).subtype == "PCM_16"
    return samples


def wish(voice: AudioClip, **changes) -> SpeechRequest:
    return SpeechRequest(**{"reference": voice, "text": TEXT, "seed": 7} | changes)


# What is kept


def test_the_whole_holds_every_sample_and_the_sentences_their_own(engine, voice, history):
    entry, made = make(engine, history, wish(voice))
    assert pcm(history.whole(entry.id)).tobytes() == to_pcm16(made)
    assert [(s.text, s.index) for s in entry.sentences] == [
        ("It costs five euros.", 0),
        ("你好。", 1),
        ("The end.", 2),
    ]
    for sentence in entry.sentences:
        assert pcm(history.sentence(entry.id, sentence.index)).tobytes() == to_pcm16(
            made[sentence.start : sentence.start + sentence.samples]
        )
    assert entry.samples == len(made) and entry.ended in (EndReason.STOP, EndReason.LENGTH)
    assert entry.voice == "Ada" and entry.planned == 3 and not entry.resumable and not history.is_live(entry.id)


def test_all_settings_come_back_after_a_restart(engine, voice, history):
    request = wish(
        voice,
        transcript="her words",
        words={"euros": "Euronen"},
        speed=1.25,
        seed=None,
        trim=True,
        sampling=SamplingParams(top_k=5),
    )
    entry, made = make(engine, history, request)
    again_opened = History(history.folder)
    kept = again_opened.request(entry.id)
    for field in ("text", "transcript", "instruction", "words", "speed", "trim", "normalize", "streaming", "sampling"):
        assert getattr(kept, field) == getattr(request, field), field
    with engine.stream(kept) as stream:
        assert np.array_equal(np.concatenate([chunk.samples for chunk in stream]), made)  # seed and reference too
    assert again_opened.entries() == [entry]


def test_conversion_keeps_its_source(engine, voice, history):
    entry, made = make(engine, history, wish(voice, text="", source=voice))
    assert np.array_equal(history.request(entry.id).source.samples, voice.samples)
    assert pcm(history.whole(entry.id)).tobytes() == to_pcm16(made)
    assert "-->" not in history.subtitles(entry.id, "srt")


def test_an_engine_that_tells_no_sentences_is_kept_as_one(voice, history):
    entry, made = make(FakeEngine(seconds=1.0), history, wish(voice))
    assert pcm(history.whole(entry.id)).tobytes() == to_pcm16(made) and len(entry.sentences) == 1


def test_entries_come_newest_first_and_are_removed_with_their_files(engine, voice, history):
    first, _ = make(engine, history, wish(voice, text="One."))
    second, _ = make(engine, history, wish(voice, text="Two."))
    assert [entry.id for entry in history.entries()] == [second.id, first.id]
    history.remove(second.id)
    assert [path.name for path in history.folder.iterdir()] == [first.id]
    for call in (history.find, history.remove, history.whole, history.request):
        with pytest.raises(RequestError, match="not in the history"):
            call(second.id)
    with pytest.raises(RequestError, match="no finished sentence 9"):
        history.sentence(first.id, 8)


@pytest.mark.parametrize("id", ["../history", "..", ".", "", "/etc"])
def test_an_id_is_never_a_path(engine, voice, history, id):
    make(engine, history, wish(voice, text="One."))
    with pytest.raises(RequestError):
        history.remove(id)
    assert len(history.entries()) == 1


def test_count_and_bytes_are_bounded_and_the_oldest_go_first(engine, voice, tmp_path):
    few = History(tmp_path / "few", most_entries=2)
    ids = [make(engine, few, wish(voice, text="One."))[0].id for _ in range(3)]
    assert [entry.id for entry in few.entries()] == [ids[2], ids[1]]
    size = sum(file.stat().st_size for file in (few.folder / ids[2]).iterdir())
    small = History(tmp_path / "small", most_bytes=size * 2 + size // 2)
    ids = [make(engine, small, wish(voice, text="One."))[0].id for _ in range(4)]
    assert [entry.id for entry in small.entries()] == [ids[3], ids[2]]


def test_what_is_being_made_is_never_pruned_or_removed(engine, voice, tmp_path):
    history = History(tmp_path / "history", most_entries=1)
    request = wish(voice, text="One.")
    with engine.stream(request) as stream, history.begin(request, stream.stats) as keeping:
        make(engine, history, request)
        assert history.is_live(keeping.entry.id) and history.find(keeping.entry.id)
        with pytest.raises(RequestError, match="being made"):
            history.remove(keeping.entry.id)


def test_a_broken_folder_is_left_out(engine, voice, history):
    entry, _ = make(engine, history, wish(voice, text="One."))
    record = json.loads((history.folder / entry.id / "entry.json").read_text())
    bad = {
        "empty": b"",
        "of another": json.dumps(record).encode(),
        "elsewhere": json.dumps(record | {"id": "elsewhere", "recordings": {"reference": "../../x.wav"}}).encode(),
    }
    for name, content in bad.items():
        (history.folder / name).mkdir()
        (history.folder / name / "entry.json").write_bytes(content)
    assert [each.id for each in history.entries()] == [entry.id]


# What breaks off


def test_finished_sentences_survive_and_the_job_goes_on_where_it_stopped(engine, voice, history):
    complete, _ = make(engine, history, wish(voice))
    broken, made = make(engine, history, wish(voice), stop_after=2)
    assert broken.ended is EndReason.CANCELLED and len(broken.sentences) == 2 and broken.resumable
    assert pcm(history.whole(broken.id)).tobytes() == to_pcm16(made)
    keeping = History(history.folder).resume(broken.id)  # after a restart
    with keeping, engine.stream(keeping.request) as stream:
        keeping.hear(stream.stats)
        for chunk in stream:
            keeping.take(chunk)
    resumed = history.find(broken.id)
    assert resumed.ended is complete.ended and not resumed.resumable
    assert [s.text for s in resumed.sentences] == [s.text for s in complete.sentences]
    assert pcm(history.whole(resumed.id)).tobytes() == pcm(history.whole(complete.id)).tobytes()
    with pytest.raises(RequestError, match="nothing to go on with"):
        history.resume(resumed.id)


def test_a_failed_job_keeps_what_was_finished(voice, history):
    engine = FakeEngine(seconds=2.0, fails_after=2)
    with pytest.raises(GenerationError):
        make(engine, history, wish(voice))
    (entry,) = history.entries()
    assert entry.ended is EndReason.ERROR and entry.sentences == []
    with pytest.raises(RequestError, match="no sentence"):
        history.whole(entry.id)


def test_a_full_disk_ends_the_keeping_and_not_the_speech(voice, history, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    request = wish(voice)
    with FakeEngine(seconds=1.0).stream(request) as stream, history.begin(request, stream.stats) as keeping:
        monkeypatch.setattr(history_module, "write_entry", full)
        chunks = 0
        for chunk in stream:
            keeping.take(chunk)
            chunks += 1
    assert chunks == 3 and "No space left" in keeping.problem and not history.is_live(keeping.entry.id)
    with pytest.raises(RequestError, match="No space left"):
        history.begin(request, stream.stats)


DYING = """
import itertools, os, sys
from pathlib import Path
import numpy as np
from app.history import History
from runtime import AudioChunk, AudioClip, EndReason, SamplingParams, SpeechRequest, SpokenSentence, StreamStats
tone = lambda n: np.full(24000, 0.1 * (n + 1), np.float32)
request = SpeechRequest(AudioClip(tone(0), 24000), "a")
for n in itertools.count(1):
    history = History(Path(sys.argv[1]) / f"{n:04}")
    if (child := os.fork()) == 0:
        spoken = [SpokenSentence(str(i), 1.0, 24000, start=24000 * i, samples=24000) for i in range(2)]
        stats = StreamStats(request.mode, 1, SamplingParams(), 2, 24000, spoken=spoken)
        touches = itertools.count(1)
        def die(event, args):
            if event.split(".")[0] in ("open", "os", "shutil", "glob") and next(touches) == n:
                os._exit(9)
        sys.addaudithook(die)
        try:
            with history.begin(request, stats) as keeping:
                for i in range(2):
                    keeping.take(AudioChunk(tone(i), 24000, i, i, i == 1))
                stats.ended = EndReason.STOP
            os._exit(0)
        finally:
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended != 9:
        sys.exit(ended)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_death_at_any_touch_of_the_disk_keeps_every_sentence_that_was_named(history: History) -> None:
    subprocess.run([sys.executable, "-c", DYING, str(history.folder)], check=True, cwd=TESTS.parent, timeout=100)
    finished, ended = [], None
    for folder in sorted(history.folder.iterdir()):
        left = History(folder)
        entries = left.entries()
        finished.append(len(entries[0].sentences) if entries else -1)
        for n in range(finished[-1]):
            kept = np.frombuffer(to_pcm16(np.full(RATE, 0.1 * (n + 1))), "<i2")
            assert np.array_equal(pcm(left.sentence(entries[0].id, n)), kept)
        if finished[-1] > 0:
            assert len(pcm(left.whole(entries[0].id))) == RATE * finished[-1]
            assert left.request(entries[0].id).text == "a"
            ended = entries[0].ended
    assert finished == sorted(finished) and set(finished) == {-1, 0, 1, 2} and ended is EndReason.STOP


# Spoken again


def test_one_sentence_is_spoken_again_and_the_rest_moves(engine, voice, history):
    entry, made = make(engine, history, wish(voice))
    second = entry.sentences[1]
    request = again(history.request(entry.id), second.text, seed=99)
    with engine.stream(request) as stream:
        new = np.concatenate([chunk.samples for chunk in stream])
    changed = history.replace_sentence(entry.id, 1, AudioClip(new, RATE), seed=99)
    end = second.start + second.samples
    assert pcm(history.whole(entry.id)).tobytes() == to_pcm16(np.concatenate([made[: second.start], new, made[end:]]))
    assert history.find(entry.id) == changed and changed.sentences[1].seed == 99
    assert pcm(history.sentence(entry.id, 1)).tobytes() == to_pcm16(new)
    assert len(list((history.folder / entry.id).glob("0*.wav"))) == 3


def test_a_sentence_spoken_again_with_its_seed_is_the_same(engine, voice):
    text = "It costs 5 euros at 3 [pause 1s] p.m."
    with engine.stream(wish(voice, text=text)) as stream:
        first = np.concatenate([chunk.samples for chunk in stream if chunk.sentence == 0])
    with engine.stream(again(wish(voice, text=text), stream.stats.spoken[0].text, 7)) as stream:
        assert np.array_equal(np.concatenate([chunk.samples for chunk in stream]), first)
    assert stream.stats.sentences == 1


# Subtitles


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_subtitles_stand_at_their_sentences(engine, voice, history, kind):
    entry, _ = make(engine, history, wish(voice))
    read = pysubs2.SSAFile.from_string(history.subtitles(entry.id, kind))
    assert [event.plaintext for event in read] == ["It costs 5 euros.", "你好。", "The end."]
    for event, sentence in zip(read, entry.sentences, strict=True):
        assert abs(event.start - 1000 * sentence.start / RATE) <= 1
        assert abs(event.end - 1000 * (sentence.start + sentence.samples) / RATE) <= 1


def test_subtitles_take_no_text_for_markup() -> None:
    text = "a {b} c\\N d <i>e</i> & f"
    assert "a (b) c/N d <i>e</i> & f" in subtitles([(0.0, 1.0, text)], "srt")
    assert "a (b) c/N d &lt;i&gt;e&lt;/i&gt; &amp; f" in subtitles([(3600.5, 3601.0, text)], "vtt")
    assert "01:00:00.500 --> 01:00:01.000" in subtitles([(3600.5, 3601.0, text)], "vtt")
    assert subtitles([(0.0, 1.0, " ")], "srt").strip() == ""

"""Named voices on disk: what is kept, what is refused, and what a kill leaves behind."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile

import launch
from app.voice_files import LARGEST_CLIP, LONGEST_NAME, encode_clip, file_name
from app.voices import VoiceLibrary
from runtime import AudioClip, RequestError, SpeechRequest, load_clip
from tests.app.fake_engine import RATE, FakeEngine, tone
from tests.conftest import TESTS

CONSENT = "my own voice"
CLIPS = sorted(path for path in (TESTS / "audio").iterdir() if path.suffix != ".md")
NAMES = ["Ada", "爸爸的声音", "أمي", "Zoë-Mae", "мама 2", "नमस्ते", "CON", "name.", "a" * LONGEST_NAME, "😀"]


@pytest.fixture
def library(tmp_path: Path) -> VoiceLibrary:
    return VoiceLibrary(tmp_path / "voices")


def recording(path: Path, seconds: float = 1.0, start: int = 0) -> Path:
    soundfile.write(path, tone(start, round(seconds * RATE)), RATE, subtype="PCM_16")
    return path


# What is kept


@pytest.mark.parametrize("clip", CLIPS, ids=lambda path: path.name)
def test_the_engine_hears_the_very_samples_of_the_upload(library: VoiceLibrary, clip: Path) -> None:
    library.add("Ada", clip, consent=CONSENT, trim=True)
    uploaded, kept = load_clip(clip), library.clip("Ada")
    assert kept.sample_rate == uploaded.sample_rate
    assert np.array_equal(kept.samples, uploaded.samples[: 30 * uploaded.sample_rate])


def test_a_saved_voice_conditions_like_its_upload(library: VoiceLibrary, engine) -> None:
    clip = TESTS / "audio" / "en_clean_24k.m4a"
    library.add("Ada", clip, consent=CONSENT)
    uploaded = engine.prepare(SpeechRequest(reference=load_clip(clip), text="a")).reference
    assert engine.prepare(SpeechRequest(reference=library.clip("Ada"), text="a")).reference is uploaded  # one cache key


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.9999999])
def test_samples_that_are_no_whole_numbers_are_kept_too(scale: float) -> None:
    samples = (tone(0, RATE) * scale * 1.7).astype(np.float32)
    name, content = encode_clip(AudioClip(samples, RATE))
    assert np.array_equal(load_clip(content, name).samples, samples)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_script_are_kept_across_a_restart(library: VoiceLibrary, tmp_path: Path, name: str) -> None:
    saved = library.add(
        name, recording(tmp_path / "a.wav"), consent=CONSENT, transcript=" 你好 ", description="Low and slow."
    )
    again = VoiceLibrary(library.folder).find(name)
    assert again == saved
    assert (again.name, again.transcript, again.description) == (name, "你好", "Low and slow.")
    assert again.consent.statement == CONSENT and again.seconds == 1.0 and len(again.source_sha256) == 64
    (folder,) = [path for path in library.folder.iterdir() if path.is_dir()]
    assert folder.name.isalnum() and folder.name.isascii()


@pytest.mark.parametrize(
    "name", ["", "   ", "a" * (LONGEST_NAME + 1), "a:b", "a：b", "../a", "a\\b", "a\x00b", "a\u202eb", "a|b"]
)
def test_a_name_that_cannot_be_kept_is_told(library: VoiceLibrary, tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="name"):
        library.add(name, recording(tmp_path / "a.wav"), consent=CONSENT)
    assert library.voices() == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("Ada", "Ada.zip"),
        ("CON", "voice CON.zip"),
        ("com1.x", "voice com1.x.zip"),
        ("a. ", "a.zip"),
        ("...", "voice.zip"),
        (".ssh", "voice ssh.zip"),
        ("声" * 80, "声" * 65 + ".zip"),
    ],
)
def test_exports_have_names_that_every_file_system_takes(name: str, file: str) -> None:
    assert file_name(name) == file


def test_a_voice_is_found_in_any_case_and_a_near_name_is_offered(library: VoiceLibrary, tmp_path: Path) -> None:
    library.add("Café Ada", recording(tmp_path / "a.wav"), consent=CONSENT)
    assert library.find(" cafe\u0301  ADA ").name == "Café Ada"
    with pytest.raises(RequestError, match="did you mean 'Café Ada'"):
        library.find("Cafe Ada")


def test_a_taken_name_is_refused_unless_it_is_replaced(library: VoiceLibrary, tmp_path: Path) -> None:
    library.add("Ada", recording(tmp_path / "a.wav"), consent=CONSENT)
    with pytest.raises(RequestError, match="called 'Ada' already"):
        library.add("ADA", recording(tmp_path / "b.wav", 2), consent=CONSENT)
    library.add("ADA", recording(tmp_path / "b.wav", 2), consent=CONSENT, replace=True)
    (voice,) = library.voices()
    assert voice.name == "ADA" and library.clip("ada").seconds == 2.0


def test_the_number_of_voices_has_a_bound(tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path / "voices", most_voices=1)
    library.add("a", recording(tmp_path / "a.wav"), consent=CONSENT)
    with pytest.raises(RequestError, match="the limit"):
        library.add("b", recording(tmp_path / "a.wav"), consent=CONSENT)


def test_consent_is_asked_for(library: VoiceLibrary, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="agreed"):
        library.add("Ada", recording(tmp_path / "a.wav"), consent=" ")


@pytest.mark.parametrize("seconds", [0.1, 31.0])
def test_what_the_engine_would_refuse_is_not_saved(library: VoiceLibrary, tmp_path: Path, seconds: float) -> None:
    with pytest.raises(RequestError, match="long"):
        library.add("Ada", recording(tmp_path / "a.wav", seconds), consent=CONSENT)
    with pytest.raises(RequestError, match="cannot be decoded"):
        library.add("Ada", b"no recording", consent=CONSENT)
    assert library.voices() == []


# Changes


def test_a_voice_is_changed_renamed_and_removed(library: VoiceLibrary, tmp_path: Path) -> None:
    library.add("Ada", recording(tmp_path / "a.wav"), consent=CONSENT, description="old")
    library.add("Bob", recording(tmp_path / "b.wav"), consent=CONSENT)
    samples = library.clip("Ada").samples
    library.change("Ada", transcript="her words")
    library.rename("Ada", "ada 2")
    library.rename("ada 2", "Ada 2")  # its own name in another case
    assert [voice.name for voice in library.voices()] == ["Ada 2", "Bob"]
    voice = library.find("Ada 2")
    assert (voice.transcript, voice.description) == ("her words", "old")
    assert np.array_equal(library.clip("Ada 2").samples, samples)
    with pytest.raises(RequestError, match="already"):
        library.rename("Ada 2", "bob")
    with pytest.raises(RequestError, match="cannot be changed"):
        library.change("Bob", description="x" * 3000)
    library.remove("Ada 2")
    assert [voice.name for voice in library.voices()] == ["Bob"]
    with pytest.raises(RequestError, match="no voice is called"):
        library.remove("Ada 2")


def test_a_damaged_recording_is_told_and_a_broken_folder_is_left_out(library: VoiceLibrary, tmp_path: Path) -> None:
    library.add("Ada", recording(tmp_path / "a.wav"), consent=CONSENT)
    (clip,) = library.folder.glob("*/clip.flac")
    clip.write_bytes(clip.read_bytes()[:-1])
    with pytest.raises(RequestError, match="damaged"):
        library.clip("Ada")
    for n, content in enumerate((b"", b"{}", b'{"name":' * 99, b"x" * 10**6)):
        (library.folder / str(n)).mkdir()
        (library.folder / str(n) / "voice.json").write_bytes(content)
    assert [voice.name for voice in library.voices()] == ["Ada"]


def test_many_threads_add_without_losing_or_doubling(library: VoiceLibrary, tmp_path: Path) -> None:
    clip = recording(tmp_path / "a.wav")
    taken: list[RequestError] = []

    def add(name: str) -> None:
        try:
            library.add(name, clip, consent=CONSENT)
        except RequestError as error:
            taken.append(error)

    threads = [threading.Thread(target=add, args=(f"voice {n % 6}",)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.voices()) == len(taken) == 6
    assert len([path for path in library.folder.iterdir() if path.is_dir()]) == 6


# Carrying


def test_an_exported_voice_comes_back_whole(library: VoiceLibrary, tmp_path: Path) -> None:
    saved = library.add("爸爸", recording(tmp_path / "a.wav"), consent=CONSENT, transcript="你好")
    archive = tmp_path / file_name(saved.name)
    library.export("爸爸", archive)
    other = VoiceLibrary(tmp_path / "others")
    taken_in = other.import_(archive)
    assert taken_in.model_copy(update={"saved": saved.saved}) == saved
    assert np.array_equal(other.clip("爸爸").samples, library.clip("爸爸").samples)
    with pytest.raises(RequestError, match="already"):
        other.import_(archive)
    assert other.import_(archive, "Papa").consent == saved.consent
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.wav", "爸爸.zip", "voices", "others"])


def tampered(archive: Path, path: Path, **parts: bytes | None) -> Path:
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        contents = {name: old.read(name) for name in old.namelist()}
        for name, content in (contents | parts).items():
            if content is not None:
                new.writestr(name, content)
    return path


def test_archives_that_are_no_voice_are_refused(library: VoiceLibrary, tmp_path: Path) -> None:
    library.add("Ada", recording(tmp_path / "a.wav"), consent=CONSENT)
    good = tmp_path / "Ada.zip"
    library.export("Ada", good)
    with zipfile.ZipFile(good) as archive:
        record = json.loads(archive.read("voice.json"))
    other = encode_clip(AudioClip(tone(7, RATE), RATE))[1]
    bad = {
        "no zip": b"PK\x03\x04 nothing",
        "cut": good.read_bytes()[:-30],
        "flipped": good.read_bytes()[:200] + b"\xff" * 40 + good.read_bytes()[240:],
        "another clip": {"clip.flac": other},
        "no clip": {"clip.flac": None},
        "no record": {"voice.json": None},
        "a third file": {"more.txt": b""},
        "out of the folder": {"clip.flac": None, "../clip.flac": other},
        "absolute": {"clip.flac": None, "/tmp/clip.flac": other},
        "a bomb": {"clip.flac": bytes(LARGEST_CLIP + 1)},
        "long record": {"voice.json": json.dumps(record | {"transcript": "a" * 70_000}).encode()},
        "no consent": {"voice.json": json.dumps(record | {"consent": None}).encode()},
        "clip elsewhere": {"voice.json": json.dumps(record | {"clip": "../../etc/passwd"}).encode()},
        "bad name": {"voice.json": json.dumps(record | {"name": "../Ada"}).encode()},
        "another version": {"voice.json": json.dumps(record | {"version": 2}).encode()},
        "deep": {"voice.json": b'{"a":' * 9000},
    }
    target = VoiceLibrary(tmp_path / "target")
    for name, content in bad.items():
        path = tmp_path / "bad.zip"
        path.unlink(missing_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            tampered(good, path, **content)
        with pytest.raises(RequestError):
            target.import_(path)
        assert target.voices() == [], name
    assert target.import_(tampered(good, tmp_path / "fine.zip")).name == "Ada"


# A kill


SAVER = """
import sys
from pathlib import Path
from app.voices import VoiceLibrary
folder, *clips = map(Path, sys.argv[1:])
library = VoiceLibrary(folder)
print("ready", flush=True)
while True:
    for clip in clips:
        library.add("Ada", clip, consent="hers", transcript=clip.stem, replace=True)
"""

# Dies at the nth touch of the file system, for every n until a saving comes through; prints what was left each time.
DYING = """
import itertools, os, sys
from pathlib import Path
from app.voices import VoiceLibrary
library, clips = VoiceLibrary(Path(sys.argv[1])), {path.stem: path for path in map(Path, sys.argv[2:])}
for n in itertools.count(1):
    library.add("Ada", clips["old"], consent="hers", transcript="old", replace=True)
    if (child := os.fork()) == 0:
        touches = itertools.count(1)
        def die(event, args):
            if event.split(".")[0] in ("open", "os", "shutil", "fcntl", "glob") and next(touches) == n:
                os._exit(9)
        sys.addaudithook(die)
        try:
            library.add("Ada", clips["new"], consent="hers", transcript="new", replace=True)
            os._exit(0)
        finally:
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    voice = library.find("Ada")
    clip = library.clip("Ada")  # held to its checksum
    left = sum(path.name.startswith(".new") or path.name.startswith(".gone") for path in library.folder.iterdir())
    print(voice.transcript, float(clip.samples[0]), left, flush=True)
    if ended != 9:
        sys.exit(ended)
"""


def two_clips(tmp_path: Path) -> dict[str, Path]:
    return {stem: recording(tmp_path / f"{stem}.wav", 2, start) for stem, start in (("old", 0), ("new", 9))}


def start(script: str, library: VoiceLibrary, clips: dict[str, Path]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", script, str(library.folder), *map(str, clips.values())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TESTS.parent)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_death_at_any_touch_of_the_disk_leaves_the_old_or_the_new(library: VoiceLibrary, tmp_path: Path) -> None:
    clips = two_clips(tmp_path)
    first_sample = {stem: float(load_clip(path).samples[0]) for stem, path in clips.items()}
    with start(DYING, library, clips) as dying:
        assert dying.stdout is not None
        deaths = [line.split() for line in dying.stdout.read().decode().splitlines()]
    assert dying.returncode == 0 and len(deaths) > 10
    assert all(float(sample) == first_sample[words] for words, sample, _ in deaths)
    order = [words for words, _, _ in deaths]
    assert order == sorted(order, reverse=True) and set(order) == {"old", "new"}  # one moment, no way back
    assert any(left != "0" for _, _, left in deaths)  # some died half done
    library.change("Ada", description="whole")  # cleans up
    (kept,) = [path for path in library.folder.iterdir() if path.is_dir()]
    assert sorted(path.name for path in kept.iterdir()) == ["clip.flac", "voice.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="kills with a signal")
def test_a_kill_during_saving_leaves_the_old_or_the_new(library: VoiceLibrary, tmp_path: Path) -> None:
    clips = two_clips(tmp_path)
    sound = {stem: load_clip(path).samples for stem, path in clips.items()}
    library.add("Ada", clips["old"], consent="hers", transcript="old")
    draw = random.Random(3)
    for _ in range(4):
        with start(SAVER, library, clips) as saver:
            assert saver.stdout is not None and saver.stdout.readline() == b"ready\n"
            time.sleep(draw.uniform(0, 0.06))
            os.kill(saver.pid, signal.SIGKILL)
        assert np.array_equal(library.clip("Ada").samples, sound[library.find("Ada").transcript])


# The command line


def run(*flags: object, engine: FakeEngine | None = None) -> int:
    return launch.main(list(map(str, flags)), {}, lambda settings: engine)


def test_voices_are_handled_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip, archive = recording(tmp_path / "a.wav"), tmp_path / "Ada.zip"
    voices = ("voices", "--voices", tmp_path / "voices")
    assert run(*voices, "list") == 0
    assert run(*voices, "add", "Ada", clip, "--consent", CONSENT, "--transcript", "her words") == 0
    assert run(*voices, "change", "Ada", "--description", "Low and slow.") == 0
    assert run(*voices, "export", "Ada", archive) == 0
    assert run(*voices, "rename", "Ada", "Ada Lovelace") == 0
    assert run(*voices, "import", archive, "--name", "第二") == 0
    capsys.readouterr()
    assert run(*voices, "list") == 0
    assert capsys.readouterr().out.splitlines() == ["Ada Lovelace  1.0 s  Low and slow.", "第二  1.0 s  Low and slow."]
    assert run(*voices, "remove", "第二") == 0
    assert run(*voices, "remove", "第二") == 2
    assert "no voice is called" in capsys.readouterr().err


def test_say_speaks_with_a_saved_voice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = recording(tmp_path / "a.wav")
    voices = ("--voices", tmp_path / "voices")
    run("voices", *voices, "add", "Ada", clip, "--consent", CONSENT, "--transcript", "her words")
    engine = FakeEngine(seconds=0.1)
    common = ("say", *voices, "--voice", "ada", "--text", "a", "--out", tmp_path / "out.wav")
    assert run(*common, engine=engine) == run(*common, "--transcript", "", engine=engine) == 0
    first, second = engine.requests
    assert np.array_equal(first.reference.samples, load_clip(clip).samples)
    assert (first.transcript, second.transcript) == ("her words", "")
    assert run("say", *voices, "--voice", "Bob", "--text", "a", "--out", tmp_path / "out.wav", engine=engine) == 2
    assert "no voice is called 'Bob'" in capsys.readouterr().err


def test_a_space_keeps_no_voices_unless_a_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["voices", "list"], {"SPACE_ID": "a/b"}) == 2
    assert "--voices DIR" in capsys.readouterr().err
    assert launch.main(["voices", "--voices", str(tmp_path), "list"], {"SPACE_ID": "a/b"}) == 0

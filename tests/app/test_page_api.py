"""The page's events by gradio_client, as scripts use them: no browser."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from app.server import Server, build_app
from app.settings import Settings
from app.voices import VoiceLibrary
from tests.app.fake_engine import RATE, FakeEngine
from tests.app.site import AUDIO

LISTEN_AND_WAIT = """
import sys
from gradio_client import Client, handle_file
job = Client(sys.argv[1], verbose=False).submit(
    reference=handle_file(sys.argv[2]), consent=True, source=None, text="Hello there.", api_name="/speak")
for message in job:
    print("heard", flush=True)
"""


@contextmanager
def served(engine: FakeEngine, settings: Settings | None = None) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(build_app(engine, settings or Settings()), engine)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def test_a_script_gets_every_format_of_what_an_m4a_says() -> None:
    """Input 17, and complaint 22: a streamed result is one lossless file through the API too."""
    engine = FakeEngine(seconds=0.5)
    with served(engine) as url:
        client = Client(url, verbose=False)
        voice = handle_file(str(AUDIO / "en_clean_24k.m4a"))
        with pytest.raises(AppError, match="belongs to a person"):
            client.predict(reference=voice, source=None, text="Hello there.", api_name="/speak")
        given = {"source": None, "consent": True, "text": "Hello there.", "seed": "7"}
        message, *files, sentences = client.predict(reference=voice, **given, api_name="/speak")
        assert message["state"] == "done" and message["figures"]["seed"] == 7
        assert [each["seconds"] for each in sentences["sentences"]] == [0.5]
        for file in files:
            with soundfile.SoundFile(file) as sound:
                assert sound.frames == 0.5 * RATE
        verdict = client.predict(voice, api_name="/judge")
        assert verdict["level"] == "good"
    assert engine.requests[0].reference.seconds == pytest.approx(6.1, abs=0.01)  # no part was chosen: all of it


def test_a_script_speaks_with_saved_voices(tmp_path: Path) -> None:
    """Complaint 17: the same samples and words as through the page and the command."""
    library = VoiceLibrary(tmp_path)
    library.add("Ada", AUDIO / "zero_shot_prompt.wav", consent="my own voice", transcript="希望")
    engine = FakeEngine(seconds=0.3)
    with served(engine, Settings(voices=tmp_path)) as url:
        client = Client(url, verbose=False)
        given = {"reference": None, "source": None, "api_name": "/speak"}
        client.predict(saved="ada", text="Hello there.", **given)
        client.predict(script=True, text="Ada: Hello.\nAda: And again.", words="hello = hallo", **given)
        plan = client.predict(text="Hello there.", api_name="/plan")
        with pytest.raises(AppError, match="no voice is called 'Bob'"):
            client.predict(saved="Bob", text="Hello there.", **given)
    assert [request.text for request in engine.requests] == ["Hello there.", "Hello.", "And again."]
    for request in engine.requests:
        assert np.array_equal(request.reference.samples, library.clip("Ada").samples) and request.transcript == "希望"
    assert engine.requests[1].words == {"hello": "hallo"}
    assert [sentence["text"] for sentence in plan["sentences"]] == ["Hello there."]


def test_a_client_that_goes_away_frees_the_engine() -> None:
    """Input 20. After a first Ctrl-C gradio_client itself goes on until its job ends; the second one ends it."""
    engine = FakeEngine(seconds=60.0, rtf=0.5)
    with served(engine) as url:
        arguments = [sys.executable, "-c", LISTEN_AND_WAIT, url, str(AUDIO / "en_clean_24k.m4a")]
        client = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert client.stdout is not None
        while not engine.streams or not engine.streams[0].stats.chunks:
            assert client.poll() is None
            time.sleep(0.02)
        left_at = time.time()
        client.kill()
        client.wait(10)
        client.stdout.close()
        while engine.streams[0].closed_at is None and time.time() - left_at < 20:
            time.sleep(0.02)
        assert engine.streams[0].closed_at is not None
        assert engine.streams[0].closed_at - left_at < 1.0

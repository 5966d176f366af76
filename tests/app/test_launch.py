"""Flags, ports and browsers: what happens before the page is there."""

import dataclasses
import socket
import webbrowser
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import launch
from app.cli import build_parser
from app.server import build_app
from app.settings import Settings
from runtime import EngineSettings, RequestError
from tests.app.fake_engine import FakeEngine

NOTICE = r"role=\"note\""  # as it stands in the page's configuration


def settings_of(*flags: str, environment: dict[str, str] | None = None) -> Settings:
    return launch.read_settings(build_parser().parse_args(list(flags)), environment or {})


def test_no_flags_mean_the_defaults() -> None:
    settings = settings_of()
    assert settings.voices is not None and settings.voices.is_absolute() and settings.voices.name == "voices"
    assert settings.history == settings.voices.with_name("history")
    assert dataclasses.replace(settings, voices=None, history=None) == Settings()


def test_flags_reach_the_settings() -> None:
    flags = ["--model", "a/b", "--lm", "llm.rl", "--source", "modelscope", "--no-browser"]
    flags += [
        "--host",
        "0.0.0.0",
        "--port",
        "81",
        "--device",
        "cpu",
        "--stage0",
        "vllm",
        "--precision",
        "bfloat16",
        "--fidelity",
        "official",
    ]
    engine = EngineSettings("cpu", "vllm", lm_precision="bfloat16", flow_precision="bfloat16", fidelity="official")
    flags += ["--voices", "kept", "--history", "made", "--transcription", "base"]
    kept = {"voices": Path("kept"), "history": Path("made"), "transcription": "base"}
    assert settings_of(*flags) == Settings("a/b", "llm.rl", "modelscope", "0.0.0.0", 81, False, engine=engine, **kept)


def test_a_page_that_others_can_reach_keeps_nothing_unless_a_folder_is_named(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2"):
        assert settings_of("--host", host).voices is settings_of("--host", host).history is None
    assert settings_of("--host", "0.0.0.0", "--voices", str(tmp_path)).voices == tmp_path
    assert settings_of("--host", "127.0.0.1").voices == settings_of().voices


def test_model_flags_work_before_and_after_the_command() -> None:
    said = ("say", "--reference", "x.wav")
    assert settings_of("--model", "a/b", *said).model == settings_of(*said, "--model", "a/b").model == "a/b"


def test_a_space_is_reached_from_outside_unless_flags_say_otherwise() -> None:
    space = {"SPACE_ID": "somebody/mynah"}
    settings = settings_of(environment=space)
    assert (settings.host, settings.port, settings.open_browser) == ("0.0.0.0", 7860, False)
    assert settings.voices is settings.history is None  # its visitors are strangers to each other
    assert settings_of("--port", "81", environment=space).port == 81


@pytest.mark.parametrize("flags", [["--port", "0"], ["--port", "70000"]])
def test_impossible_ports_exit_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(flags, {}, lambda settings: FakeEngine()) == 2
    assert "choose one from 1 to 65535" in capsys.readouterr().err


def test_a_busy_port_is_passed_over_but_not_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with launch.listen("127.0.0.1", 0) as first:
        busy = first.getsockname()[1]
        monkeypatch.setattr(
            launch, "FIRST_PORT", busy
        )  # the usual ones may be another's, who lets go of them meanwhile
        with launch.listen("127.0.0.1", None) as second:
            assert busy < second.getsockname()[1] < busy + 20
        with pytest.raises(RequestError, match="choose another --port"):
            launch.listen("127.0.0.1", busy)


def test_an_unknown_host_is_an_error_and_not_a_traceback() -> None:
    with pytest.raises(RequestError, match="cannot listen"):
        launch.listen("203.0.113.7", None)


def test_no_browser_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nowhere() -> None:
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "get", nowhere)
    launch.show("http://127.0.0.1:1")
    assert "open the address yourself" in capsys.readouterr().err


def test_text_browsers_do_not_take_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("lynx"))
    monkeypatch.setattr(webbrowser, "open", opened.append)
    launch.show("http://127.0.0.1:1")
    assert opened == []


def test_health_tells_what_runs() -> None:
    with TestClient(build_app(FakeEngine(), Settings())) as client:
        assert client.get("/health").json() == {
            "status": "ok",
            "memory": "0.5 GB",
            "model": "fake",
            "device": "cpu",
        }
        page = client.get("/").text
        assert "mynahPlayer" in page and NOTICE in page
        for closed in ("/gradio_api/file=/etc/hostname", f"/gradio_api/file={__file__}", "/monitoring"):
            assert client.get(closed).status_code in (403, 404), closed


def test_trained_weights_carry_no_notice() -> None:
    with TestClient(build_app(FakeEngine(makes_speech=True), Settings())) as client:
        assert NOTICE not in client.get("/").text


def test_listener_speaks_the_family_of_its_host() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with launch.listen("::1", None) as listener:
        assert listener.family == socket.AF_INET6


def test_waiting_threads_are_told_to_sleep_before_torch_is_loaded() -> None:
    source = Path(launch.__file__).read_text(encoding="utf-8")
    assert source.index('"GOMP_SPINCOUNT"') < source.index("\nfrom app") < source.index("\nfrom runtime")

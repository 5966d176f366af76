"""Fetching a checkpoint, against a small server on loopback that answers like the hub."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from runtime.errors import CheckpointError, EngineUnavailable
from runtime.hub import OFFICIAL, OFFICIAL_REVISION, HubFile, resolve_checkpoint, wanted_files
from runtime.hub import _check_disk as check_disk
from runtime.hub import _check_hash as check_hash
from runtime.hub import _check_sizes as check_sizes

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]

FETCH = """
import json, sys
from runtime.errors import SpeechError
from runtime.hub import resolve_checkpoint
try:
    print(json.dumps({"folder": str(resolve_checkpoint(sys.argv[1], lm_name=sys.argv[2]).folder)}))
except SpeechError as error:
    print(json.dumps({"error": str(error)}))
"""


class Hub(ThreadingHTTPServer):
    """Serves a folder as the repository someone/voice; counts what is asked and can break off one file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[tuple[str, str, str | None]] = []
        self.break_off: str | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fetch(
        self, home: Path, model: str = "someone/voice", lm_name: str = "llm", offline: bool = False
    ) -> dict[str, str]:
        environment = os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_address[1]}",
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": str(int(offline)),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        command = [sys.executable, "-c", FETCH, model, lm_name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=100)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        _, marker, rest = self.path.partition("/someone/voice/resolve/")
        name = rest.partition("/")[2].partition("?")[0]
        path = self.server.folder / name
        if not marker or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if marker else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        wanted = self.headers.get("Range")
        self.server.asked.append((self.command, name, wanted))
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if body:
            rest_of_file = content[start:]
            if self.server.break_off == name:
                rest_of_file = rest_of_file[: len(rest_of_file) // 2]
            self.wfile.write(rest_of_file)
            if self.server.break_off == name:
                self.close_connection = True


@pytest.fixture
def hub(tiny_checkpoint, tmp_path):
    folder = tmp_path / "repository"
    shutil.copytree(tiny_checkpoint.folder, folder)
    for part in ("llm", "flow", "hift"):  # the layout of the release: .pt files
        import torch
        from safetensors.torch import load_file

        torch.save(load_file(folder / f"{part}.safetensors"), folder / f"{part}.pt")
        (folder / f"{part}.safetensors").unlink()
    shutil.copy(folder / "llm.pt", folder / "llm.rl.pt")
    server = Hub(folder)
    yield server
    server.shutdown()


def test_a_hub_id_is_fetched_once_and_then_works_offline(hub, tmp_path):
    answer = hub.fetch(tmp_path / "home")
    assert (Path(answer["folder"]) / "cosyvoice3.yaml").is_file(), answer
    names = {name for _, name, _ in hub.asked}
    assert "llm.pt" in names and "llm.rl.pt" not in names and "UNTRAINED" not in names
    hub.asked.clear()
    assert hub.fetch(tmp_path / "home", offline=True) == answer
    assert not hub.asked


def test_a_broken_download_is_resumed(hub, tmp_path):
    (hub.folder / "flow.pt").write_bytes(bytes(25_000_000))  # the library keeps what arrived in pieces of 10 MB
    hub.break_off = "flow.pt"
    error = hub.fetch(tmp_path / "home")["error"]
    assert "What arrived is kept" in error and "flow.pt" in error and "cosyvoice3.yaml" in error
    hub.break_off = None
    assert "folder" in hub.fetch(tmp_path / "home")
    ranges = [wanted for method, name, wanted in hub.asked if method == "GET" and name == "flow.pt" and wanted]
    assert any(not wanted.startswith("bytes=0-") for wanted in ranges), hub.asked


def test_the_language_model_file_is_selectable(hub, tmp_path):
    assert "folder" in hub.fetch(tmp_path / "home", lm_name="llm.rl")
    assert "llm.rl.pt" in {name for _, name, _ in hub.asked}


def test_a_repository_without_our_files_is_named(hub, tmp_path):
    (hub.folder / "hift.pt").unlink()
    assert "has no file hift.pt" in hub.fetch(tmp_path / "home")["error"]


def test_without_a_network_the_error_says_what_to_fetch_and_where_to_put_it(hub, tmp_path):
    error = hub.fetch(tmp_path / "home", model=OFFICIAL, offline=True)["error"]
    for part in ("llm.pt (2,024,669,519 bytes)", "flow.pt", OFFICIAL_REVISION, "--model FOLDER", "--model demo"):
        assert part in error


def test_official_files_are_pinned_by_size_and_hash():
    files = {file.name: file for file in wanted_files(OFFICIAL, "llm")}
    assert sum(file.size or 0 for file in files.values()) < 4.5e9
    assert files["campplus.onnx"].sha256 and files["speech_tokenizer_v3.onnx"].sha256
    assert "flow.decoder.estimator.fp32.onnx" not in files and "llm.rl.pt" not in files


def test_a_file_of_the_wrong_size_is_named(tmp_path):
    (tmp_path / "hift.pt").write_bytes(b"x" * 10)
    with pytest.raises(CheckpointError, match=r"hift\.pt has 10 bytes, the release has 11"):
        check_sizes(tmp_path, [HubFile("hift.pt", 11)])


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "campplus.onnx").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"campplus\.onnx arrived damaged"):
        check_hash(tmp_path / "campplus.onnx", HubFile("campplus.onnx", 1, "0" * 64))


def test_a_full_disk_is_told_before_the_download(tmp_path):
    with pytest.raises(CheckpointError, match=r"needs 1000000\.0 GB more"):
        check_disk(tmp_path / "not" / "yet" / "there", [HubFile("llm.pt", 10**15)])


@pytest.mark.parametrize("model", ["nonsense", "/no/such/folder", "./here", "a/b/c"])
def test_what_is_no_model_is_said_so(model):
    with pytest.raises(CheckpointError, match="no folder here and no hub id"):
        resolve_checkpoint(model)


def test_an_unknown_language_model_is_refused():
    with pytest.raises(CheckpointError, match=r"choose one of llm, llm\.rl"):
        wanted_files(OFFICIAL, "llm.best")


def test_modelscope_without_its_library_says_what_to_install():
    with pytest.raises(EngineUnavailable, match=r"mynah\[modelscope\]"):
        resolve_checkpoint("someone/voice", source="modelscope")

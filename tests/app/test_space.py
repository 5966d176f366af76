"""The files of a Space agree with the package, and its settings with a public place."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from packaging.requirements import Requirement

import launch
from app.cli import build_parser
from app.server import build_app
from app.settings import Settings
from tests.app.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
SPACE = ROOT / "deploy" / "space"


@pytest.fixture
def front_matter() -> dict[str, Any]:
    return yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1])


@pytest.fixture
def core() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]


def settings_of(*flags: str, **variables: str) -> Settings:
    return launch.read_settings(build_parser().parse_args(list(flags)), {"SPACE_ID": "somebody/mynah"} | variables)


def test_requirements_are_the_core_of_the_package(core: list[str]) -> None:
    assert (SPACE / "requirements.txt").read_text(encoding="utf-8").splitlines() == core


def test_front_matter_names_a_gradio_that_the_package_takes(front_matter: dict[str, Any], core: list[str]) -> None:
    (gradio,) = (Requirement(line) for line in core if line.startswith("gradio"))
    assert front_matter["sdk"] == "gradio" and front_matter["sdk_version"] in gradio.specifier
    assert (ROOT / front_matter["app_file"]).is_file()
    assert len(front_matter["short_description"]) <= 60


def test_strangers_get_less_than_people_at_home() -> None:
    public, home = settings_of(), Settings()
    assert public.longest_text < home.longest_text and public.page_streams < home.page_streams
    assert public.cache_seconds <= 600 and public.page_waiting < home.page_waiting
    assert public.host == "0.0.0.0" and not public.open_browser


def test_a_variable_chooses_the_model_of_a_space_and_a_flag_wins() -> None:
    assert settings_of().model == "demo"
    assert settings_of(MYNAH_MODEL="a/b").model == "a/b"
    assert settings_of("--model", "c/d", MYNAH_MODEL="a/b").model == "c/d"
    assert launch.read_settings(build_parser().parse_args([]), {"MYNAH_MODEL": "a/b"}).model == "demo"  # at home: flags


def test_a_space_serves_the_page() -> None:
    with TestClient(build_app(FakeEngine(), settings_of())) as client:
        assert client.get("/").status_code == 200

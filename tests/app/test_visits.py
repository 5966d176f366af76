"""What belongs to a visit: found again by its token, gone a while after its last tab."""

import time
from pathlib import Path

from app.settings import Settings
from app.visits import MOST_VISITS, Visits
from tests.app.site import AUDIO


def add_voice(visits: Visits, token: str) -> Path:
    library = visits.voices(token)
    library.add("Ada", AUDIO / "zero_shot_prompt.wav", consent="my own voice")
    return library.folder


def wait_until_gone(folder: Path, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return not folder.exists()


def test_folders_of_the_settings_are_everybodys(tmp_path: Path) -> None:
    visits = Visits(Settings(voices=tmp_path / "voices", history=tmp_path / "history"))
    assert add_voice(visits, "one") == tmp_path / "voices"
    assert [voice.name for voice in visits.voices("two").voices()] == ["Ada"]
    assert visits.history("one") is visits.history("two")


def test_a_visit_sees_its_own_voices_alone() -> None:
    visits = Visits(Settings())
    add_voice(visits, "one")
    assert [voice.name for voice in visits.voices("one").voices()] == ["Ada"]
    assert visits.voices("two").voices() == []
    assert visits.history("one") is not visits.history("two")


def test_a_visit_stays_while_a_tab_is_open_and_ends_after_its_last() -> None:
    visits = Visits(Settings(cache_seconds=0.3))  # type: ignore[arg-type]
    visits.enter("one", "a tab")
    visits.enter("one", "another tab")
    folder = add_voice(visits, "one")
    visits.leave("a tab")
    assert not wait_until_gone(folder, 0.8)
    visits.leave("another tab")
    assert folder.exists()  # it may be loading again
    assert wait_until_gone(folder, 3.0)


def test_visits_are_bounded_and_those_without_a_tab_go_first() -> None:
    visits = Visits(Settings())
    visits.enter("kept", "a tab")
    kept, left = add_voice(visits, "kept"), add_voice(visits, "left")
    for number in range(MOST_VISITS - 1):
        visits.voices(f"visit {number}")
    assert kept.exists() and not left.exists()


def test_a_token_never_becomes_a_path() -> None:
    folder = Visits(Settings()).voices("../../etc").folder
    assert ".." not in folder.parts and "etc" not in folder.parts

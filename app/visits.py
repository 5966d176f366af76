"""Where the voices and jobs of a visitor are: in the folders of the settings, or in one that goes with the visit.

A visit is named by a random token that its browser keeps, so that a reload finds again what was made; whoever does not
know the token sees nothing of it. It ends a while after its last tab was closed.
"""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from app.history import History
from app.settings import Settings
from app.voices import VoiceLibrary

MOST_VISITS = 100  # the one that was left alone for longest goes first
LONGEST_TOKEN = 100  # characters


@dataclass
class _Visit:
    folder: TemporaryDirectory[str]
    voices: VoiceLibrary
    history: History
    tabs: set[str] = field(default_factory=set)
    used_at: float = 0.0  # of time.monotonic


class Visits:
    """Finds the voices and the history of a visit. Threads may share it."""

    def __init__(self, settings: Settings) -> None:
        self._voices = None if settings.voices is None else VoiceLibrary(settings.voices)
        self._history = None if settings.history is None else History(settings.history)
        self._grace_seconds = settings.cache_seconds
        self._visits: dict[str, _Visit] = {}
        self._lock = threading.Lock()

    def voices(self, token: str) -> VoiceLibrary:
        return self._voices or self._visit(token).voices

    def history(self, token: str) -> History:
        return self._history or self._visit(token).history

    def enter(self, token: str, tab: str) -> None:
        """A tab was opened: what is kept for its visit stays while it is there."""
        if self._voices is None or self._history is None:
            self._visit(token).tabs.add(tab)

    def leave(self, tab: str) -> None:
        """A tab was closed, or is being loaded again."""
        with self._lock:
            for token, visit in self._visits.items():
                if tab in visit.tabs:
                    visit.tabs.discard(tab)
                    visit.used_at = time.monotonic()
                    self._look_again(token, self._grace_seconds)

    def _visit(self, token: str) -> _Visit:
        token = token[:LONGEST_TOKEN]
        with self._lock:
            if token not in self._visits:
                self._make_room()
                folder = TemporaryDirectory(prefix="mynah-visit-")  # and goes with the process
                self._visits[token] = _Visit(
                    folder,
                    VoiceLibrary(Path(folder.name) / "voices", most_voices=20),
                    History(Path(folder.name) / "history", most_entries=30, most_bytes=100 * 2**20),
                )
                self._look_again(token, self._grace_seconds)
            self._visits[token].used_at = time.monotonic()
            return self._visits[token]

    def _make_room(self) -> None:
        while len(self._visits) >= MOST_VISITS:
            oldest = min(self._visits, key=lambda token: (bool(self._visits[token].tabs), self._visits[token].used_at))
            self._visits.pop(oldest).folder.cleanup()

    def _look_again(self, token: str, seconds: float) -> None:
        timer = threading.Timer(seconds, self._end_if_left, [token])
        timer.daemon = True
        timer.start()

    def _end_if_left(self, token: str) -> None:
        with self._lock:
            visit = self._visits.get(token)
            if visit is None or visit.tabs:
                return
            left = visit.used_at + self._grace_seconds - time.monotonic()
            if left > 0 or visit.history.is_busy:
                self._look_again(token, max(left, 1.0))
            else:
                self._visits.pop(token).folder.cleanup()

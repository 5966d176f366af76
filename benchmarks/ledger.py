"""Rows that outlive an interruption: a file beside the result for each process, the run in its first line.

A row is a JSON object on one line, written as it comes. The run is a JSON object too: all that the rows hang on, so
that those of another run are not taken for this one's.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def partial(out: Path, job: int | str) -> Path:
    """Where the process `job` keeps its rows."""
    return out.with_name(f"{out.name}.{job}.partial")


def keep(path: Path, run: Mapping[str, Any], *rows: Mapping[str, Any]) -> None:
    """Adds rows to a file, which begins with its run."""
    lines = [json.dumps(row) + "\n" for row in (rows if path.exists() else (run, *rows))]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def kept(out: Path, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of earlier starts of this run, put together in the first process's file.

    A line that was cut short is left out. Raises SystemExit for a file of another run.
    """
    rows = []
    files = sorted(out.parent.glob(partial(out, "*").name))
    for path in files:
        first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        if first != json.dumps(run):
            raise SystemExit(f"{path} is of another checkpoint or other settings; delete it or give another --out")
        for line in lines:
            with suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    forget(out)
    keep(partial(out, 0), run, *rows)
    return rows


def forget(out: Path) -> None:
    for path in out.parent.glob(partial(out, "*").name):
        path.unlink()

"""Renders the results into benchmarks/README.md.

    python -m benchmarks.report

Each JSON of results/ becomes a section: where and how it was measured, its rows as a table, and under the table what
the run does not show (its `notes`, which whoever commits the result writes).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
INTRODUCTION = """# Results

Written by `python -m benchmarks.report` from `results/*.json`; each file there comes from one run of one benchmark.
Speeds stand beside a deviation, and a part measured alone is not the whole. p50 and p99 are over the repeats, in ms.
"""


def report(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page, one section for each result by name."""
    return "\n".join([INTRODUCTION, *(section(name, result) for name, result in sorted(results.items()))])


def section(name: str, result: Mapping[str, Any]) -> str:
    hardware = ", ".join(f"{key} {value}" for key, value in result["hardware"].items() if value is not None)
    settings = ", ".join(f"{key} {value}" for key, value in result["settings"].items() if value is not None)
    lines = [f"## {name}", "", f"On {hardware}. Settings: {settings}.", "", *table(result["rows"]), ""]
    return "\n".join([*lines, *(f"{note}\n" for note in result.get("notes", []))])


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a Markdown table with every column that any row has; columns in which nothing stands are left out."""
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if value is not None))
    lines = ["| " + " | ".join(column.replace("_", " ") for column in columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = ("" if row.get(column) is None else str(row[column]) for column in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    results = {path.stem: json.loads(path.read_text()) for path in (FOLDER / "results").glob("*.json")}
    (FOLDER / "README.md").write_text(report(results))


if __name__ == "__main__":
    main()

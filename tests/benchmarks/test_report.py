"""The page of results."""

from benchmarks.report import report

RESULT = {
    "settings": {"repeats": 5, "threads": None},
    "hardware": {"device": "a card", "torch": "2.11"},
    "rows": [{"run": "first", "p50_ms": 1.5}, {"run": "second", "p50_ms": 2.0, "snr_db": 41.0}],
    "notes": ["Random weights."],
}


def test_every_row_stands_under_the_columns_of_all():
    page = report({"flow": RESULT})
    assert "| run | p50 ms | snr db |" in page
    assert "| first | 1.5 |  |" in page and "| second | 2.0 | 41.0 |" in page


def test_a_result_says_where_how_and_what_it_does_not_show():
    page = report({"b": RESULT, "a": {**RESULT, "notes": []}})
    assert page.index("## a") < page.index("## b")
    assert "On device a card, torch 2.11. Settings: repeats 5." in page
    assert page.rstrip().endswith("Random weights.")

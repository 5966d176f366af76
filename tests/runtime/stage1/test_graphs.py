"""The table around the graphs, with a stand-in for CUDA's recorder: runs are kept as they are and called again."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from runtime.stage1.graphs import Captured, GraphTable


@dataclass
class Recording:
    run: Callable[[], Tensor]
    output: Tensor

    def replay(self) -> None:
        self.output.copy_(self.run())


def record(run: Callable[[], Tensor]) -> Captured:
    recording = Recording(run, run().clone())
    return Captured(recording, recording.output, num_bytes=10)


def fails() -> Tensor:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_replay_reads_what_lies_in_the_inputs_now() -> None:
    table: GraphTable[int] = GraphTable(record, limit_bytes=100)
    number = torch.tensor([1.0])
    assert table.capture(1, lambda: number * 2)
    number.fill_(5.0)
    assert table.run(1, fails).tolist() == [10.0]
    number.fill_(6.0)
    assert table.run(1, fails).tolist() == [12.0]
    assert (table.replays, table.eager_runs) == (2, 0)


def test_a_key_without_graph_runs_eagerly_and_is_counted() -> None:
    table: GraphTable[int] = GraphTable(record, limit_bytes=100)
    assert table.run(7, lambda: torch.ones(1)).tolist() == [1.0]
    assert (table.replays, table.eager_runs) == (0, 1)


def test_a_failed_capture_disables_its_key_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Trap 55."""
    table: GraphTable[int] = GraphTable(record, limit_bytes=100)
    with caplog.at_level(logging.WARNING):
        assert not table.capture(1, fails)
        assert not table.capture(1, lambda: torch.ones(1))
    assert len(caplog.records) == 1 and "not permitted" in caplog.text
    assert table.run(1, lambda: torch.ones(1)).tolist() == [1.0]
    assert table.capture(2, lambda: torch.ones(1)) and len(table) == 1


def test_the_33rd_shape_puts_out_the_one_that_was_not_used_for_longest() -> None:
    """Trap 57."""
    table: GraphTable[int] = GraphTable(record, limit_bytes=10_000, max_graphs=32)
    for key in range(32):
        table.capture(key, lambda: torch.ones(1))
    table.run(0, fails)
    assert table.capture(32, lambda: torch.ones(1))
    assert 0 in table and 1 not in table and 32 in table
    assert (len(table), table.evictions, table.num_bytes) == (32, 1, 320)


def test_what_would_pass_the_budget_is_not_kept() -> None:
    """Trap 61. What is in stays in: its share of the pool would not come back."""
    table: GraphTable[int] = GraphTable(record, limit_bytes=25)
    kept = [table.capture(key, lambda: torch.ones(1)) for key in range(4)]
    assert kept == [True, True, False, False]
    assert (len(table), table.num_bytes, table.refusals, table.evictions) == (2, 20, 2, 0)
    assert table.run(2, lambda: torch.ones(1)).tolist() == [1.0]
    assert not table.capture(2, fails)  # nor is it tried again


def test_a_graph_that_is_put_out_makes_its_key_free_again() -> None:
    table: GraphTable[int] = GraphTable(record, limit_bytes=100, max_graphs=1)
    assert table.capture(1, lambda: torch.ones(1)) and table.capture(2, lambda: torch.ones(1))
    assert 1 not in table and table.capture(1, lambda: torch.ones(1)) and 2 not in table
    assert (table.num_bytes, table.evictions) == (10, 2)

"""The load that stage 1 is timed under."""

import pytest
import torch
from torch import Tensor

from benchmarks.stage1 import Load, measure
from runtime.errors import GenerationError
from runtime.stage1.state import Chunk
from tests.runtime.stage1.tiny_flow import tiny_stage1


@torch.inference_mode()
def test_every_load_is_solved_to_its_end_and_only_whole_sentences_have_a_rate():
    stage1 = tiny_stage1()
    rows = measure(stage1, [2], group_frames=600, repeats=1, tokens=50, warm_ups=0)
    assert [one["run"] for one in rows] == ["2 x first hop", "2 x whole", "2 x streams"]
    assert [one["audio_s_per_s"] is not None for one in rows] == [False, True, True]
    assert stage1.voices.misses == 2 and stage1.voices.hits > 0


@torch.inference_mode()
def test_growing_hops_are_cut_as_the_engine_cuts_them(monkeypatch: pytest.MonkeyPatch):
    stage1, cuts = tiny_stage1(), []
    decode = stage1.decode_together

    def noted(chunks: list[Chunk]) -> list[Tensor | GenerationError]:
        cuts.extend((len(chunk.tokens), chunk.is_last, chunk.keep) for chunk in chunks)
        return decode(chunks)

    monkeypatch.setattr(stage1, "decode_together", noted)
    Load(stage1, 1, 95, 600, "latency").streamed()
    assert cuts == [(41, False, True), (91, False, True), (95, True, False)]
    cuts.clear()
    Load(stage1, 1, 95, 600).streamed()
    assert cuts == [(41, False, False), (95, True, False)]

"""The load that stage 1 is timed under."""

import torch

from benchmarks.stage1 import measure
from tests.runtime.stage1.tiny_flow import tiny_stage1


@torch.inference_mode()
def test_every_load_is_solved_to_its_end_and_only_whole_sentences_have_a_rate():
    stage1 = tiny_stage1()
    rows = measure(stage1, [2], group_frames=600, repeats=1, tokens=50, warm_ups=0)
    assert [one["run"] for one in rows] == ["2 x first hop", "2 x whole", "2 x streams"]
    assert [one["audio_s_per_s"] is not None for one in rows] == [False, True, True]
    assert stage1.voices.misses == 2 and stage1.voices.hits > 0

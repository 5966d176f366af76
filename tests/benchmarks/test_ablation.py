"""Every arm of the ablation runs, and leaves out what its name says."""

import pytest
import torch

from benchmarks import ablation
from benchmarks.ablation import ARMS, ablate, build_all
from runtime.settings import EngineSettings
from tests.runtime.stage1.tiny_flow import tiny_stage1


@torch.inference_mode()
@pytest.mark.parametrize("streams", [1, 2])
def test_each_arm_has_a_row_and_the_plain_one_only_alone(streams: int):
    stages = dict.fromkeys(ARMS, tiny_stage1())
    cpu = torch.device("cpu")
    rows = ablate(stages, streams=streams, repeats=1, group_frames=600, tokens=50, warm_ups=0, device=cpu)
    names = [name for name in ARMS if streams == 1 or name != "plain modules"]
    assert [row["run"] for row in rows] == [f"{streams} x, {name}" for name in names]
    assert all(row["streams_audio_s_per_s"] > 0 for row in rows)


@pytest.mark.parametrize("name", list(ARMS))
def test_the_settings_of_an_arm_are_ones_that_the_engine_knows(name: str):
    arm, everything = ARMS[name], EngineSettings()
    changed = EngineSettings(**arm.settings)
    assert all(getattr(changed, key) != getattr(everything, key) for key in arm.settings)


def test_only_arms_that_differ_in_more_than_their_load_are_built(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ablation, "build", lambda *given, **choice: (*given, *choice.items()))
    stages = build_all(torch.device("cpu"))
    assert list(stages) == list(ARMS)
    assert stages["everything"] is stages["streams one by one"] is stages["growing hops"]
    assert len({id(stage1) for stage1 in stages.values()}) == len(ARMS) - 2

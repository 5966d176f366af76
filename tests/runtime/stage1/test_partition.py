"""How a GPU is divided between the stages."""

import pytest
import torch

from runtime.errors import EngineUnavailable
from runtime.stage1 import partition
from runtime.stage1.partition import left_over, stage1_stream


@pytest.mark.parametrize(("reserved", "left"), [(1, 128), (4, 128), (5, 120), (12, 120), (32, 96), (124, 8)])
def test_stage_1_gets_whole_granules_of_what_is_not_reserved(reserved, left):
    assert left_over(132, reserved) == left


@pytest.mark.parametrize("reserved", [125, 132, 400])
def test_reserving_everything_is_an_error(reserved):
    with pytest.raises(EngineUnavailable, match="leave some to stage 1"):
        left_over(132, reserved)


@pytest.mark.cuda
def test_kernels_on_the_stream_take_longer_by_the_share_they_lack():
    """Products of matrices that fill any GPU, on all of it and on less than half; the results are the same."""
    device = torch.device("cuda", 0)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    seconds, results = [], []
    for reserved in (0, count * 5 // 8):
        stream = stage1_stream(device, reserved)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            for _ in range(3):
                y = x @ x
            start.record()
            for _ in range(10):
                y = x @ x
            end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end))
        results.append(y)
    assert seconds[1] > 1.5 * seconds[0]
    assert torch.allclose(*results, rtol=2e-2, atol=1.0)


def test_a_gpu_that_cannot_be_divided_is_told(monkeypatch):
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(partition.torch, "zeros", lambda *size, device: None)
    partition._share.cache_clear()

    def refuse(**wanted):
        raise RuntimeError("PyTorch was not built with Green Context support!")

    monkeypatch.setattr(partition.GreenContext, "create", refuse)
    with pytest.raises(EngineUnavailable, match="set reserved_multiprocessors to 0"):
        stage1_stream(torch.device("cuda", 0), 16)

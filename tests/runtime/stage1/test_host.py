"""Results on their way to the host."""

import threading
import time

import pytest
import torch

from runtime.stage1.host import on_host


def test_a_copy_is_its_own():
    x = torch.arange(6.0).view(2, 3)
    copy = on_host(x)
    x.zero_()
    assert copy.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.cuda
def test_another_thread_launches_while_this_one_waits():
    """A copy to memory that is not pinned would hold the driver for as long as the kernels before it last."""
    device = torch.device("cuda")
    x = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    waited = []

    def wait() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(20):
                y = x @ x  # some 20 ms each in float32
            began = time.perf_counter()
            on_host(y[:64])
            waited.append(time.perf_counter() - began)

    other = torch.cuda.Stream(device, priority=-1)
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    with torch.cuda.stream(other):
        began = time.perf_counter()
        torch.zeros(1, device=device).add_(1)
        launched = time.perf_counter() - began
    thread.join()
    assert waited[0] > 0.1 and launched < waited[0] / 4

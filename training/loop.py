"""What every trainer shares: a schedule on the clock, captured steps, averaged weights, checkpoints, a log.

A run is given seconds, not steps: rented minutes are what is scarce, and a schedule on the clock ends annealed at
whatever speed. A step is written so that it draws its own input on the device; on a GPU it is captured once as a CUDA
graph, because models this small spend their time in launches.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from runtime.checkpoint import SCALE, Part, expand, released_name


def arguments(purpose: str | None, seconds: float, rate: float) -> argparse.ArgumentParser:
    """The flags that all trainers have."""
    parser = argparse.ArgumentParser(description=(purpose or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder that training.data wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, state and log")
    parser.add_argument("--seconds", type=float, default=seconds, help="length of this run")
    parser.add_argument("--until", type=float, help="unix time at which rented minutes end; overrides --seconds")
    parser.add_argument("--eager", action="store_true", help="do not capture steps as CUDA graphs")
    parser.add_argument("--steps", type=int, default=10**9, help="end earlier, after so many steps")
    parser.add_argument("--rate", type=float, default=rate, help="highest learning rate")
    parser.add_argument("--last-rate", type=float, default=0.02, help="share of it at the end of the run")
    parser.add_argument("--warm-up", type=int, default=300, help="steps")
    parser.add_argument("--report-every", type=float, default=30, help="seconds between held-out figures")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def prepare(options: argparse.Namespace) -> torch.device:
    """Seeds, allows TF32 and makes the output folder."""
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    options.out.mkdir(parents=True, exist_ok=True)
    return torch.device(options.device)


def half(device: torch.device) -> torch.autocast:
    """bfloat16 for matrix work on a GPU; training alone runs under autocast."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


class Clock:
    """Warm-up by steps, then half a cosine by time, down to a share of the rate."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.length = max(1.0, options.until - time.time()) if options.until else options.seconds
        self.began = time.monotonic()
        self.step = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def share(self) -> float:
        """How much of the run is over, 0 to 1."""
        return min(1.0, max(self.seconds / self.length, self.step / self.options.steps))

    def rate(self) -> float:
        o = self.options
        cosine = o.last_rate + (1 - o.last_rate) * 0.5 * (1 + math.cos(math.pi * self.share))
        return o.rate * min(1.0, (self.step + 1) / o.warm_up) * cosine


class Optimizer:
    """AdamW with a gradient norm limit and an exponential average of the weights, safe inside a captured step."""

    def __init__(
        self,
        modules: dict[str, nn.Module],
        device: torch.device,
        decay: float,
        betas: tuple[float, float],
        limit: float,
        average: float = 0.999,
    ) -> None:
        self.modules, self.limit = modules, limit
        self.parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        cuda = device.type == "cuda"
        self._rate = torch.tensor(0.0, device=device)
        self.adam = torch.optim.AdamW(groups, lr=self._rate, betas=betas, fused=cuda, capturable=cuda)
        self.averages = [p.detach().clone() for p in self.parameters]
        self.average = average
        self.norm = torch.zeros((), device=device)

    def step(self, loss: Tensor) -> None:
        self.apply(self.gradients(loss))

    def gradients(self, loss: Tensor, keep_graph: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, self.parameters, retain_graph=keep_graph)

    def apply(self, gradients: Iterable[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient.stride() != parameter.stride():  # the fused optimizer wants one layout
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient
        norm = nn.utils.clip_grad_norm_(self.parameters, self.limit, foreach=True)
        if self.norm.is_cuda:
            self.adam.found_inf = (~torch.isfinite(norm)).float()  # the fused optimizer skips such a step
        self.adam.step()
        with torch.no_grad():
            self.norm.copy_(norm.nan_to_num(0, 0, 0))
            torch._foreach_lerp_(self.averages, [p.detach() for p in self.parameters], 1 - self.average)

    def set_rate(self, rate: float) -> None:
        self._rate.fill_(rate)

    def forget(self) -> None:
        """Takes back what warming up a captured step did to the moments."""
        for state in self.adam.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def swap(self) -> None:
        """Exchanges weights and their averages; call it twice around an evaluation."""
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.averages, strict=True):
                kept = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(kept)


class Capture:
    """Turns steps into CUDA graphs that share one memory pool; on the CPU a step stays as it is.

    Warming up happens at learning rate zero and is forgotten, so that capturing changes nothing but buffers.
    """

    def __init__(self, optimizers: Iterable[Optimizer], options: argparse.Namespace) -> None:
        self.optimizers = list(optimizers)
        wanted = options.device != "cpu" and not options.eager
        self.pool = torch.cuda.graph_pool_handle() if wanted else None

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        if self.pool is None:
            return step
        for optimizer in self.optimizers:
            optimizer.set_rate(0.0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step()
        for optimizer in self.optimizers:
            optimizer.forget()
        return graph.replay


class Meter:
    """A running mean of losses, kept on the device so that reading a step costs nothing."""

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self.names = list(names)
        self.values = torch.zeros(len(self.names), device=device)

    def update(self, losses: dict[str, Tensor]) -> None:
        with torch.no_grad():
            now = torch.stack([losses.get(name, self.values[i]).detach().float() for i, name in enumerate(self.names)])
            self.values.lerp_(now, 0.02)

    def read(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in zip(self.names, self.values.tolist(), strict=True)}


class Log:
    """Lines of JSON beside the weights and on the screen."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.stem

    def write(self, **figures: object) -> None:
        line = json.dumps(figures)
        print(self.name, line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def run(
    options: argparse.Namespace,
    steps: Callable[[Clock], Callable[[], None]],
    optimizers: Iterable[Optimizer],
    report: Callable[[Clock], None],
) -> Clock:
    """Trains until the clock says so. `steps` gives the step to take next; `report` measures and saves."""
    clock, next_report = Clock(options), options.report_every
    while clock.share < 1:
        if clock.step % 20 == 0:  # the host runs ahead of the device: keep its clock honest
            if torch.cuda.is_available() and options.device != "cpu":
                torch.cuda.synchronize()
            if clock.seconds > next_report:
                report(clock)
                next_report = clock.seconds + options.report_every
        rate = clock.rate()
        for optimizer in optimizers:
            optimizer.set_rate(rate)
        steps(clock)()
        clock.step += 1
    report(clock)
    return clock


def save_state(path: Path, modules: dict[str, nn.Module], optimizer: Optimizer) -> None:
    """Everything a later run needs to go on: weights and averages in float32, no moments (they rebuild in seconds)."""
    tensors = {f"{name}.{key}": v for name, module in modules.items() for key, v in module.state_dict().items()}
    tensors |= {f"average.{i}": value for i, value in enumerate(optimizer.averages)}
    partial = path.with_suffix(".partial")
    save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, partial)
    partial.replace(path)


def load_state(path: Path, modules: dict[str, nn.Module], optimizer: Optimizer) -> bool:
    """Fills modules and averages from an earlier run's file; False where there is none."""
    if not path.is_file():
        return False
    tensors = load_file(path)
    for name, module in modules.items():
        own = {key.removeprefix(name + "."): v for key, v in tensors.items() if key.startswith(name + ".")}
        module.load_state_dict(own)
    with torch.no_grad():
        for i, average in enumerate(optimizer.averages):
            average.copy_(tensors[f"average.{i}"])
    return True


def fill(module: nn.Module, path: Path, part: Part) -> None:
    """Weights from a trainer's file or from the exported one with its released names."""
    weights = expand(load_file(path))
    module.load_state_dict({k: weights[k if k in weights else released_name(part, k)] for k in module.state_dict()})


def start_from(module: nn.Module, path: Path, optimizer: Optimizer, part: Part = "hift") -> None:
    """Warm start of weights and averages."""
    fill(module, path, part)
    with torch.no_grad():
        for parameter, average in zip(optimizer.parameters, optimizer.averages, strict=True):
            average.copy_(parameter)


def save_weights(path: Path, weights: dict[str, Tensor], int8: bool = False) -> None:
    """Half precision, or int8 rows: for export and for the next session."""
    partial = path.with_suffix(".partial")
    save_file(compact(weights, int8), partial)
    partial.replace(path)


def compact(weights: dict[str, Tensor], int8: bool) -> dict[str, Tensor]:
    """Storage form that `runtime.checkpoint.expand` widens: half precision, matrices as int8 with a scale per row."""
    stored = {}
    for name, value in weights.items():
        value = value.detach().cpu()
        if int8 and value.is_floating_point() and value.ndim > 1 and value.numel() >= 4096:
            rows = value.float().flatten(1)
            scale = rows.abs().amax(1).clamp_min(1e-8) / 127
            stored[name] = (rows / scale[:, None]).round().to(torch.int8).view(value.shape).contiguous()
            stored[name + SCALE] = scale
        else:
            stored[name] = (value.half() if value.is_floating_point() else value).contiguous()
    return stored

"""What a plan is built from, and when: against the stand-in, and NVIDIA's own builder where it is installed."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.errors import EngineUnavailable
from runtime.settings import EngineSettings
from runtime.stage1.dit_onnx import export_dit
from runtime.stage1.tensorrt_plan import ALONE, OWN, RELEASED, build_plan, open_plan, plan_name
from tests.runtime.stage1.tensorrt_stand_in import StandIn, graph_file, run_onnx
from tests.runtime.stage1.tiny_flow import tiny_flow

BINS = 80


@pytest.fixture
def own_graph(tmp_path: Path) -> Path:
    return graph_file(tmp_path / "dit.onnx", OWN, BINS)


def built(trt: StandIn, onnx: Path, exact: bool = True) -> bytes:
    return build_plan(trt, trt.Logger(2), onnx, OWN, BINS, exact=exact)


def load(plan: bytes) -> bytes | None:
    """Stands for TensorRT: refuses what was built by another version."""
    return None if plan.startswith(b"old") else plan


def test_the_network_is_strongly_typed_and_sized_by_both_profiles(own_graph: Path) -> None:
    trt = StandIn(run_onnx)
    built(trt, own_graph)
    assert trt.named("create_network") == [
        ("create_network", 1 << StandIn.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    ]
    alone, company = (call[1] for call in trt.named("add_optimization_profile"))
    assert alone["x"] == alone["mu"] == alone["cond"] == ((2, 80, 4), (2, 80, 500), (2, 80, 3000))
    assert alone["horizon"] == ((2, 4), (2, 500), (2, 3000))
    assert company["x"] == ((4, 80, 4), (8, 80, 500), (16, 80, 1024))
    assert company["t"] == ((4,), (8,), (16,)) and company["speaker"] == ((4, 80), (8, 80), (16, 80))


def test_float32_is_built_without_tf32_and_half_precision_with_it(own_graph: Path) -> None:
    exact, half = StandIn(run_onnx), StandIn(run_onnx)
    built(exact, own_graph, exact=True)
    built(half, own_graph, exact=False)
    assert exact.named("clear_flag") == [("clear_flag", StandIn.BuilderFlag.TF32)]
    assert not half.named("clear_flag")


def test_a_version_without_the_flag_is_strongly_typed_by_itself(
    own_graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "NetworkDefinitionCreationFlag", type("Flags", (), {}))
    trt = StandIn(run_onnx)
    built(trt, own_graph)
    assert trt.named("create_network") == [("create_network", 0)]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("parse_from_file", "cannot read .*UNSUPPORTED_NODE"),
        ("add_optimization_profile", "refuses the sizes"),
        ("build_serialized_network", "could not build"),
    ],
)
def test_what_the_builder_refuses_is_an_engine_that_is_unavailable(own_graph: Path, call: str, told: str) -> None:
    trt = StandIn(run_onnx)
    trt.refuses.add(call)
    with pytest.raises(EngineUnavailable, match=told):
        built(trt, own_graph)


def test_another_model_is_told_by_its_names(tmp_path: Path) -> None:
    trt, onnx = StandIn(run_onnx), graph_file(tmp_path / "flow.decoder.estimator.fp32.onnx", RELEASED, BINS)
    with pytest.raises(EngineUnavailable, match=r"takes \['cond', 'mask'.*is it another model"):
        built(trt, onnx)
    assert not trt.builds


def test_the_released_graph_is_sized_where_it_is_free(tmp_path: Path) -> None:
    """Its batch is two for good; only the frames can be chosen (spec 7)."""
    trt, onnx = StandIn(run_onnx), graph_file(tmp_path / "flow.decoder.estimator.fp32.onnx", RELEASED, BINS)
    build_plan(trt, trt.Logger(2), onnx, RELEASED, BINS, exact=True)
    ((_, sizes),) = trt.named("add_optimization_profile")
    assert sorted(sizes) == ["cond", "mask", "mu", "x"]
    assert sizes["mask"] == ((2, 1, 4), (2, 1, 500), (2, 1, 3000))


def test_a_plan_is_named_by_all_that_it_depends_on(tmp_path: Path) -> None:
    """Trap 39."""
    onnx, other = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.write_bytes(b"graph")
    other.write_bytes(b"Graph")
    usual = {"graph": OWN, "bins": BINS, "exact": True, "gpu": "H200, capability 9.0", "version": "11.4.0"}
    changes = (
        {"graph": replace(OWN, profiles=(ALONE,))},
        {"exact": False},
        {"gpu": "H200, capability 9.1"},
        {"gpu": "A100, capability 9.0"},
        {"version": "11.4.1"},
    )
    names = [plan_name(onnx, **usual), plan_name(other, **usual), *(plan_name(onnx, **usual | new) for new in changes)]  # type: ignore[arg-type]
    assert len(set(names)) == len(names)
    copied = tmp_path / "elsewhere.onnx"
    copied.write_bytes(b"graph")
    assert plan_name(copied, **usual) == names[0]  # type: ignore[arg-type]


def test_a_plan_is_built_once_and_found_again(tmp_path: Path) -> None:
    builds = []

    def build() -> bytes:
        builds.append(1)
        return b"plan"

    assert [open_plan(tmp_path / "deep" / "a.plan", build, load) for _ in range(2)] == [b"plan", b"plan"]
    assert len(builds) == 1


@pytest.mark.parametrize("damage", ["cut short", "empty", "one bit", "of another version"])
def test_a_plan_that_is_not_whole_is_built_again(tmp_path: Path, damage: str) -> None:
    """Traps 39: a truncated plan does not even reach TensorRT, which may crash on it."""
    path, seen = tmp_path / "a.plan", []

    def noting_load(plan: bytes) -> bytes | None:
        seen.append(plan)
        return load(plan)

    open_plan(path, lambda: b"old plan" if damage == "of another version" else b"plan" * 100, lambda plan: plan)
    stored = path.read_bytes()
    changed = {"cut short": stored[:-1], "empty": b"", "one bit": stored[:-1] + bytes([stored[-1] ^ 1])}
    path.write_bytes(changed.get(damage, stored))
    assert open_plan(path, lambda: b"new plan", noting_load) == b"new plan"
    assert set(seen) <= {b"new plan", b"old plan"}
    assert open_plan(path, pytest.fail, load) == b"new plan"


def test_a_build_that_breaks_off_leaves_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(source: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(OSError, match="no space"):
        open_plan(tmp_path / "a.plan", lambda: b"plan", load)
    assert [path.name for path in tmp_path.iterdir()] == ["a.plan.lock"]


def test_a_new_plan_that_does_not_load_is_an_engine_that_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="does not load"):
        open_plan(tmp_path / "a.plan", lambda: b"old plan", load)


def test_a_second_asker_waits_for_the_first_and_does_not_build(tmp_path: Path) -> None:
    builds, building = [], threading.Event()

    def build() -> bytes:
        builds.append(threading.get_ident())
        building.set()
        time.sleep(0.2)
        return b"plan"

    found: list[bytes] = []
    askers = [
        threading.Thread(target=lambda: found.append(open_plan(tmp_path / "a.plan", build, load))) for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert found == [b"plan"] * 4 and len(builds) == 1


def test_two_processes_build_one_plan(tmp_path: Path) -> None:
    """The lock and the name on disk are all that they share."""
    program = f"""
import os, time
from pathlib import Path
from runtime.stage1.tensorrt_plan import open_plan
folder = Path({str(tmp_path)!r})
(folder / f"ready-{{os.getpid()}}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.01)
def build():
    (folder / f"built-{{os.getpid()}}").touch()
    time.sleep(0.5)
    return b"plan" * 1000
assert open_plan(folder / "a.plan", build, lambda plan: plan) == b"plan" * 1000
"""
    both = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [process.wait(timeout=100) for process in both] == [0, 0]
    assert len(list(tmp_path.glob("built-*"))) == 1


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_nvidias_own_builder_takes_the_graph(exports: Path, precision: str) -> None:
    """TensorRT-RTX shares parser, strong typing and builder with TensorRT, and builds without a GPU."""
    trt = pytest.importorskip("tensorrt_rtx", reason="`pip install tensorrt-rtx` to build the graph for real")
    onnx = export_dit(tiny_flow(EngineSettings(flow_precision=precision)).estimator, exports)  # type: ignore[arg-type]
    plan = build_plan(trt, trt.Logger(trt.Logger.WARNING), onnx, OWN, BINS, exact=precision == "float32")
    assert len(plan) > 100_000

"""What is particular to vLLM; what it shares with the torch engine stands in the contract."""

import json
import math
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime import Checkpoint, Engine, EngineSettings, SpeechRequest, resolve_checkpoint
from runtime.checkpoint import released_name
from runtime.errors import EngineUnavailable
from runtime.stage0.base import build_stage0, installed_vllm, load_lm
from runtime.stage0.qwen_export import CONFIG, export_qwen2
from runtime.stage0.torch_engine import TorchStage0
from runtime.types import EndReason, SamplingParams
from tests.runtime.stage0.models import GREEDY, RAS, STANDARD, chain_lm, prompt, seeded_lm, widened
from tests.runtime.stage0.speaking import Spoken, finish, many, note, speak, take

pytestmark = pytest.mark.skipif(installed_vllm() is None, reason="needs vLLM")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def wide_checkpoint(tiny_checkpoint, tmp_path_factory) -> Checkpoint:
    """The tiny checkpoint with the same language model at a head width that the kernels know."""
    folder = tmp_path_factory.mktemp("wide") / "checkpoint"
    shutil.copytree(tiny_checkpoint.folder, folder)
    lm = load_lm(tiny_checkpoint.config.lm, tiny_checkpoint.weights("llm"), torch.float32, torch.device("cpu"))
    wide = widened(lm)
    weights = {released_name("llm", name): weight.contiguous() for name, weight in wide.state_dict().items()}
    save_file(weights, folder / "llm.safetensors")
    edit_json(tiny_checkpoint.text_folder / "config.json", folder / "CosyVoice-BlankEN" / "config.json", wide)
    recipe = folder / "cosyvoice3.yaml"
    text = recipe.read_text().replace("put_size: 32", f"put_size: {wide.config.qwen.hidden_size}")
    recipe.write_text(text)
    return resolve_checkpoint(str(folder))


def edit_json(source: Path, target: Path, lm) -> None:
    fields = json.loads(source.read_text())
    fields |= {"hidden_size": lm.config.qwen.hidden_size, "rms_norm_eps": lm.config.qwen.rms_norm_eps}
    target.write_text(json.dumps(fields))


# As a part of the whole


def test_greedy_request_sounds_as_with_the_torch_engine(wide_checkpoint, voice, tmp_path):
    """Prompt embeddings, decoding and stages behind: equal tokens are equal sound, from a worker thread too."""
    wish = SpeechRequest(reference=voice, text="The quick brown fox jumps.", seed=7, sampling=GREEDY)
    heard = {}
    for stage0 in ("torch", "vllm"):
        settings = EngineSettings(stage0=stage0, export_folder=tmp_path, stage0_memory_share=0.05)
        with Engine(wide_checkpoint, settings) as engine:
            assert engine.describe()["stage 0 engine"] == stage0
            with engine.stream(wish) as stream:
                heard[stage0] = np.concatenate([chunk.samples for chunk in stream])
            assert stream.stats.ended in (EndReason.STOP, EndReason.LENGTH)
            assert stream.stats.tokens > 10
    np.testing.assert_array_equal(heard["vllm"], heard["torch"])


def test_sampled_request_is_the_same_again_and_leaves_nothing(wide_checkpoint, voice, tmp_path):
    wish = SpeechRequest(reference=voice, text="The quick brown fox jumps.", seed=7)
    settings = EngineSettings(stage0="vllm", export_folder=tmp_path, stage0_memory_share=0.05)
    sounds, dropped = [], threading.Event()
    with Engine(wide_checkpoint, settings) as engine:
        for seed in (7, 7, 8):
            with engine.stream(replace(wish, seed=seed)) as stream:
                sounds.append(np.concatenate([chunk.samples for chunk in stream]))
        with engine.stream(wish) as cancelled:
            next(iter(cancelled))
        engine._worker0.post(dropped.set)  # comes after the call that drops the stream
        assert dropped.wait(30)
        assert engine._stage0.live_streams == 0
        np.testing.assert_array_equal(sounds[0], sounds[1])
        assert sounds[0].shape != sounds[2].shape or not np.array_equal(sounds[0], sounds[2])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the kernels of a GPU know these heads")
def test_model_that_the_kernels_do_not_know_is_refused_at_load(tiny_checkpoint, tmp_path):
    """The tiny checkpoint has heads of 16. Not at the first request, and with vLLM's own reason."""
    with pytest.raises(EngineUnavailable, match=r"vLLM .* cannot run this model here: .*head_dim=16"):
        build_stage0(tiny_checkpoint, EngineSettings(stage0="vllm", export_folder=tmp_path), DEVICE)


def test_export_that_was_tampered_with_is_refused_at_load(tmp_path):
    """Traps 12 and 18: vLLM's reading of vocabulary, stop ids and heads is compared with the checkpoint."""
    from runtime.stage0.vllm_engine import VllmStage0

    lm = widened(seeded_lm())
    file = export_qwen2(lm, tmp_path) / CONFIG
    file.write_text(file.read_text().replace('"eos_token_id": 302', '"eos_token_id": 2'))
    with pytest.raises(EngineUnavailable, match="end id 2, not 302"):
        VllmStage0(lm, DEVICE, tmp_path, memory_share=0.02, eager=True)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_precision_that_was_asked_for_is_what_runs_and_what_is_told(tmp_path, precision):
    """Trap 22. Float32 runs in all other tests here."""
    from runtime.stage0.vllm_engine import VllmStage0

    lm = widened(chain_lm({6563: (10,), 10: (11,), 11: (6562,)})).to(getattr(torch, precision))
    engine = VllmStage0(lm, DEVICE, tmp_path, memory_share=0.02, eager=True)
    assert engine.describe()["precision"] == precision
    # Matrices: on some CPUs vLLM widens the biases of a product.
    (dtypes,) = engine._engine.apply_model(lambda model: {w.dtype for w in model.parameters() if w.ndim > 1})
    assert dtypes == {getattr(torch, precision)}
    assert speak(engine, prompt()).tokens == [10, 11]


def test_folder_that_cannot_be_written_is_refused_with_the_setting_to_change(tmp_path):
    from runtime.stage0.vllm_engine import VllmStage0

    (tmp_path / "file").touch()
    with pytest.raises(EngineUnavailable, match=r"cannot be written to .*; set export_folder"):
        VllmStage0(widened(seeded_lm()), DEVICE, tmp_path / "file")


def test_devices_that_this_vllm_does_not_drive_are_refused():
    from runtime.stage0.vllm_engine import check_device

    other = "mps" if DEVICE.type == "cpu" else "cpu"
    with pytest.raises(EngineUnavailable, match=f"drives {DEVICE.type}, not {other}"):
        check_device(torch.device(other))
    with pytest.raises(EngineUnavailable, match="CUDA_VISIBLE_DEVICES=1"):
        check_device(torch.device(DEVICE.type, 1))
    check_device(torch.device(DEVICE.type, 0))


def test_engine_runs_in_this_process_and_reports_to_nobody(build_vllm):
    engine = build_vllm(seeded_lm())
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert engine._engine.model_executor.driver_worker.model_runner.kv_caches, "the weights are not in this process"
    said = engine.describe()
    assert (said["engine"], said["version"].split("+")[0]) == ("vllm", installed_vllm().split("+")[0])
    assert "closed form" in said["sampling"]


def test_configuration_can_be_hashed(build_vllm):
    """A compiled model is cached by this hash, so a GPU needs it."""
    assert build_vllm(seeded_lm())._engine.vllm_config.compute_hash()


# Streams


@pytest.mark.parametrize("together", [3, 7])
def test_several_tokens_at_once_are_all_taken_in_order(build_vllm, tmp_path, together):
    """Traps 13 and 18 of the tables: outputs of any size, none lost, none doubled, the end where it belongs."""
    from runtime.stage0.vllm_engine import VllmStage0

    lm = seeded_lm()
    requests = many(9)
    expected = [speak(build_vllm(lm), *request) for request in requests]
    engine = VllmStage0(widened(lm), DEVICE, tmp_path, 64, "intended", 0.02, tokens_per_output=together, eager=True)
    spoken: dict[int, Spoken] = {}
    for key, request in enumerate(requests):
        engine.add(key, *request)
    sizes = set()
    while engine.live_streams:
        steps = engine.step()
        sizes |= {sum(step.key == key for step in steps) for key in range(9)}
        for step in steps:
            note(spoken, step)
    assert [spoken[key] for key in range(9)] == expected
    assert max(sizes) >= together


@pytest.mark.skipif(DEVICE.type != "cpu", reason="memory is cut to size on the CPU alone")
def test_stream_that_lost_its_memory_for_a_while_says_the_same(tmp_path, monkeypatch, build_vllm):
    """vLLM takes memory from the youngest when it runs out, and reads prompt and tokens anew later."""
    from runtime.stage0 import vllm_engine

    lm = seeded_lm()
    lm.config = replace(lm.config, qwen=replace(lm.config.qwen, max_position_embeddings=300))
    requests = [(prompt(min_tokens=250, max_tokens=250), law, seed) for seed, law in enumerate([RAS, STANDARD] * 2)]
    expected = [speak(build_vllm(lm), *request) for request in requests]
    whole = vllm_engine.cache_bytes(widened(lm), 1)
    monkeypatch.setattr(vllm_engine, "cache_bytes", lambda *_: whole * 5 * 128 // (300 + vllm_engine.STEP_TOKENS))
    engine = vllm_engine.VllmStage0(widened(lm), DEVICE, tmp_path)
    for key, request in enumerate(requests):
        engine.add(key, *request)
    scheduler, preempted = engine._engine.engine_core.engine_core.scheduler, 0
    spoken: dict[int, Spoken] = {}
    while engine.live_streams:
        take(engine, spoken)
        preempted = max(preempted, sum(one.num_preemptions for one in scheduler.requests.values()))
    assert preempted, "there was memory for all"
    assert [spoken[key] for key in range(4)] == expected


def test_drops_and_faults_give_all_memory_back(build_vllm):
    """Trap 28: nothing is left in vLLM either."""
    lm = chain_lm({6563: (10,), 10: (11,), 11: (10,), 20: (21,)})
    lm.speech_embedding.weight.data[21] = math.inf
    engine = build_vllm(lm)
    core = engine._engine.engine_core.engine_core.scheduler
    free = core.kv_cache_manager.block_pool.get_num_free_blocks()
    for key in range(12):
        engine.add(key, prompt(speech=[20] if key % 3 == 0 else None, max_tokens=400), GREEDY, key)
    for _ in range(4):
        take(engine, {})
    for key in range(12):
        engine.drop(key)
    engine.step()
    assert engine.live_streams == engine._engine.get_num_unfinished_requests() == 0
    assert core.kv_cache_manager.block_pool.get_num_free_blocks() == free
    (caches,) = engine._engine.collective_rpc(lambda worker: worker.model_runner.kv_caches)
    assert all(torch.isfinite(cache).all() for cache in caches)


def test_limit_of_new_tokens_is_always_the_prompts_own(build_vllm):
    """Trap 11: never vLLM's default of 16."""
    lm = chain_lm({6563: (10,), 10: (11,), 11: (10,)})
    spoken = speak(build_vllm(lm), prompt(max_tokens=60))
    assert (len(spoken.tokens), spoken.end) == (60, EndReason.LENGTH)


def test_tokens_follow_the_law_of_the_torch_engine(build_vllm):
    """First and second tokens of 1,600 seeds, the window included: one law, drawn from different numbers."""
    lm, counts = seeded_lm(), []
    for engine in (TorchStage0(lm), build_vllm(lm)):
        said: list[list[int]] = []
        for start in range(0, 1600, 64):
            for key in range(start, start + 64):
                engine.add(key, prompt(max_tokens=2, min_tokens=2), SamplingParams(temperature=3, top_k=8), key)
            said += [stream.tokens for stream in finish(engine).values()]
        first, second = torch.tensor(said).unbind(1)
        counts.append(torch.cat((first.bincount(minlength=301), second.bincount(minlength=301))).double())
    both = counts[0] + counts[1]
    seen = both > 20
    statistic = float(((counts[0] - counts[1]).square() / both)[seen].sum())
    assert seen.sum() > 15
    assert statistic < seen.sum() + 5 * math.sqrt(2 * int(seen.sum())), statistic

"""What is particular to the torch engine: its memory, and rows that do not depend on their neighbours."""

import math

import torch

from runtime.stage0.kv_cache import POSITION_BLOCK, ROW_BLOCK, KVCache
from runtime.stage0.torch_engine import PREFILL_POSITIONS, TorchStage0
from runtime.types import EndReason
from tests.runtime.stage0.models import GREEDY, RAS, chain_lm, golden_config, prompt, seeded_lm
from tests.runtime.stage0.speaking import finish, speak, take


def new_cache() -> KVCache:
    return KVCache(golden_config().qwen, torch.device("cpu"), torch.float32)


def write(cache: KVCache, row: int, length: int, value: float) -> None:
    for keys, values in cache.row(row, length):
        keys.fill_(value)
        values.fill_(value)


def test_memory_follows_what_is_spoken_and_returns_to_nothing():
    """Trap 28, and no laptop pays for 64 long streams before there are any."""
    lm = seeded_lm()
    engine = TorchStage0(lm, max_streams=64)
    assert engine.cache_bytes == 0
    engine.add(0, prompt(max_tokens=600, min_tokens=600), RAS, 0)
    engine.step()
    qwen = lm.config.qwen
    block = 4 * 2 * qwen.num_hidden_layers * qwen.num_key_value_heads * qwen.head_dim * ROW_BLOCK * POSITION_BLOCK
    assert engine.cache_bytes == block
    for key in range(1, ROW_BLOCK + 1):
        engine.add(key, prompt(min_tokens=20), RAS, key)
    engine.step()
    assert engine.cache_bytes == 2 * block
    for _ in range(POSITION_BLOCK):
        engine.step()
    assert engine.cache_bytes == 4 * block
    engine.drop(0)
    for key in range(1, ROW_BLOCK + 1):
        engine.drop(key)
    assert engine.cache_bytes == 0


def test_growing_across_a_block_changes_no_token():
    """A stream that passes the block border among others equals itself alone in an engine of its own."""
    lm = seeded_lm(1)
    said = prompt(text=list(range(60)), speech=list(range(300)) + list(range(140)), min_tokens=40, max_tokens=40)
    runs = []
    for neighbours in (0, ROW_BLOCK):
        engine = TorchStage0(lm)
        engine.add(0, said, RAS, 9)
        tokens = [step.token for step in engine.step()]
        for key in range(1, neighbours + 1):
            engine.add(key, prompt(min_tokens=60, max_tokens=60), RAS, key)
        while len(tokens) < 40:
            tokens += [step.token for step in engine.step() if step.key == 0]
        runs.append(tokens)
    assert runs[0] == runs[1]


def test_off_the_cpu_decode_batch_and_cache_view_come_in_whole_blocks():
    """Trap 9: kernels that see whole blocks sum each row in one and the same order."""
    lm, seen = seeded_lm(), []
    lm.register_forward_pre_hook(lambda _, args: seen.append(args))
    engine = TorchStage0(lm)
    engine._row_steps = None
    for key in range(ROW_BLOCK + 3):
        engine.add(key, prompt(min_tokens=20, max_tokens=5 + key), RAS, key)
    while engine.live_streams:
        engine.step()
    decoded = [args for args in seen if len(args) == 3]
    assert {len(x) for x, _, _ in decoded} == {ROW_BLOCK, 2 * ROW_BLOCK}
    assert {keys.shape[2] for _, _, cache in decoded for keys, _ in cache} == {POSITION_BLOCK}


@torch.inference_mode()
def test_filler_rows_and_neighbours_leave_a_row_alone():
    """Trap 43 for the module: NaN in another row, in filler and beyond the row's own length is not seen."""
    lm = seeded_lm()
    x = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(2))
    cache = new_cache()
    for row, length in enumerate((4, 9)):
        cache.join(length)
        write(cache, row, length, 0.5)
    alone = lm(x[:1], torch.tensor([[4]]), [(keys[:1].clone(), values[:1].clone()) for keys, values in cache.view(5)])
    x[1:] = math.nan
    together = lm(x, torch.tensor([[4], [9], [0]]), cache.view(10))
    torch.testing.assert_close(together[0], alone[0], atol=1e-5, rtol=0)
    assert together[1].isnan().all()


def test_row_that_leaves_is_filled_by_the_last_and_what_was_there_is_cleared():
    """Zero times a leftover NaN would be NaN."""
    cache = new_cache()
    for row in range(3):
        cache.join(10)
        write(cache, row, 10, math.nan if row == 0 else row)
    cache.leave(0)
    assert cache.rows == 2
    for keys, values in cache.view(11):
        for half in (keys, values):
            assert half[:, :, :10].amin((1, 2, 3)).tolist() == [2, 1]
            assert not half[:, :, 10:].any()
    cache.leave(0)
    cache.leave(0)
    assert cache.num_bytes == 0


def test_growth_keeps_what_is_there():
    cache = new_cache()
    cache.join(10)
    write(cache, 0, 10, 3.0)
    cache.reserve(ROW_BLOCK + 1, POSITION_BLOCK + 1)
    keys, values = cache.row(0, 2 * POSITION_BLOCK)[1]
    assert keys.shape[2] == 2 * POSITION_BLOCK
    for half in (keys, values):
        assert (half[:, :, :10] == 3).all()
        assert not half[:, :, 10:].any()


def test_no_memory_for_a_prompt_ends_that_request_alone(monkeypatch):
    engine = TorchStage0(chain_lm({6563: (10,), 10: (11,), 11: (6562,)}))
    engine.add(0, prompt(), GREEDY, 0)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "row", lambda *_: raise_out_of_memory())
        engine.add(1, prompt(), GREEDY, 0)
        steps = {step.key: step for step in engine.step()}
    assert steps[1].end is EndReason.ERROR
    assert "lower max_streams" in str(steps[1].error)
    assert steps[0].token == 11
    assert [step.end for step in engine.step()] == [EndReason.STOP]


def test_no_memory_while_decoding_ends_the_longest_stream_alone(monkeypatch):
    """The cache cannot grow over its second block of positions: who needs that gives way, the others notice nothing."""
    lm, grow = seeded_lm(), KVCache.reserve
    requests = [
        (prompt(text=[1] * (490 if key == 1 else 5), min_tokens=60, max_tokens=60), RAS, key) for key in range(4)
    ]
    expected = [speak(TorchStage0(lm), *request) for request in requests]
    engine = TorchStage0(lm)
    for key, request in enumerate(requests):
        engine.add(key, *request)

    def reserve(cache: KVCache, rows: int, positions: int) -> None:
        if positions > POSITION_BLOCK:
            raise_out_of_memory()
        grow(cache, rows, positions)

    monkeypatch.setattr(KVCache, "reserve", reserve)
    spoken = finish(engine)
    assert spoken[1].end is EndReason.ERROR
    assert "no memory for a stream of 512 positions; lower max_streams" in str(spoken[1].error)
    assert spoken[1].tokens == expected[1].tokens[: len(spoken[1].tokens)]
    assert len(spoken[1].tokens) == 21
    assert [spoken[key] for key in (0, 2, 3)] == [expected[key] for key in (0, 2, 3)]
    assert engine.cache_bytes == 0


def test_no_memory_at_all_ends_every_stream_by_name(monkeypatch):
    engine = TorchStage0(seeded_lm())
    for key in range(3):
        engine.add(key, prompt(min_tokens=9), RAS, key)
    engine.step()
    monkeypatch.setattr(KVCache, "view", lambda *_: raise_out_of_memory())
    steps = engine.step()
    assert sorted(step.key for step in steps) == [0, 1, 2]
    assert {step.end for step in steps} == {EndReason.ERROR}
    assert (engine.live_streams, engine.cache_bytes) == (0, 0)


def test_many_arriving_prompts_do_not_hold_up_a_speaking_stream():
    """Each step gives the speaking stream its token and reads few positions; arrivals keep their turn."""
    lm = seeded_lm()
    arrivals = [(prompt(text=[2 + key] * 98, min_tokens=3, max_tokens=3), RAS, key) for key in range(9)]
    expected = [speak(TorchStage0(lm), *request) for request in arrivals]
    engine, spoken, begun = TorchStage0(lm), {}, []
    engine.add(99, prompt(min_tokens=40, max_tokens=40), RAS, 0)
    take(engine, spoken)
    for key, request in enumerate(arrivals):
        engine.add(key, *request)
    for step in range(5):
        take(engine, spoken)
        assert len(spoken[99].tokens) == step + 2
        begun.append(len(spoken) - 1)
    assert begun == [2, 4, 6, 8, 9]  # two prompts of 100 positions fit into 256
    finish(engine, spoken)
    assert [spoken[key] for key in range(9)] == expected


def test_prompt_longer_than_a_step_reads_is_read_alone():
    engine, spoken = TorchStage0(seeded_lm()), {}
    for key in range(2):
        engine.add(key, prompt(text=[5] * (PREFILL_POSITIONS + 40), min_tokens=2), RAS, key)
    take(engine, spoken)
    assert list(spoken) == [0]
    take(engine, spoken)
    assert list(spoken) == [0, 1]


def raise_out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 1 GiB")

"""The captured engine on a GPU: its kernels against the plain module, its draws against the written law, its storm."""

import math
from dataclasses import replace

import pytest
import torch

from runtime.stage0.laws import Laws, next_token_law, philox, two_draws
from runtime.stage0.plain_steps import PlainSteps
from runtime.stage0.slot_engine import PIECE, SlotStage0
from runtime.types import EndReason, SamplingParams
from tests.runtime.stage0.engines import build_captured
from tests.runtime.stage0.models import GREEDY, RAS, STANDARD, prompt, seeded_lm
from tests.runtime.stage0.speaking import finish, many, speak, take
from tests.runtime.stage0.test_laws import chi_square

pytestmark = pytest.mark.cuda
V = 6761


def captured(lm, slots: int, positions: int = 1024):
    from runtime.stage0.captured import CapturedSteps

    return CapturedSteps(lm.to("cuda"), slots, positions)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@torch.inference_mode()
def test_keys_values_and_logits_are_those_of_the_plain_module(dtype, allowed):
    """Prompts shorter and longer than a piece, packed into one reading; then steps of some and of all."""
    lm = seeded_lm().to("cuda", dtype)
    fast, plain = captured(lm, 20), PlainSteps(lm, 20, 1024)
    lengths = [5, 70, 150, PIECE, PIECE + 1, 700, 128, 129, 63, 64]
    generator = torch.Generator().manual_seed(0)
    for slot in range(20):
        length = lengths[slot % 10]
        ids = [-1 - int(token) for token in torch.randint(0, 512, (length,), generator=generator)] + [303, 7]
        for steps in (fast, plain):
            steps.open(slot, ids[-1], len(ids) - 1, (RAS, STANDARD)[slot % 2], slot, 4)
            for start in range(0, len(ids) - 1, PIECE):
                steps.read([(slot, start, ids[start : min(start + PIECE, len(ids) - 1)])])
        for mine, theirs in zip(fast._lm.cache, plain._layers, strict=True):
            end = len(ids) - 1
            given, wanted = mine[:, slot, :, :end].float(), theirs[:, slot, :, :end].float()
            assert (given - wanted).norm() < allowed * wanted.norm()
    for turn in range(6):
        slots = list(range(20)) if turn % 2 else [3, 17, 1]
        tokens = fast.launch(slots).tokens()
        assert fast.logits[: len(slots)].isfinite().all()
        if dtype is torch.float32:  # the same numbers are drawn, so the same tokens
            assert tokens == plain.launch(slots).tokens()


@torch.inference_mode()
def test_a_graph_gives_the_bits_of_its_kernels_run_one_by_one_again_and_again():
    """Traps 55 and 58: replays with other data, rows of every block, and the same without a graph."""
    lm = seeded_lm().to("cuda", torch.bfloat16)
    runs = []
    for graphs in (True, False):
        steps = captured(lm, 40)
        if not graphs:
            steps._graphs.clear()
        seen = []
        for slot in range(40):
            steps.open(slot, 9, 30, RAS, slot, 0)
            steps.read([(slot, 0, [-1 - slot - at for at in range(30)])])
        for rows in (40, 1, 17, 33, 40):
            seen.append(steps.launch(list(range(rows))).tokens())
            seen.append(steps.logits[:rows].clone())
        runs.append(seen)
    for given, wanted in zip(*runs, strict=True):
        assert given == wanted if isinstance(given, list) else torch.equal(given, wanted)


@torch.inference_mode()
def test_a_row_is_the_same_bits_alone_and_among_64_of_any_length():
    """Row-independent arithmetic in half precision, whatever graph a row is in and wherever it sits.

    Trap 17: rows that fill a graph up belong to a spare slot and have a length of their own.
    """
    lm = seeded_lm().to("cuda", torch.bfloat16)
    steps, seen = captured(lm, 64), {}
    for company in (False, True):
        for slot in range(64) if company else (20,):
            ids = [-1 - (slot * 7 + at) % 512 for at in range(20 + 13 * slot % 300)]
            steps.open(slot, 5, len(ids), RAS, slot, 0)
            steps.read([(slot, at, ids[at : at + PIECE]) for at in range(0, len(ids), PIECE)][:1])
            for at in range(PIECE, len(ids), PIECE):
                steps.read([(slot, at, ids[at : at + PIECE])])
        rows = list(range(64)) if company else [20]
        for turn in range(5):
            steps.launch(rows).tokens()
            seen[company, turn] = steps.logits[rows.index(20)].clone()
    for turn in range(5):
        assert torch.equal(seen[False, turn], seen[True, turn]), turn


def lines(params: list[SamplingParams], history: list[list[int]], ids: int, early: int):
    """The tables of the kernel for streams that have said this: numbers, knobs, history and seen."""
    from runtime.stage0 import draw_kernel as draw

    count = len(params)
    numbers = torch.zeros(count, draw.NUMBERS, dtype=torch.int64)
    knobs = torch.ones(count, draw.KNOBS)
    said = torch.zeros(count, 64, dtype=torch.int32)
    seen = torch.zeros(count, ids, dtype=torch.uint8)
    for row, (one, past) in enumerate(zip(params, history, strict=True)):
        line = numbers[row]
        line[draw.STEP], line[draw.MIN_TOKENS], line[draw.TOP_K] = len(past), early, one.top_k or ids
        line[draw.WINDOW], line[draw.REPEATS] = one.window, max(1, math.ceil(one.window * one.repeat_threshold))
        line[draw.STANDARD] = one.method == "standard"
        knobs[row, draw.TEMPERATURE], knobs[row, draw.TOP_P] = one.temperature, one.top_p
        knobs[row, draw.PENALTY] = one.repetition_penalty if one.method == "standard" else 1
        said[row, : len(past)] = torch.tensor(past, dtype=torch.int32)
        seen[row, past] = 1
    return [table.cuda() for table in (numbers, knobs, said, seen)]


def drawn_by_kernel(rows: torch.Tensor, tables: list[torch.Tensor], seeds: torch.Tensor) -> torch.Tensor:
    """Ids [N] for rows [N, V]; the last 200 ids cannot come early."""
    from runtime.stage0 import draw_kernel as draw

    numbers, knobs, said, seen = tables
    count, ids = rows.shape
    numbers[:, draw.SEED] = seeds.cuda()
    drawn = torch.zeros(count, dtype=torch.int64, device="cuda")
    draw.draw_kernel[(count,)](
        rows, torch.arange(count, device="cuda"), numbers, knobs, said, seen, drawn,
        count, ids - 200, ids, ids, 64, 1 << (ids - 1).bit_length(), draw.NUMBERS, draw.KNOBS, False, num_warps=8,
    )  # fmt: skip
    return drawn


def drawn_by_tensors(
    rows: torch.Tensor, params: list[SamplingParams], history: list[list[int]], seeds: torch.Tensor, early: int
) -> torch.Tensor:
    """The same from the readable form, -1 where nothing can be drawn."""
    count, ids = rows.shape
    recent = torch.full((count, 10), ids)
    seen, forbidden = torch.zeros(2, count, ids, dtype=torch.bool)
    for row, (one, past) in enumerate(zip(params, history, strict=True)):
        window = past[-one.window :] if one.window else []
        recent[row, : len(window)] = torch.tensor(window, dtype=torch.long)
        seen[row, past] = True
        forbidden[row, ids - 200 :] = len(past) < early
    numbers = philox(seeds, torch.tensor([len(past) for past in history]))
    tables = (table.cuda() for table in (recent, forbidden, seen, numbers))
    tokens, broken = two_draws(rows, Laws.of(params, ids, rows.device), *tables)
    return tokens.masked_fill(broken, -1)


KINDS = [
    RAS,
    STANDARD,
    GREEDY,
    SamplingParams(top_k=0, top_p=1.0),
    SamplingParams(method="standard", top_k=0, top_p=0.5),
    SamplingParams(window=3, repeat_threshold=0.5),
    SamplingParams(top_k=1),
    SamplingParams(temperature=0.3, top_p=0.99),
    SamplingParams(window=0),
]


def test_the_kernel_draws_what_the_readable_form_draws_from_the_same_numbers():
    """Traps 1 to 8: every kind of row under every kind of law, equal scores and broken rows among them."""
    generator = torch.Generator().manual_seed(1)
    count = 63 * 12
    rows = 3 * torch.randn(count, V, generator=generator)
    rows[1::7] = torch.randint(0, 5, rows[1::7].shape, generator=generator).float() / 2
    rows[2::7] = -math.inf
    rows[2::7, [0, 3, V - 1]] = 1.0
    rows[3::7, ::2] = math.nan
    rows[4::14] = math.nan
    rows[5::7, [7, 9]] = math.inf
    rows[6::7, 5] += 200
    params = [KINDS[row % len(KINDS)] for row in range(count)]
    history = [[5] * (row % 7 == 6) + [(row * 31 + at) % 12 for at in range(row % 20)] for row in range(count)]
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    drawn = drawn_by_kernel(rows.cuda(), lines(params, history, V, early=10), seeds)
    wanted = drawn_by_tensors(rows.cuda(), params, history, seeds, early=10)
    assert int((wanted == -1).sum()) == count // 14
    # Sums in float32 and float64 may part at a border, once in some ten thousand rows.
    assert int((drawn != wanted).sum()) <= 1


@pytest.mark.parametrize("history", [[], [0], [0, 2, 11, 0], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("params", [RAS, replace(STANDARD, top_k=6)])
def test_a_million_draws_of_the_kernel_have_the_written_law(params, history):
    ids, million = 212, 1_000_000
    row = torch.full((ids,), -math.inf)
    row[:12] = torch.linspace(2, -2, 12)
    law = next_token_law(
        row[None], Laws.of([params], ids, row.device), torch.tensor([(history + [ids] * 10)[:10]]),
        torch.zeros(1, ids, dtype=torch.bool),
        torch.zeros(1, ids, dtype=torch.bool).index_fill(1, torch.tensor(history, dtype=torch.long), True),
    )[0][0]  # fmt: skip
    tables = [table.expand(million, -1).contiguous() for table in lines([params], [history], ids, early=0)]
    drawn = drawn_by_kernel(row.cuda().expand(million, ids).contiguous(), tables, torch.arange(million) * 7919)
    counts = drawn.cpu().bincount(minlength=ids)
    statistic, freedom = chi_square(counts, law)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), (statistic, freedom)


def test_storm_of_five_thousand_requests_leaves_the_others_as_they_were():
    """A tenth is cancelled in mid-stream, a hundredth has NaN in the prompt, and every slot comes back."""
    lm = seeded_lm()
    lm.backbone.embed_tokens.weight.data[7] = math.nan
    kinds = many(500)
    requests = [(*kinds[key % 500][:2], key) for key in range(5000)]
    for key, (said, law, seed) in enumerate(requests):
        text = said.text_tokens.masked_fill(said.text_tokens == 7, 8)
        requests[key] = (replace(said, text_tokens=text), law, seed)
        if key % 100 == 5:
            requests[key] = (prompt(text=[1, 7, 3], max_tokens=30), RAS, key)
    cancelled = set(range(8, 5000, 10))
    engine, spoken, waiting = build_captured(lm, 64), {}, list(range(5000))[::-1]
    memory = None
    while waiting or engine.live_streams:
        while waiting and engine.live_streams < 80:
            engine.add(waiting[-1], *requests[waiting.pop()])
        take(engine, spoken)
        memory = memory or torch.cuda.memory_allocated()
        for key in cancelled & spoken.keys():
            if spoken[key].end is None and len(spoken[key].tokens) >= key % 7:
                engine.drop(key)
                cancelled.discard(key)
    cancelled = set(range(8, 5000, 10))
    survivors = sorted(set(range(5000)) - cancelled)
    ends = [spoken[key].end for key in survivors]
    assert ends.count(EndReason.ERROR) == 50
    assert ends.count(EndReason.STOP) + ends.count(EndReason.LENGTH) == len(survivors) - 50
    assert engine.free_slots == 64
    assert torch.cuda.memory_allocated() <= memory
    for key in survivors[::22][:200]:
        assert speak(engine, *requests[key]) == spoken[key], key


def test_closing_gives_the_device_memory_back():
    before = torch.cuda.memory_allocated()
    engine = build_captured(seeded_lm(), 16)
    assert isinstance(engine, SlotStage0)
    engine.add(0, prompt(), RAS, 0)
    finish(engine)
    assert torch.cuda.memory_allocated() > before
    engine.close()
    assert torch.cuda.memory_allocated() <= before + 2**20

"""The engine with a tiny random model: batching changes no text under a one-path policy, and its trace adds up."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batch_variance.common import BadInput
from batch_variance.engine import Engine, EngineConfig, ExpertSplit, Load, Model, Request, Weights, load_weights, serve
from batch_variance.engine.experts import prompt_logits
from batch_variance.engine.model import StepRows
from batch_variance.kernels.nvfp4 import policy
from batch_variance.kernels.sets import EmulatedKernels
from batch_variance.kernels.tiles import differing_rows

CPU = torch.device("cpu")
SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
SPLIT = ExpertSplit([torch.arange(96) % 6] * 2, experts=6, top_k=4)
KINDS = {
    "plain": {},
    "nvfp4": {"nvfp4": True},
    "experts": {"split": SPLIT},
    "nvfp4 experts": {"nvfp4": True, "split": SPLIT},
}
FORCED = [(kind, name) for kind in KINDS for name in ("force-gemv", "force-gemm")]


@pytest.fixture(scope="module")
def weights(tiny_folder):
    return {kind: load_weights(tiny_folder, CPU, **options) for kind, options in KINDS.items()}


def prompts(count=6, longest=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, longest] + torch.randint(2, longest, (count - 2,), generator=generator).tolist()
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def model(weights: Weights, name: str = "force-gemv", eos=()) -> Model:
    return Model(replace(weights, shape=replace(weights.shape, eos=eos)), EmulatedKernels(), policy(name))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


# --- one forward pass

def decode_rows(weights: Weights, policy_name: str):
    """24 cached contexts of 1 ... 60 tokens, some holding NaN, and an operation: one decode step of any of them."""
    count, width, page = 24, 4, 16
    broken = replace(weights, embedding=weights.embedding.clone())
    broken.embedding[7], broken.embedding[8, 3] = torch.nan, torch.inf
    runner = model(broken, policy_name)
    contexts = prompts(count)
    contexts[5][-1], contexts[6][0], contexts[9][-1] = 7, 7, 8
    shape = weights.shape
    k = torch.zeros(shape.layers, count * width, page, shape.kv_heads, shape.head_dim)
    v = torch.zeros_like(k)
    tables = torch.arange(count * width).view(count, width)
    lengths = torch.tensor([len(c) for c in contexts])
    for row, context in enumerate(contexts):
        steps(runner, [(context[:-1], 0, tables[row])] if len(context) > 1 else [], k, v)
    last = torch.tensor([context[-1] for context in contexts])

    def operation(pick):
        position = lengths[pick] - 1
        slots = tables[pick].gather(1, position[:, None] // page).squeeze(1) * page + position % page
        return runner.forward(
            StepRows(last[pick], position, slots, tables[pick], position + 1, torch.arange(len(pick)), len(pick)), k, v
        )

    return operation, torch.arange(count)


def steps(runner, chunks, k, v):
    """Run (tokens, first position, page table) chunks one after another; logits of all tokens of the last one."""
    page = k.shape[2]
    logits = None
    for tokens, start, table in chunks:
        position = torch.arange(start, start + len(tokens))
        slots = table[position // page] * page + position % page
        logits = runner.forward(
            StepRows(
                torch.tensor(tokens),
                position,
                slots,
                table.expand(len(tokens), -1),
                position + 1,
                torch.arange(len(tokens)),
                0,
            ),
            k,
            v,
        )
    return logits


@pytest.mark.parametrize("kind,name", FORCED)
def test_forward_rows_are_independent(weights, kind, name):
    operation, rows = decode_rows(weights[kind], name)
    assert operation(rows).isnan().any() and operation(rows).isfinite().any()
    assert differing_rows(operation, rows, SIZES) == (0, sum(SIZES))


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_forward_rows_are_independent_for_any_thread_count(weights, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        operation, rows = decode_rows(weights["nvfp4 experts"], "force-gemv")
        assert differing_rows(operation, rows, (1, 17, 64, 129)) == (0, 211)
    finally:
        torch.set_num_threads(before)


def test_the_default_dispatch_shows_in_the_forward_control(weights):
    operation, rows = decode_rows(weights["nvfp4"], "default")
    assert differing_rows(operation, rows, (1, 31, 32))[0] == 0
    # The rows of NaN, about one in six, cannot differ.
    assert 60 < differing_rows(operation, rows, (33, 64))[0] < 97


def test_experts_cross_the_threshold_later(weights):
    """Top 4 of 6: 33 rows bring some expert about 22, so the crossing depends on whom the neighbours chose."""
    operation, rows = decode_rows(weights["nvfp4 experts"], "default")
    assert differing_rows(operation, rows, (32,))[0] == 0
    assert differing_rows(operation, rows, (64, 128))[0] > 0


@pytest.mark.parametrize("kind,name", FORCED)
def test_prefill_chunks_change_no_bits(weights, kind, name):
    tokens, runner = prompts()[1][:40], model(weights[kind], name)
    whole = prompt_logits(runner, tokens)
    shape = weights[kind].shape
    for sizes in ([1] * 40, [39, 1], [1, 39], [16, 16, 8], [17, 15, 8], [31, 2, 7], [33, 7]):
        k = torch.zeros(shape.layers, 5, 16, shape.kv_heads, shape.head_dim)
        v, table, start, found = torch.zeros_like(k), torch.tensor([4, 1, 3, 0]), 0, []
        for size in sizes:
            found.append(steps(runner, [(tokens[start : start + size], start, table)], k, v))
            start += size
        assert start == 40 and torch.equal(bits(torch.cat(found)), bits(whole)), sizes


def test_a_prompts_tail_changes_nothing_before_it(weights):
    """Causality in bits, with a NaN token at the end."""
    broken = replace(weights["plain"], embedding=weights["plain"].embedding.clone())
    broken.embedding[7] = torch.nan
    tokens = [t if t != 7 else 9 for t in prompts()[1]]
    short = prompt_logits(model(broken), tokens[:37])
    assert torch.equal(bits(prompt_logits(model(broken), tokens[:37] + [7] * 20)[:37]), bits(short))


def test_observe_sees_each_layer(weights):
    seen = []
    prompt_logits(
        model(weights["plain"]), prompts()[2], lambda layer, hidden: seen.append((layer, tuple(hidden.shape)))
    )
    assert seen == [(0, (len(prompts()[2]), 64)), (1, (len(prompts()[2]), 64))]


def test_long_positions_extend_the_rotary_table(weights):
    runner = model(weights["plain"])
    k = torch.zeros(2, 200, 16, 2, 16)
    table = torch.arange(200)
    steps(runner, [([1, 2, 3], 2047, table)], k, torch.zeros_like(k))
    assert runner._cos.shape[0] > 2049
    angle = 2049 * 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(runner._cos[2049].double(), angle.cos(), rtol=0, atol=3e-4)


# --- serving

def texts(run):
    return [(r.prompt, r.output, r.margins) for r in run.requests]


@pytest.mark.parametrize("kind,name", FORCED)
def test_batching_gives_each_prompt_what_it_gets_alone(weights, kind, name):
    runner, asked = model(weights[kind], name), prompts()
    alone = {r.prompt: (r.output, r.margins) for r in serve(runner, asked, Load(1, 6, 12, seed=0)).requests}
    run = serve(runner, asked, Load(9, 24, 12, seed=1), EngineConfig(max_rows=70, prefill_chunk=23))
    assert max(len(step.rows) for step in run.steps) >= 8
    assert len(run.requests) == 24
    for request in run.requests:
        assert (request.output, request.margins) == alone[request.prompt]


def test_the_default_policy_is_seen_to_vary(weights):
    """Positive control of the test above: with the threshold crossed, margins move."""
    runner, asked = model(weights["nvfp4"], "default"), prompts()
    alone = {
        r.prompt: r.margins
        for r in serve(runner, asked, Load(1, 6, 12, seed=0), EngineConfig(prefill_chunk=16)).requests
    }
    run = serve(runner, asked, Load(40, 80, 12, seed=1, jitter=0), EngineConfig(prefill_chunk=16))
    assert {record.kernel for step in run.steps for record in step.matmuls} == {"gemv", "gemm"}
    assert any(request.margins != alone[request.prompt] for request in run.requests)


def test_runs_repeat_and_seeds_differ(weights):
    runner = model(weights["nvfp4 experts"], "default")
    a, b, c = (serve(runner, prompts(), Load(6, 18, 8, seed=seed)) for seed in (3, 3, 4))
    assert a.steps == b.steps and texts(a) == texts(b)
    assert a.steps != c.steps
    assert [r.number for r in c.requests] == list(range(18))


def test_concurrency_1_has_no_jitter(weights):
    a, b = (serve(model(weights["plain"]), prompts(), Load(1, 6, 5, seed=seed)) for seed in (0, 1))
    assert a.steps == b.steps and all(len(step.rows) == 1 for step in a.steps)


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_concurrency_bounds_the_requests_in_flight(weights, concurrency):
    run = serve(model(weights["plain"]), prompts(), Load(concurrency, 20, 6, seed=2))
    most = max(sum(r.arrival <= step.index <= r.finished for r in run.requests) for step in run.steps)
    assert 1 <= most <= concurrency
    assert [r.prompt for r in run.requests] == [i % 6 for i in range(20)]


def test_progress_sees_each_request_once(weights):
    seen = []
    serve(model(weights["plain"]), prompts(), Load(4, 10, 3, seed=0), progress=lambda r: seen.append(r.number))
    assert sorted(seen) == list(range(10))


def test_eos_ends_a_text_unless_ignored(weights):
    runner = model(weights["plain"])
    full = serve(runner, prompts(), Load(1, 1, 12, seed=0)).requests[0].output
    stop = full[4]
    ending = model(weights["plain"], eos=(stop, 999))
    cut = serve(ending, prompts(), Load(1, 1, 12, seed=0)).requests[0]
    assert cut.output == full[: full.index(stop) + 1] and len(cut.margins) == len(cut.output)
    assert serve(ending, prompts(), Load(1, 1, 12, seed=0), EngineConfig(ignore_eos=True)).requests[0].output == full


def test_ties_go_to_the_lowest_token(weights):
    flat = replace(weights["plain"], head=weights["plain"].head.clone())
    flat.head[:] = flat.head[100]
    request = serve(model(flat), prompts(), Load(1, 1, 4, seed=0)).requests[0]
    assert request.output == [0] * 4 and request.margins == [0.0] * 4


def test_margins_are_top_1_minus_top_2(weights):
    runner, tokens = model(weights["plain"]), prompts()[2]
    request = serve(runner, [tokens], Load(1, 1, 1, seed=0)).requests[0]
    ordered = prompt_logits(runner, tokens)[-1].sort(descending=True)
    assert request.output == [ordered.indices[0].item()]
    assert request.margins == [(ordered.values[0] - ordered.values[1]).item()]


def test_a_page_brings_nothing_from_its_last_owner(weights):
    broken = replace(weights["plain"], embedding=weights["plain"].embedding.clone())
    broken.embedding[7] = torch.nan
    asked = [[7] * 40, [t if t != 7 else 9 for t in prompts()[2]]]
    fresh = serve(model(broken), asked[1:], Load(1, 1, 8, seed=0)).requests[0]
    small = EngineConfig(max_requests=1, max_length=64)
    after = serve(model(broken), asked, Load(1, 2, 8, seed=0), small).requests[1]
    assert (after.output, after.margins) == (fresh.output, fresh.margins)
    assert not any(margin != margin for margin in after.margins)


# --- the scheduler

def submit(engine, number, prompt, max_tokens):
    engine.submit(Request(number, number, list(prompt), len(prompt), max_tokens, engine.now))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=st.builds(
        EngineConfig,
        max_rows=st.integers(1, 40),
        max_requests=st.integers(1, 6),
        page=st.sampled_from([1, 4, 16]),
        prefill_chunk=st.integers(1, 20),
        max_length=st.just(30),
        ignore_eos=st.just(True),
    ),
    arrivals=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 22), st.integers(1, 8)), min_size=1, max_size=10),
)
def test_scheduler(weights, config, arrivals):
    """arrivals: (steps to wait, prompt length, tokens wanted)."""
    runner = model(weights["plain"])
    engine = Engine(runner, config)
    pages = list(engine._free)
    finished, wait, number, source = [], 0, 0, iter(arrivals)
    pending = next(source)
    while len(finished) < len(arrivals):
        while pending and wait >= pending[0]:
            submit(engine, number, range(pending[1]), pending[2])
            number, wait, pending = number + 1, 0, next(source, None)
        wait += 1
        finished += engine.step()
        assert engine.now < 2000
        held = [page for request in engine.running for page in request.pages]
        assert sorted(held + list(engine._free)) == pages  # none lost, none owned twice
        assert len(engine.running) <= config.max_requests
    assert sorted(engine._free) == pages and not engine.running and not engine.waiting

    rows = Counter()
    for step in engine.steps:
        kinds = [kind for _, _, kind in step.rows]
        assert 1 <= step.co_resident_rows <= config.max_rows
        assert kinds == sorted(kinds)  # decode before prefill
        assert all(1 <= count <= (config.prefill_chunk if kind == "prefill" else 1) for _, count, kind in step.rows)
        assert len({n for n, _, _ in step.rows}) == len(step.rows)
        for record in step.matmuls:
            assert (record.rows, record.decode_rows, record.kernel) == (
                step.co_resident_rows,
                kinds.count("decode"),
                "plain",
            )
        assert [record.layer for record in step.matmuls] == [0, 1]
        for n, count, kind in step.rows:
            rows[n, kind] += count
    for request in finished:
        _, length, wanted = arrivals[request.number]
        assert len(request.output) == len(request.margins) == wanted
        assert request.tokens[:length] == list(range(length))
        assert rows[request.number, "prefill"] == length and rows[request.number, "decode"] == wanted - 1


def test_idle_steps_only_pass_time(weights):
    engine = Engine(model(weights["plain"]))
    assert engine.step() == [] and engine.now == 1 and engine.steps == []


# --- what a user can get wrong

@pytest.mark.parametrize("load,count,message", [
    (Load(0, 4, 4, 0), 2, "concurrency is 0: at least 1"),
    (Load(-3, 4, 4, 0), 2, "concurrency is -3"),
    (Load(1, 0, 4, 0), 2, "requests is 0"),
    (Load(1, 4, 4, 0), 0, "prompts is 0"),
    (Load(1, 4, 0, 0), 2, "0 to generate does not fit"),
    (Load(1, 4, 512, 0), 2, "512 to generate does not fit"),
    (Load(2, 4, 4, 0, jitter=-1), 2, "jitter is -1"),
    (Load(2, 4, 4, -1), 2, "seed is -1"),
])
def test_bad_loads(weights, load, count, message):
    with pytest.raises(BadInput, match=message):
        serve(model(weights["plain"]), prompts()[:count], load)


@pytest.mark.parametrize("length", [0, 510])
def test_prompts_that_do_not_fit(weights, length):
    with pytest.raises(BadInput, match=f"a prompt of {length} tokens with 3 to generate does not fit"):
        serve(model(weights["plain"]), [[1] * length], Load(1, 1, 3, 0))


def test_the_longest_prompt_that_fits(weights):
    run = serve(model(weights["plain"]), [[1] * 61], Load(1, 1, 3, 0), EngineConfig(max_length=64, max_requests=1))
    assert len(run.requests[0].output) == 3


@pytest.mark.parametrize("name", ["max_rows", "max_requests", "page", "prefill_chunk", "max_length"])
def test_bad_configs(weights, name):
    with pytest.raises(BadInput, match=f"{name} is 0: at least 1"):
        Engine(model(weights["plain"]), EngineConfig(**{name: 0}))

"""What makes a sample cheap changes nothing that it says: answers read together, generators set back where they moved,
rows taken and overwritten all at once, controls made rarely.
"""

import contextlib
import itertools
import random
import types
import weakref

import numpy as np
import pandas as pd
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from batch_variance.common import BadInput
from batch_variance.engine import EngineConfig, Load, load_weights, serve
from batch_variance.engine.model import Model
from batch_variance.hooks import AXES, CallSiteProbe, Flat, Prefix, Rows, comparing, snapshots
from batch_variance.hooks.adapters import engine_sites
from batch_variance.hooks.axes import Replay, other_values
from batch_variance.hooks.batches import overwritten
from batch_variance.hooks.calls import Binder, signature_of
from batch_variance.hooks.checks import Finding
from batch_variance.hooks.layouts import misplacement, strided, take_along, taken_offsets
from batch_variance.hooks.overhead import measure
from batch_variance.hooks.probe import HABIT
from batch_variance.hooks.snapshots import KeptState, Questions, RandomState, Snapshot, bits
from batch_variance.kernels.nvfp4.policy import policy
from batch_variance.kernels.sets import NativeKernels


def site(kernel):
    return types.SimpleNamespace(kernel=kernel)


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: comparisons and reads, ``tolist`` apart since it passes by no operation."""

    names = ("equal", "_local_scalar_dense", "nonzero", "_unique2", "bincount")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, kinds, args=(), kwargs=None):
        if operation.overloadpacket.__name__ in self.names:
            self.found.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("axes", [("rerun", "solo"), AXES])
def test_a_sample_that_finds_nothing_waits_for_the_device_twice(monkeypatch, axes):
    """Once for what the call changed, once for all replays and both controls."""
    read, tolist = [], torch.Tensor.tolist
    engine = site(lambda x, y: (x * 2 + y, y - x))
    x, y = torch.randn(5, 8), torch.randn(5, 8)
    with CallSiteProbe((engine, "kernel"), {"x": 0, "y": 0}, axes=axes) as probe:
        monkeypatch.setattr(torch.Tensor, "tolist", lambda t: read.append(t.numel()) or tolist(t))
        with Waits() as waits:
            engine.kernel(x, y)
    assert waits.found == [] and len(read) == 2
    assert set(probe.verdict().values()) == {"invariant"} and not probe.refusals


def test_answers_come_back_under_their_numbers_whenever_they_are_read():
    questions = Questions()
    first = [questions.ask(torch.tensor(flags)) for flags in ([True, False], False, [], [False, False, True])]
    assert [questions.answer(n) for n in first] == [[True, False], [False], [], [False, False, True]]
    later = [questions.ask(torch.tensor(flags)) for flags in (True, [False])]
    assert [questions.answer(n) for n in reversed(later)] == [[False], [True]]
    assert questions.answer(first[0]) == [True, False]


def test_differences_are_those_of_each_replay_where_the_kernel_has_one_buffer():
    """Read after the last replay, when the buffer holds that one's values."""
    buffer = torch.zeros(4, 8)

    def kernel(x):
        torch.mul(x, 1.0 + 2.0**-20 * (len(x) == 1), out=buffer[: len(x)])
        return buffer[: len(x)]

    engine, x = site(kernel), torch.rand(4, 8) + 1  # in [1, 2): a ULP is 2**-23
    with CallSiteProbe((engine, "kernel"), {"x": 0}, axes=("rerun", "solo", "position")) as probe:
        assert torch.equal(engine.kernel(x), x)
    records = probe.records().set_index("axis")
    moved = ((x.double() * (1 + 2.0**-20)).float() - x).abs() * 2**23
    assert records["rows_differ"].to_dict() == {"rerun": 0, "solo": 4, "position": 0}
    assert records.loc["solo", "max_ulp"] == int(moved.max()) and records.loc["solo", "elements_differ"] == 32
    assert torch.equal(buffer, x)


def test_what_a_check_replays_does_not_reach_the_engines_result():
    class Doubled:
        def look(self, context):
            found = context.replay(lambda call: call.replace({"x": call.get("x") * 2}))
            return Finding(context.rows, 0, found.rows_differ == context.rows)

    buffer, x = torch.zeros(3), torch.rand(3, 4)

    def kernel(x):
        buffer.copy_(x.sum(1).expand(3))
        return buffer

    engine = site(kernel)
    with CallSiteProbe((engine, "kernel"), {"x": 0}, axes=("rerun",), checks=[Doubled()]) as probe:
        assert torch.equal(engine.kernel(x), x.sum(1))
    assert torch.equal(buffer, x.sum(1)) and probe.well_formed()["verdict"].tolist() == ["ok"]


def test_rows_too_large_to_keep_are_measured_at_once_to_the_same_counts(monkeypatch):
    joined, in_one = [], snapshots.in_one
    monkeypatch.setattr(snapshots, "in_one", lambda flags: joined.append(len(flags)) or in_one(flags))

    def session():
        joined.clear()
        generator = torch.Generator().manual_seed(2)
        engine = site(lambda x: (x * (1 + 2.0**-18 * len(x)), (x[:, 0] * len(x)).long()))
        with CallSiteProbe((engine, "kernel"), {"x": 0}, axes=AXES) as probe:
            engine.kernel(torch.randn(3, 16, generator=generator))
        return probe.records(), len(joined)

    kept, reads = session()
    monkeypatch.setattr(comparing, "AT_ONCE", 0)
    at_once, more = session()
    assert kept.equals(at_once) and kept["elements_differ"].sum() > 0
    assert reads == 2 and more > kept["replays"].sum()


def test_every_generator_is_set_back_exactly():
    def drawn():
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.rand(2).tolist()]

    def of(draw, before):
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        before()
        kept = RandomState()
        first = drawn()
        draw()
        kept.restore()
        again = drawn()
        return first, again

    nothing = lambda: None  # noqa: E731
    # One normal leaves its twin held back, which the raw words do not show.
    held = lambda: (np.random.randn(), random.gauss(0, 1))  # noqa: E731
    for before, draw in itertools.product((nothing, held), (nothing, held, lambda: np.random.rand(1000))):
        first, again = of(draw, before)
        assert first == again
    np.random.seed(3)
    for _ in range(3):  # from one state to the next while the words stay, reading it each time
        RandomState()
        np.random.randn()
        state = np.random.get_state()
        kept = RandomState()
        np.random.randn(), np.random.randn()
        kept.restore()
        assert all(np.array_equal(a, b) for a, b in zip(state, np.random.get_state()))


def test_controls_are_made_again_until_they_succeed_once_and_then_rarely():
    """The first three calls give a result that no value could change; the positive control first succeeds on the
    fourth sample.
    """
    engine = site(lambda x, constant: torch.ones(len(x)) if constant else x.sum(1))
    with CallSiteProbe((engine, "kernel"), {"x": 0}, axes=("solo",), controls_every=10) as probe:
        for call in range(15):
            engine.kernel(torch.randn(3, 4), call < 3)
    found = probe.records().query("axis == 'rerun'")
    assert found["rows_sensitive"].tolist() == [0, 0, 0, 3] + [0] * 6 + [3] + [0] * 4
    assert found["flip_seen"].notna().tolist() == [True, True, False, True] + [False] * 6 + [True] + [False] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("dim", [0, 1])
def test_overwriting_gives_each_row_what_it_gets_alone_and_spares_the_others(dtype, dim):
    old = (torch.randn(4, 4, 6) * 8).to(dtype)
    new = old.clone()
    flag = overwritten(new, Rows(dim), Replay((0, 1, 2, 3), (2,), overwritten=(0, 1, 3)), {})
    rows, before = new.movedim(dim, 0), old.movedim(dim, 0)
    assert bool(flag) and torch.equal(bits(rows[2]), bits(before[2]))
    for r in (0, 1, 3):
        expected = other_values(before[r][None])[0] if dtype.is_floating_point else before[(r + 1) % 4]
        assert torch.equal(bits(rows[r]), bits(expected)) and not torch.equal(bits(rows[r]), bits(before[r]))
    if dtype is torch.float32:
        expected = 4 * before[0].flatten().flip(0).roll(1)
        assert torch.equal(rows[0].flatten(), expected)


def test_overwriting_nothing_that_could_change_is_no_change():
    same = torch.full((3, 2), 5, dtype=torch.int64)
    assert not bool(overwritten(same, Rows(0), Replay((0, 1, 2), (0,), overwritten=(1, 2)), {}))
    offsets = {"cu": [0, 2, 2, 5]}
    flat = torch.arange(5.0).view(5, 1) + 1
    flag = overwritten(flat, Flat("cu"), Replay((0, 1, 2), (0,), overwritten=(2,)), offsets)
    assert bool(flag) and flat.flatten().tolist() == [1, 2, 12, 20, 16]  # 3 4 5 -> reversed, turned by one, times 4


@pytest.mark.parametrize("ends", [[0, 3, 3, 10, 12], [4, 5, 9], [0, 0]])
def test_prefix_sums_of_taken_rows(ends):
    value = torch.tensor(ends, dtype=torch.int32)
    count = len(ends) - 1
    for index in (tuple(range(count)), (count - 1,), tuple(reversed(range(count))), (0, 0, count - 1)):
        new = Prefix().take(value, index, {})
        assert new.tolist() == taken_offsets(ends, index) and new.dtype is torch.int32
        tokens = torch.arange(ends[-1] * 2).view(-1, 2)
        found = Flat("cu").take(tokens, index, {"cu": ends})
        assert torch.equal(found, torch.cat([tokens[ends[i] : ends[i + 1]] for i in index]))


def test_rows_are_taken_whatever_their_dtype():
    for dtype in (torch.float8_e5m2, torch.bool, torch.complex64, torch.uint16, torch.bfloat16, torch.float64):
        t = torch.arange(12).view(4, 3).to(dtype)
        for index in ([1], [2, 3], [3, 1, 1, 0]):
            assert torch.equal(bits(take_along(t, 0, index)), torch.stack([bits(t)[i] for i in index])), dtype


@pytest.mark.parametrize("skip", [0, 1])  # at an aligned address, and beside one
@pytest.mark.parametrize("cut", [lambda t: t, lambda t: t[:, ::2], lambda t: t.t(), lambda t: t[:0]])
def test_a_snapshot_holds_what_was_there_and_gives_it_anew_after_a_change(skip, cut):
    memory = strided((6 * 8 + skip,), (1,), torch.float32, torch.device("cpu"))
    memory.copy_(torch.arange(len(memory)))
    x = cut(memory[skip:].view(6, 8))
    before, place = x.clone(), misplacement(x)
    snapshot = Snapshot(Binder(None).bind((x,), {}))
    assert snapshot.note_changes() == []
    x += 1
    assert snapshot.note_changes() == (["0"] if x.numel() else [])
    first = snapshot.fresh_call().args[0]
    assert torch.equal(first, before) and first.stride() == x.stride() and misplacement(first) == place
    first += 5  # as a replay does that changes its argument
    assert torch.equal(snapshot.fresh_call().args[0], before) and torch.equal(x, before + 1)


@pytest.mark.parametrize("controls", ["now", "later"])
def test_a_result_without_plain_memory_is_kept_from_nobody(controls):
    engine = site(lambda x: x.to_sparse())
    x = torch.eye(3)
    with CallSiteProbe((engine, "kernel"), {"x": 0}, controls=controls) as probe:
        assert torch.equal(engine.kernel(x).to_dense(), x)
    assert probe.sampled == 1 and "variant" not in probe.verdict().values()


def test_state_is_put_back_by_answers_asked_before_unless_told_that_they_no_longer_hold():
    x, y = torch.zeros(3), torch.ones(2)
    kept, questions = KeptState([x, {"y": y}]), Questions()
    x += 1
    kept.ask(questions)
    kept.restore()
    assert x.tolist() == [0, 0, 0] and y.tolist() == [1, 1]
    kept.ask(questions)
    y += 1
    kept.forget()
    kept.restore()
    assert y.tolist() == [1, 1]


def three(a, b, *, c=5):
    """Named parameters only, bound without inspect."""


def rest(a, *more, **options):
    """Names of the caller's."""


@pytest.mark.parametrize(
    "function, args, kwargs",
    [(three, (1, 2), {}), (three, (1,), {"c": 3, "b": 2}), (three, (), {"b": 2, "a": 1}), (rest, (1, 2, 3), {"d": 4})],
)
def test_arguments_are_named_as_inspect_names_them(function, args, kwargs):
    call = Binder(signature_of(function)).bind(args, kwargs)
    expected = signature_of(function).bind(*args, **kwargs)
    assert list(call.values.items()) == list(expected.arguments.items())
    assert signature_of(function).bind(*call.args, **call.kwargs) == expected


@pytest.mark.parametrize(
    "args, kwargs", [((), {}), ((1,), {}), ((1, 2, 3), {}), ((1, 2), {"a": 1}), ((1, 2), {"d": 1}), ((1,), {"c": 1})]
)
def test_wrong_arguments_are_type_errors(args, kwargs):
    with pytest.raises(TypeError):
        Binder(signature_of(three)).bind(args, kwargs)


def test_overhead_says_both_what_the_clock_and_what_the_probe_counted():
    from batch_variance.engine.checkpoint import Architecture
    from batch_variance.engine.model import FFN, Layer, Weights

    torch.manual_seed(0)
    shape = Architecture(32, 64, 1, 2, 1, 16, 50, 10000.0, 1e-5, True, (49,))
    weights = lambda *size: torch.randn(size) / 6  # noqa: E731
    layer = Layer(
        torch.ones(32), weights(64, 32), weights(32, 32), torch.ones(32), FFN(weights(128, 32), weights(32, 64))
    )
    embedding = weights(50, 32)
    held = Weights(shape, embedding, [layer], torch.ones(32), embedding, "toy")
    model = Model(held, NativeKernels(), policy("default"))
    table = measure(model, [[1, 2, 3], [4, 5]], ("rms_norm",), every=2, rounds=1, tokens=3)
    assert table["site"].tolist() == ["rms_norm"] * 4
    limited = table["sampling"].str.contains("at most")
    assert (table["sampled"] + table["passed_over"] > 0).all() and not table.loc[~limited, "passed_over"].any()
    assert (table["later_ms_per_sample"] > 0).tolist() == table["sampling"].str.contains("later").tolist()
    for row in table.itertuples():
        sampling = row.ms_per_sample / 1000 * row.sampled
        spent = sampling + (row.calls - row.sampled) * row.us_per_call_not_sampled / 1e6
        assert 0 < row.us_per_call_not_sampled < 100
        assert row.share == row.share_low == row.share_high == pytest.approx(spent / (row.probed_s - spent))
        assert row.ratio == pytest.approx(row.probed_s / row.plain_s) and spent < row.probed_s
        assert row.samples_per_s == pytest.approx(row.sampled / (row.probed_s - spent))
        assert sampling > 0 or not row.sampled


# --- Answers read late ---


def steady(engine, batch_args, samples=8, **options):
    """A probe in place whose controls are made and whose arguments have been seen only to be read."""
    probe = CallSiteProbe((engine, "kernel"), batch_args, axes=("rerun", "solo"), **options)
    probe.__enter__()
    for _ in range(samples):
        engine.kernel(torch.randn(4, 8))
    return probe


def test_a_steady_sample_reads_no_answer_until_the_next(monkeypatch):
    engine = site(lambda x: x * 2)
    probe = steady(engine, {"x": 0})
    probe.records()
    read, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: read.append(t.numel()) or tolist(t))
    with Waits() as waits:
        engine.kernel(torch.randn(4, 8))
        assert read == [] and len(probe._records) == 16  # 8 samples of two axes: the ninth is still out
        engine.kernel(torch.randn(4, 8))
    assert waits.found == [] and len(read) == 1 and len(probe._records) == 18
    assert len(probe.records()) == 20 and probe.verdict() == {"rerun": "invariant", "solo": "invariant"}
    probe.__exit__()


def test_what_is_read_late_is_what_is_read_at_once():
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(4, 8, generator=generator) for _ in range(12)]
    kernel = lambda x: x * (1.0 + 2.0**-20 * (len(x) == 1))  # noqa: E731
    found = []
    for checks in ([], [lambda context: Finding(1, 0, True)]):  # with a check nothing is read late
        engine = site(kernel)
        with CallSiteProbe((engine, "kernel"), {"x": 0}, axes=("rerun", "solo"), checks=checks) as probe:
            results = [engine.kernel(x) for x in inputs]
        assert all(torch.equal(y, x) for x, y in zip(inputs, results))
        found.append(probe.records())
    pd.testing.assert_frame_equal(*found)
    assert (found[0].loc[found[0].axis == "solo", "rows_differ"] == 4).all()


def test_the_last_sample_is_recorded_when_the_probe_is_taken_away(tmp_path):
    engine = site(lambda x: x * 2)
    probe = steady(engine, {"x": 0}, log=tmp_path / "calls.parquet")
    assert len(probe._records) < 16
    probe.__exit__()
    assert len(probe._records) == 16 and len(pd.read_parquet(tmp_path / "calls.parquet")) == 16


def test_a_result_is_put_back_though_no_answer_is_read():
    buffer = torch.zeros(4, 8)

    def kernel(x):
        return torch.mul(x, 2, out=buffer[: len(x)])

    engine = site(kernel)
    probe = steady(engine, {"x": 0})
    x = torch.randn(4, 8)
    result = engine.kernel(x)
    assert probe._unread and torch.equal(result, x * 2)  # the replays wrote another batch into the same buffer
    probe.__exit__()


def expanded(x):
    return x.sum(1, keepdim=True).expand(len(x), 8)


def in_inference_mode(x):
    with torch.inference_mode():
        return x * 2


@pytest.mark.parametrize("kernel", [lambda x: x * 2, lambda x: x, expanded, in_inference_mode])
def test_a_result_of_any_kind_reaches_the_engine_though_it_is_put_back_unasked(kernel):
    engine = site(kernel)
    probe = steady(engine, {"x": 0})
    for x in (torch.randn(4, 8), torch.randn(4, 1).expand(4, 8)):
        expected = bits(kernel(x)).clone()
        result = engine.kernel(x)
        assert probe._unread and torch.equal(bits(result), expected) and result.stride() == kernel(x).stride()
        assert result.is_inference() or result._version == 0
    probe.__exit__()
    assert probe.refusals == {} and not probe.records().rows_differ.any()


def test_what_autograd_has_saved_may_be_the_result():
    weight = torch.nn.Parameter(torch.ones(8))
    products = []

    def kernel(x):
        products.append(x * weight)  # saves x
        return x

    engine = site(kernel)
    probe = steady(engine, {"x": 0})
    products.clear()
    engine.kernel(torch.full((4, 8), 3.0))
    products[0].sum().backward()
    probe.__exit__()
    assert torch.equal(weight.grad, torch.full((8,), 12.0))


def test_a_sample_whose_answers_are_out_holds_none_of_the_engines_tensors():
    engine = site(lambda x: x * 2)
    probe = steady(engine, {"x": 0})
    x = torch.randn(4, 8)
    gone = weakref.ref(x)
    result = engine.kernel(x)
    gone_too = weakref.ref(result)
    del x, result
    assert probe._unread and gone() is None and gone_too() is None
    probe.__exit__()
    assert (probe.records().rows_checked == 4).all()


def test_a_call_that_begins_to_change_its_arguments_is_refused_and_then_followed():
    change = []

    def kernel(x):
        y = x * 2
        if change:
            x += 1
        return y

    engine = site(kernel)
    probe = steady(engine, {"x": 0})
    change.append(True)
    x = torch.randn(4, 8)
    expected = x * 2
    assert torch.equal(engine.kernel(x), expected)
    assert torch.equal(x * 2 - expected, torch.full((4, 8), 2.0)) or torch.allclose(x * 2 - expected, torch.tensor(2.0))
    probe.records()
    assert any("changed an argument" in reason for reason in probe.refusals)
    before = len(probe._records)
    engine.kernel(torch.randn(4, 8))
    new = probe.records().iloc[before:]
    assert (new.rows_checked > 0).all() and not new.rows_differ.any()
    probe.__exit__()


# --- Controls made later ---


def later(engine, batch_args, **options):
    return CallSiteProbe((engine, "kernel"), batch_args, controls="later", **options)


def test_at_the_call_nothing_is_replayed_or_read_and_few_operations_are_made(monkeypatch):
    ran = []
    engine = site(lambda x, lengths, weight: ran.append(len(x)) or x @ weight)
    x, lengths, weight = torch.randn(4, 8), torch.arange(4), torch.nn.Parameter(torch.randn(8, 8))
    with later(engine, {"x": 0, "lengths": 0}, axes=AXES) as probe:
        monkeypatch.setattr(torch.Tensor, "tolist", lambda t: pytest.fail("a value was read"))
        with torch.no_grad(), Operations() as operations:
            engine.kernel(x, lengths, weight)
        assert ran == [4] and probe.records().empty and "1 samples wait" in probe.explain()["reason"][0]
        # Each argument before the call and after it, and the result; the weight is not copied.
        assert sorted(operations.found) == ["aten.clone"] * 5 + ["aten.mm"]
        monkeypatch.undo()
        delayed = probe.seconds
        assert probe.run_controls() == 1 and probe.run_controls() == 0
        assert len(ran) > 10 and probe.seconds == delayed and probe.control_seconds > 0
    assert len(probe.records()) == len(AXES) and probe.verdict()["contents"] == "invariant"


class Operations(TorchDispatchMode):
    """Names of the operations made."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, kinds, args=(), kwargs=None):
        self.found.append(str(operation.overloadpacket))
        return operation(*args, **(kwargs or {}))


def test_replays_see_what_the_call_saw_though_the_engine_has_written_over_all_of_it():
    """A cache that the engine goes on writing, arguments in one buffer, a list, a random number, a buffer of state."""
    state = torch.zeros(4)

    def kernel(q, k, cache, sizes, out):
        state.add_(1)
        out += q * k + cache[: len(q)] * state[0] + torch.rand(()) * sizes[-1]
        return out[:, :4]

    def load(probe_of):
        torch.manual_seed(3)
        engine, results = site(kernel), []
        state.zero_()
        qk, cache, sizes, out = torch.randn(6, 16), torch.randn(32, 8), [2.0], torch.zeros(6, 8)
        with probe_of(engine) as probe:
            for _ in range(6):
                results.append(engine.kernel(qk[:, :8], qk[:, 8:], cache, sizes, out).clone())
                qk.mul_(-1.5), cache.add_(1), sizes.append(sizes[-1] + 1)
                cache.numpy()[3] = 7.0  # leaves no version
        return [*results, qk, cache, torch.tensor(sizes), out, state.clone(), torch.rand(2)], probe

    options = dict(axes=("rerun", "contents", "solo", "position"), whole=["cache"], state=[state], every=2)
    rows = {"q": 0, "k": 0, "out": 0}
    plain, _ = load(lambda engine: contextlib.nullcontext())
    kept, probe = load(lambda engine: later(engine, rows, **options))
    at_once, other = load(lambda engine: CallSiteProbe((engine, "kernel"), rows, **options))
    for a, b, c in zip(plain, kept, at_once):
        assert torch.equal(bits(a), bits(b)) and torch.equal(bits(a), bits(c))
    assert probe.verdict()["rerun"] == "invariant" and not probe.refusals
    pd.testing.assert_frame_equal(probe.records(), other.records())


def part_of_it(buffer):
    return lambda x: torch.mul(x, 2, out=buffer[: len(x)])


def all_of_it(buffer):
    return lambda x: buffer.copy_(x.sum().expand(8, 8))[: len(x)]


@pytest.mark.parametrize("kernel_of", [part_of_it, all_of_it])
def test_results_in_the_kernels_own_buffer_are_as_the_engine_left_them(kernel_of):
    """Also what a call that was not sampled has put there, beyond the rows of the one that was."""
    buffer = torch.zeros(8, 8)
    engine = site(kernel_of(buffer))
    with later(engine, {"x": 0}, axes=("rerun", "solo", "composition"), every=2) as probe:
        engine.kernel(torch.randn(4, 8))
        x = torch.randn(8, 8)
        result = engine.kernel(x)
        expected = buffer.clone()
        assert probe.run_controls() == 1
        assert torch.equal(buffer, expected) and torch.equal(result, expected)
    assert (probe.records()["rows_checked"] > 0).all()


def test_ground_that_has_moved_shows_in_the_rerun_and_is_no_variance_of_another_axis():
    """The engine loads weights anew, once through a version and once past it, between the calls and their controls."""
    for overwrite in (lambda w: w.copy_(torch.randn(8, 8)), lambda w: w.numpy().__setitem__(0, 5.0)):
        weight = torch.randn(8, 8)
        engine = site(lambda x, weight: (x[:, :, None] * weight).sum(1))
        with later(engine, {"x": 0}, axes=AXES, constant=["weight"]) as probe:
            engine.kernel(torch.randn(4, 8), weight)
            probe.run_controls()
            assert set(probe.verdict().values()) == {"invariant"}
            engine.kernel(torch.randn(4, 8), weight)
            overwrite(weight)
            loaded = weight.clone()
        found = probe.verdict()
        assert found.pop("rerun") == "variant" and set(found.values()) == {"inconclusive"}
        assert "negative control failed" in probe.explain()["reason"].iloc[-1] and torch.equal(weight, loaded)


def test_ground_that_has_moved_under_other_rows_alone_is_refused():
    """A value for each place in the batch: where another row's has changed, it is no variance by position."""
    places = torch.ones(4)
    engine = site(lambda x, places: x * places[: len(x), None])
    with later(engine, {"x": 0}, axes=("rerun", "position"), constant=["places"], rows=[0]) as probe:
        engine.kernel(torch.randn(4, 8), places)
        places[3] = 2.0
    assert set(probe.verdict().values()) == {"inconclusive"} and not probe.records()["rows_differ"].any()
    assert "its ground has moved" in probe.explain()["reason"][0]


@pytest.mark.parametrize("controls", ["now", "later"])
def test_a_call_that_cannot_be_repeated_is_not_varied(controls):
    ran = []

    def kernel(x):
        ran.append(len(x))
        if ran.count(4) > 1:
            raise RuntimeError("served once")
        return x * (1.0 + len(x))

    engine = site(kernel)
    with CallSiteProbe((engine, "kernel"), {"x": 0}, axes=("rerun", "solo"), controls=controls) as probe:
        engine.kernel(torch.randn(4, 8))
    assert set(probe.verdict().values()) == {"inconclusive"} and not probe.records()["rows_checked"].any()
    assert probe.records()["note"].tolist() == [
        "the replay raised RuntimeError: served once",
        "the identical call could not be repeated",
    ]


def test_a_buffer_outside_the_state_moves_the_ground_and_one_inside_does_not():
    for declared in (False, True):
        scale = torch.ones(())
        engine = site(lambda x: x * scale)
        with later(engine, {"x": 0}, state=[scale] if declared else []) as probe:
            engine.kernel(torch.randn(4, 8))
            scale.fill_(3.0)
        assert probe.verdict() == (
            dict.fromkeys(("rerun", "contents", "solo", "position"), "invariant")
            if declared
            else {"rerun": "variant", "contents": "inconclusive", "solo": "inconclusive", "position": "inconclusive"}
        )
        assert scale.item() == 3.0


def test_a_sample_that_there_is_no_room_for_is_passed_over_and_never_waited_for():
    engine = site(lambda x: x * 2)
    x = torch.randn(4, 64)  # 1 KiB; a sample keeps it before the call and after it, and the result
    with later(engine, {"x": 0}, max_bytes=10 * 1024) as probe:
        for _ in range(5):
            assert torch.equal(engine.kernel(x), x * 2)
        assert probe.sampled == 3 and probe.passed_over == 2 and not probe.refusals
        reason = probe.explain()["reason"]
        assert reason.str.contains("2 calls passed over: the copies kept").all()
        assert reason.str.contains("3 samples wait").all()
        probe.run_controls()
        engine.kernel(x)
        assert probe.sampled == 4 and probe.passed_over == 2
    assert probe.records()["call"].unique().tolist() == [0, 1, 2, 5] and set(probe.verdict().values()) == {"invariant"}
    with later(engine, {"x": 0}, max_bytes=2047) as probe:
        engine.kernel(x)
    assert probe.sampled == probe.passed_over == 0 and "argument 'x' alone spans" in " ".join(probe.refusals)


def test_results_in_more_memory_than_may_be_kept_leave_the_controls_unmade():
    arena = torch.zeros(4096)

    def kernel(x):
        arena[: x.numel()] = x.flatten()
        return arena[: x.numel()].view(x.shape)

    engine = site(kernel)
    with later(engine, {"x": 0}, max_bytes=8192) as probe:
        engine.kernel(torch.ones(4, 8))
        arena[-1] = 5.0
    assert "results lie in 16,384 bytes" in " ".join(probe.refusals) and arena[-1] == 5.0
    assert set(probe.verdict().values()) == {"inconclusive"} and (probe.records()["rows_checked"] == 0).all()


def test_controls_can_be_made_in_the_time_that_there_is():
    engine = site(lambda x: x * 2)
    with later(engine, {"x": 0}) as probe:
        for _ in range(3):
            engine.kernel(torch.randn(4, 8))
        assert probe.run_controls(seconds=1e-9) == 0 and probe.run_controls(seconds=60) == 3
    assert len(probe.frame()) == 12


def test_replays_run_under_the_modes_that_the_call_ran_under():
    engine = site(lambda x, weight: (x @ weight, torch.full((len(x),), float(torch.is_grad_enabled()))))
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    with later(engine, {"x": 0}, constant=["weight"], axes=("rerun", "position")) as probe:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            result = engine.kernel(x, weight)
        with torch.inference_mode():
            engine.kernel(x, weight)
        with torch.autocast("cpu", torch.bfloat16):
            probe.run_controls()
    assert result[0].dtype is torch.bfloat16 and probe.verdict()["rerun"] == "invariant" and not probe.refusals
    assert (probe.records()["note"] == "").all()


def test_a_sample_that_waits_holds_none_of_the_engines_tensors():
    engine = site(lambda x: x * 2)
    with later(engine, {"x": 0}) as probe:
        x = torch.randn(4, 8)
        result = engine.kernel(x)
        gone = [weakref.ref(t) for t in (x, result)]
        memories = [StorageWeakRef(t.untyped_storage()) for t in (x, result)]
        del x, result
        assert all(ref() is None for ref in gone) and all(ref.expired() for ref in memories)
    assert set(probe.verdict().values()) == {"invariant"}


@pytest.mark.parametrize("skip", [0, 1, 8])
def test_replays_made_later_find_arguments_at_the_same_place_in_a_line_of_memory(skip):
    places = []
    engine = site(lambda x: places.append(misplacement(x)) or x * 2)
    x = strided((4 * 8 + skip,), (1,), torch.float32, torch.device("cpu")).normal_()[skip:].view(4, 8)
    with later(engine, {"x": 0}, axes=("rerun",)) as probe:
        engine.kernel(x)
    assert places[0] == places[-1] == 4 * skip and probe.verdict() == {"rerun": "invariant"}


@pytest.mark.parametrize("name", ["attend", "linear", "rms_norm"])
def test_an_engine_is_told_the_same_whenever_its_controls_are_made(tiny_folder, name):
    model = Model(load_weights(tiny_folder, torch.device("cpu")), NativeKernels(), policy("default"))
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 12, 9)]

    def tokens():
        run = serve(model, prompts, Load(3, 4, 5, 0, 0), EngineConfig(max_requests=3, max_length=32, ignore_eos=True))
        return [request.output for request in run.requests]

    plain, records = tokens(), []
    for controls in ("now", "later"):
        with engine_sites(model.kernels, every=5, axes=AXES, rows=2, controls=controls)[name] as probe:
            assert tokens() == plain and probe.records().empty == (controls == "later")
            probe.run_controls()  # after which habits are known
            assert probe.sampled >= HABIT and tokens() == plain
        assert not probe.refusals and probe.verdict()["rerun"] == "invariant"
        records.append(probe.records())
    pd.testing.assert_frame_equal(*records)


def in_the_habit(engine, batch_args, samples=HABIT, **options):
    """A probe in place whose controls have shown that the call only reads and draws nothing."""
    probe = later(engine, batch_args, **options)
    probe.__enter__()
    for _ in range(samples):
        engine.kernel(torch.randn(4, 8))
    probe.run_controls()
    return probe


def test_in_the_habit_only_what_the_call_read_and_gave_is_kept(monkeypatch):
    engine = site(lambda x: x * 2)
    for samples, copies in ((HABIT - 1, 3), (HABIT, 2)):
        probe = in_the_habit(engine, {"x": 0}, samples)
        x = torch.randn(4, 8)
        if samples == HABIT:
            monkeypatch.setattr("batch_variance.hooks.probe.RandomState", lambda: pytest.fail("a state was kept"))
        with Operations() as operations:
            engine.kernel(x)
        assert sorted(operations.found) == ["aten.clone"] * copies + ["aten.mul"]
        monkeypatch.undo()
        probe.__exit__()
        assert set(probe.verdict().values()) == {"invariant"} and not probe.refusals


@pytest.mark.parametrize(
    "skip", [0, 1]
)  # at an aligned address, and beside one, where replays have copies of their own
@pytest.mark.parametrize("batch_args", [{"x": 0}, {"x": 0, "memory": 0}])
def test_a_call_that_falls_into_changing_an_argument_is_refused_and_then_followed(skip, batch_args):
    def kernel(x, memory):
        y = x * 2 + memory
        if changing:
            memory += 1
        return y

    changing, engine = [], site(kernel)
    memory = strided((4 * 8 + skip,), (1,), torch.float32, torch.device("cpu")).zero_()[skip:].view(4, 8)
    with later(engine, batch_args, axes=("rerun", "solo")) as probe:
        for _ in range(HABIT):
            engine.kernel(torch.randn(4, 8), memory[:4])
        probe.run_controls()
        changing.append(True)
        for _ in range(2):
            engine.kernel(torch.randn(4, 8), memory[:4])
        assert memory.eq(2).all()
        probe.run_controls()
        assert memory.eq(2).all() and sum(probe.refusals.values()) == 2
        assert all("changed an argument" in reason for reason in probe.refusals)
        seen = len(probe.records())
        engine.kernel(torch.randn(4, 8), memory[:4])
    found = probe.records()[seen:]
    assert (found["rows_checked"] > 0).all() and not found.loc[found["axis"] == "rerun", "rows_differ"].any()
    assert sum(probe.refusals.values()) == 2 and memory.eq(3).all()


@pytest.mark.parametrize("draw", [random.random, random.gauss, np.random.rand, lambda *_: torch.rand(()).item()])
def test_a_call_that_falls_into_drawing_random_numbers_is_refused_and_then_followed(draw):
    given = (0, 1) if draw == random.gauss else ()
    drawing, engine = [], site(lambda x: x * (2.0 + draw(*given) if drawing else 2.0))
    probe = in_the_habit(engine, {"x": 0}, axes=("rerun", "solo"))
    drawing.append(True)
    for _ in range(2):
        engine.kernel(torch.randn(4, 8))
    state, words = (random.getstate(), torch.get_rng_state()), np.random.get_state()[1].copy()
    probe.run_controls()
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
    assert np.array_equal(np.random.get_state()[1], words)
    assert sum(probe.refusals.values()) == 2 and all("drew random numbers" in reason for reason in probe.refusals)
    seen = len(probe.records())
    engine.kernel(torch.randn(4, 8))
    engine.kernel(torch.randn(4, 8))
    probe.__exit__()
    found = probe.records()[seen:]
    assert (found["rows_checked"] > 0).all() and not found["rows_differ"].any() and len(found) == 4
    drawing.clear()
    probe = in_the_habit(engine, {"x": 0}, axes=("rerun", "solo"))
    drawing.append(True)
    engine.kernel(torch.randn(4, 8))
    probe.run_controls()
    drawing.clear()
    for _ in range(HABIT):
        engine.kernel(torch.randn(4, 8))
    probe.run_controls()
    with pytest.MonkeyPatch.context() as patch:  # the habit is back
        patch.setattr("batch_variance.hooks.probe.RandomState", lambda: pytest.fail("a state was kept"))
        engine.kernel(torch.randn(4, 8))
    probe.__exit__()
    assert sum(probe.refusals.values()) == 1


def test_a_normal_held_back_is_a_draw_though_no_word_moves():
    np.random.seed(0)
    drawing, engine = [], site(lambda x: x * (np.random.randn() if drawing else 2.0))
    probe = in_the_habit(engine, {"x": 0}, axes=("rerun",))
    drawing.append(True)
    np.random.randn()  # the second of the pair is what the call then draws
    engine.kernel(torch.randn(4, 8))
    probe.run_controls()
    assert list(probe.refusals) and "drew random numbers" in next(iter(probe.refusals))
    probe.__exit__()


@pytest.mark.parametrize("controls", ["now", "later"])
def test_a_replay_that_reaches_its_own_call_site_is_neither_counted_nor_sampled(controls):
    ran = []
    engine = site(
        lambda x: ran.append(len(x)) or (torch.cat([engine.kernel(row[None]) for row in x]) if len(x) > 1 else x)
    )
    with CallSiteProbe((engine, "kernel"), {"x": 0}, axes=("rerun", "solo"), every=3, controls=controls) as probe:
        engine.kernel(torch.randn(4, 8))
        probe.run_controls()
        assert probe.calls == 5 and probe.sampled == 2  # the whole, and its third row
        assert len(ran) > 10
    assert probe.verdict() == {"rerun": "invariant", "solo": "invariant"}


def test_controls_are_now_or_later():
    with pytest.raises(BadInput, match="controls = 'never': give 'now' or 'later'"):
        CallSiteProbe((site(lambda x: x), "kernel"), {"x": 0}, controls="never")


# --- A share of the time ---


def test_a_share_is_kept_and_what_it_costs_is_counted(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("batch_variance.hooks.probe.time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    engine = site(lambda x: x * 2)
    with CallSiteProbe((engine, "kernel"), {"x": 0}, axes=("rerun", "solo"), rows=1, max_share=0.02) as probe:
        study = probe._study
        monkeypatch.setattr(probe, "_study", lambda *given: (clock.__setitem__(0, clock[0] + 0.002), study(*given)))
        for _ in range(200):
            clock[0] += 0.010
            engine.kernel(torch.ones(2, 4))
    assert probe.sampled + probe.passed_over == probe.calls == 200
    others = clock[0] - probe.seconds
    assert probe.seconds <= 0.02 * others
    assert 15 < probe.sampled < 25  # and it does use what it may: one call in ten
    told = f"({probe.passed_over} calls passed over: the probe takes no more than 2.0% of the time)"
    assert probe.explain()["reason"].str.endswith(told).all()


def test_a_first_sample_that_took_long_does_not_keep_a_share_from_being_used(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("batch_variance.hooks.probe.time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    engine = site(lambda x: x * 2)
    probe = CallSiteProbe((engine, "kernel"), {"x": 0}, axes=("rerun", "solo"), rows=1, max_share=0.02)
    costs, study = itertools.chain([5.0], itertools.repeat(0.002)), probe._study  # the first sample compiles
    monkeypatch.setattr(probe, "_study", lambda *given: (clock.__setitem__(0, clock[0] + next(costs)), study(*given)))
    sampled = []
    for _ in range(2):
        with probe:
            for _ in range(200):
                clock[0] += 0.010
                engine.kernel(torch.ones(2, 4))
        sampled.append(probe.sampled - sum(sampled))
    assert sampled[0] == 1 and 15 < sampled[1] < 25


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_a_share_that_cannot_be_is_refused(share):
    with pytest.raises(BadInput, match=f"max_share = {share}"):
        CallSiteProbe((site(lambda x: x), "kernel"), {"x": 0}, max_share=share)

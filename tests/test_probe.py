"""CallSiteProbe: the engine notices nothing, every kind of argument is cut rightly, and what cannot be judged says
why.
"""

import dataclasses
import functools
import sys
import types
from typing import NamedTuple

import pytest
import torch

from batch_variance.common import BadInput
from batch_variance.hooks import CallSiteProbe, Flat, Prefix, Rows
from batch_variance.hooks.layouts import misplacement, take_along
from batch_variance.hooks.snapshots import bits

ALL = ("rerun", "contents", "composition", "solo", "position", "padding")


@pytest.fixture(params=["now", "later"], autouse=True)
def controls(request, monkeypatch):
    """Each test runs with controls made now and made later."""
    monkeypatch.setitem(globals(), "CallSiteProbe", functools.partial(CallSiteProbe, controls=request.param))
    return request.param


@pytest.fixture
def site():
    """A module that can be named by dotted path, fresh for each test."""
    module = types.ModuleType("probe_toys")
    sys.modules["probe_toys"] = module
    yield module
    del sys.modules["probe_toys"]


def pair_sum(x):
    """Row sums by explicit halving: bits independent of the batch."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def batch_scaled(x):
    return pair_sum(x) * (1.0 + len(x) * 2**-10)


# -- the engine notices nothing
# ------------------------------------------------------------------------------------------


def test_what_others_put_at_the_call_site_stays_there():
    engine = types.SimpleNamespace(kernel=lambda x: x + 1)
    x = torch.randn(3, 4)
    first, second = (CallSiteProbe((engine, "kernel"), {"x": 0}) for _ in range(2))
    patched = engine.kernel = lambda x: x + 2  # between making the probes and putting them in place
    with first:
        assert torch.equal(engine.kernel(x), x + 2) and first.calls == 1
    assert engine.kernel is patched
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # the one that is wrapped goes first
    assert torch.equal(engine.kernel(x), x + 2) and (first.sampled, second.sampled) == (1, 1)
    second.__exit__(None, None, None)
    assert torch.equal(engine.kernel(x), x + 2) and (first.sampled, second.sampled) == (1, 1)
    with CallSiteProbe((engine, "kernel"), {"x": 0}):
        renewed = engine.kernel = lambda x: x + 3  # by the engine itself, meanwhile
    assert engine.kernel is renewed


def test_a_probe_within_another_ones_call_sees_the_engines_calls_alone():
    engine = types.SimpleNamespace(inner=lambda x: pair_sum(x))
    engine.outer = lambda x: engine.inner(x) + engine.inner(2 * x)
    outer = CallSiteProbe((engine, "outer"), {"x": 0}, axes=ALL)
    inner = CallSiteProbe((engine, "inner"), {"x": 0}, axes=ALL)
    same = CallSiteProbe((engine, "inner"), {"x": 0}, axes=ALL)
    with outer, inner, same:
        for rows in (2, 5, 3):
            engine.outer(torch.randn(rows, 16))
    assert outer.calls == 3 and inner.calls == same.calls == 6
    assert inner.frame()["call"].nunique() == same.frame()["call"].nunique() == 6
    assert not (outer.refusals or inner.refusals or same.refusals)
    assert {*outer.verdict().values(), *inner.verdict().values(), *same.verdict().values()} == {"invariant"}


def test_outputs_buffers_random_state_and_aliases_are_as_without_the_probe(site):
    class Engine:
        def __init__(self):
            torch.manual_seed(5)
            self.cache = torch.zeros(4, 16)
            self.workspace = torch.zeros(8)
            self.seen = []

        def step(self, x, out, positions, sizes):
            out.copy_(x * 2 + torch.rand(()))  # in place, and draws a random number
            positions += 1
            sizes.append(len(x))  # a list changed in place
            self.workspace[: len(x)] = pair_sum(x)
            return self.workspace[: len(x)]  # a buffer of its own, written again by each call

    def run(probed: bool):
        engine = Engine()
        site.step = engine.step
        x, out, positions, sizes = torch.randn(4, 16), torch.empty(4, 16), torch.zeros(4, dtype=torch.int64), []
        results = []
        for _ in range(3):
            results.append(site.step(x, out, positions, sizes).clone())
        if probed:
            with CallSiteProbe(
                "probe_toys:step", {"x": 0, "out": 0, "positions": 0}, axes=ALL, state=[engine.workspace]
            ) as probe:
                results.append(site.step(x, out, positions, sizes))
            assert probe.sampled == 1 and not probe.refusals, probe.refusals
            assert set(probe.frame()["rows_checked"] > 0) == {True}
        else:
            results.append(site.step(x, out, positions, sizes))
        return torch.cat(results), out, positions, sizes, engine.workspace, torch.rand(3)

    for plain, probed in zip(run(False), run(True)):
        assert torch.equal(plain, probed) if isinstance(plain, torch.Tensor) else plain == probed


def test_a_result_in_the_kernels_own_buffer_survives_the_replays(site):
    buffer = torch.zeros(8)

    def kernel(x):
        buffer[: len(x)] = pair_sum(x)
        return buffer[: len(x)]

    site.kernel = kernel
    x = torch.randn(6, 32)
    with CallSiteProbe("probe_toys:kernel", {"x": 0}, axes=ALL):
        assert torch.equal(site.kernel(x), pair_sum(x))
    assert torch.equal(buffer[:6], pair_sum(x))


def test_module_buffers_and_cuda_free_streams_are_put_back():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.calls += 1
            return pair_sum(x) + self.calls

    module = Counts()
    with CallSiteProbe(module, {"x": 0}) as probe:
        assert torch.equal(module(torch.ones(2, 4)), torch.full((2,), 5.0))
        assert torch.equal(module(torch.ones(2, 4)), torch.full((2,), 6.0))
    assert int(module.calls) == 2 and "forward" not in vars(module)
    # The buffer is set back before each replay, so that counting calls is no variance.
    assert probe.verdict()["rerun"] == "invariant"


def test_a_call_that_raises_still_raises_and_the_name_is_put_back(site):
    def kernel(x):
        raise KeyError("engine's own")

    site.kernel = kernel
    with pytest.raises(KeyError, match="engine's own"):
        with CallSiteProbe("probe_toys:kernel", {"x": 0}):
            site.kernel(torch.ones(2, 2))
    assert site.kernel is kernel
    with CallSiteProbe("probe_toys:kernel", {"x": 0}), pytest.raises(TypeError):
        site.kernel(torch.ones(2, 2), 3, nonsense=1)


def test_an_output_that_is_an_input_and_an_input_given_twice(site):
    def double(x, out):
        out.copy_(x + x)
        return out

    site.double = double
    x = torch.randn(4, 8)
    before = x.clone()
    with CallSiteProbe("probe_toys:double", {"x": 0, "out": 0}, axes=ALL) as probe:
        result = site.double(x, out=x)
    assert result is x and torch.equal(x, before * 2)
    assert set(probe.verdict().values()) == {"invariant"}, probe.explain()["reason"].tolist()


def test_views_of_one_buffer_stay_views_of_one_buffer(site):
    def kernel(q, k):
        q.add_(1)
        return pair_sum(q * k)

    site.kernel = kernel
    qk = torch.randn(4, 16)
    expected = pair_sum((qk[:, :8] + 1) * qk[:, 8:])
    with CallSiteProbe("probe_toys:kernel", {"q": 0, "k": 0}, axes=ALL) as probe:
        assert torch.equal(site.kernel(qk[:, :8], qk[:, 8:]), expected)
    assert set(probe.verdict().values()) == {"invariant"}, probe.explain()["reason"].tolist()


# -- kinds of arguments
# --------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    scale: float


def test_tensors_in_tuples_dicts_and_dataclasses(site):
    def kernel(inputs, pair, extra, *rest, **options):
        return {
            "sum": (pair_sum(inputs.q * inputs.scale + pair.left), pair_sum(pair.right)),
            "more": extra["k"][0] + rest[0] + options["bias"],
        }

    site.kernel = kernel
    names = {"inputs.q": 0, "pair.left": 0, "pair.right": 0, "extra.k.0": 0, "rest.0": 0, "bias": 0}
    g = torch.Generator().manual_seed(0)
    make = lambda: torch.randn(5, 8, generator=g)  # noqa: E731
    with CallSiteProbe("probe_toys:kernel", names, axes=ALL) as probe:
        site.kernel(Inputs(make(), 2.0), Pair(make(), make()), {"k": [make()]}, make(), bias=make())
    assert set(probe.verdict().values()) == {"invariant"}, probe.explain()["reason"].tolist()
    assert (probe.frame()["rows_checked"] >= 5).all()


def test_flattened_tokens_with_prefix_sums(site):
    def varlen(tokens, cu_seqlens, max_seqlen, bad):
        ends = cu_seqlens.tolist()
        assert max(b - a for a, b in zip(ends, ends[1:])) == max_seqlen
        out = torch.empty_like(tokens)
        for a, b in zip(ends, ends[1:]):
            # A right kernel normalises within the request; the bad one by the batch's total.
            out[a:b] = tokens[a:b] * (1.0 + (ends[-1] if bad else b - a) * 2**-12)
        return out

    site.varlen = varlen
    lengths = [3, 0, 7, 2, 5]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    tokens = torch.randn(int(cu[-1]), 4)
    arguments = {"tokens": Flat("cu_seqlens"), "cu_seqlens": Prefix()}
    longest = {"max_seqlen": lambda cu_seqlens: int(cu_seqlens.diff().max())}
    for bad, expected in ((False, "invariant"), (True, "variant")):
        with CallSiteProbe(
            "probe_toys:varlen", arguments, fresh=longest, axes=("rerun", "contents", "composition", "position")
        ) as probe:
            site.varlen(tokens, cu, 7, bad)
        assert probe.verdict() == {
            "rerun": "invariant",
            "contents": "invariant",
            "composition": expected,
            "position": "invariant",
        }, probe.explain()


def test_metadata_is_copied_for_a_rerun_and_built_anew_for_another_batch(site):
    @dataclasses.dataclass
    class Meta:
        splits: torch.Tensor | None = None

    def kernel(x, lengths, meta):
        if meta.splits is None:  # filled by the first call, as FlashMLA's is
            meta.splits = torch.tensor(4 if int(lengths.sum()) > 10 else 2)
        chunk = x.shape[1] // int(meta.splits)
        return sum(pair_sum(part) for part in x.split(chunk, dim=1))

    site.kernel = kernel
    meta = Meta()
    x, lengths = torch.randn(3, 64), torch.tensor([5, 5, 5])
    with CallSiteProbe(
        "probe_toys:kernel",
        {"x": 0, "lengths": 0},
        fresh={"meta": Meta},
        axes=("rerun", "solo"),
        witness=lambda a: int(a["meta"].splits),
    ) as probe:
        site.kernel(x, lengths, meta)
    assert int(meta.splits) == 4
    assert probe.verdict() == {"rerun": "invariant", "solo": "variant"}
    solo = probe.records().set_index("axis").loc["solo"]
    assert solo["witness"] and solo["rows_checked"] == 3


@pytest.mark.parametrize(
    "shape, dim, make",
    [
        ((4, 6), 0, lambda t: t),
        ((4, 6), 0, lambda t: t[:, ::2]),
        ((4, 6), 0, lambda t: t.t().contiguous().t()),
        ((3, 4, 6), 1, lambda t: t),
        ((3, 4, 12), 1, lambda t: t[:, :, 4:8]),
        ((3, 8, 6), 1, lambda t: t[:, 2:6]),
        ((4, 1), 0, lambda t: t.expand(4, 5)),
        ((1, 5), 0, lambda t: t.expand(4, 5)),
    ],
)
def test_taking_rows_keeps_values_and_strides(shape, dim, make):
    t = make(torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape))
    for index in ([2], [0, 1, 2, 3], [3, 1, 1, 0, 2], []):
        new = take_along(t, dim, index)
        assert torch.equal(new, t.index_select(dim, torch.tensor(index, dtype=torch.int64)))
        assert misplacement(new) == 0 or not new.numel()
        if len(index) == t.shape[dim]:
            assert new.stride() == t.stride()


def test_a_non_contiguous_slice_is_non_contiguous_in_the_replays(site):
    strides = []

    def kernel(x):
        strides.append(x.stride())
        return pair_sum(x) if not x.is_contiguous() else pair_sum(x) + 1

    site.kernel = kernel
    with CallSiteProbe("probe_toys:kernel", {"x": 0}, axes=ALL) as probe:
        site.kernel(torch.randn(4, 16)[:, ::2])
    assert set(strides) == {(16, 2)} and set(probe.verdict().values()) == {"invariant"}, probe.explain()


# -- what cannot be judged
# -----------------------------------------------------------------------------------------------


def test_a_kernel_that_fails_on_one_row_gives_no_verdict_on_solo_and_still_serves(site):
    def kernel(x):
        if len(x) == 1:
            raise RuntimeError("needs two rows")
        return pair_sum(x)

    site.kernel = kernel
    with CallSiteProbe("probe_toys:kernel", {"x": 0}) as probe:
        assert site.kernel(torch.randn(4, 8)).shape == (4,)
    assert probe.verdict() == {
        "rerun": "invariant",
        "contents": "invariant",
        "solo": "inconclusive",
        "position": "invariant",
    }
    assert "needs two rows" in probe.explain().set_index("axis").loc["solo", "reason"]


def test_an_argument_that_cannot_be_cut_is_named(site):
    site.kernel = lambda x, meta, lengths: pair_sum(x)
    cases = [
        ({"x": 0, "meta": 0}, (torch.randn(3, 8), object(), None), "argument 'meta' is a object"),
        (
            {"x": 0, "lengths": 0},
            (torch.randn(3, 8), None, torch.zeros(4)),
            "argument 'lengths' has 4 rows where 'x' has 3",
        ),
        ({"x": 5}, (torch.randn(3, 8), None, None), "argument 'x' has shape (3, 8) and so no dimension 5"),
        ({"lengths": 0}, (torch.randn(3, 8), None, None), "none of batch_args (lengths) was given"),
        ({"x": Flat("lengths")}, (torch.randn(3, 8), None, None), "which batch_args does not name as Prefix"),
    ]
    for batch_args, arguments, sentence in cases:
        with CallSiteProbe("probe_toys:kernel", batch_args) as probe:
            site.kernel(*arguments)
        assert set(probe.verdict().values()) == {"inconclusive"}
        assert sentence in " ".join(probe.refusals), probe.refusals
        assert sentence in probe.explain()["reason"][0]


def test_an_output_without_rows_is_named_and_can_be_left_out(site):
    site.kernel = lambda x: (pair_sum(x), torch.ones(7))
    with CallSiteProbe("probe_toys:kernel", {"x": 0}) as probe:
        site.kernel(torch.randn(3, 8))
    assert "output '1' of shape (7,) has no dimension of 3 rows" in " ".join(probe.refusals)
    with CallSiteProbe("probe_toys:kernel", {"x": 0}, outputs={"1": None}) as probe:
        site.kernel(torch.randn(3, 8))
    assert set(probe.verdict().values()) == {"invariant"}


@pytest.mark.parametrize("capturing, compiling, word", [(True, False, "CUDA graph"), (False, True, "torch.compile")])
def test_a_captured_or_traced_call_is_refused_with_the_reason(site, monkeypatch, capturing, compiling, word):
    ran = []
    site.kernel = lambda x: ran.append(1) or pair_sum(x)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    with CallSiteProbe("probe_toys:kernel", {"x": 0}) as probe:
        site.kernel(torch.randn(3, 8))
    assert len(ran) == 1 and word in " ".join(probe.refusals)
    assert set(probe.verdict().values()) == {"inconclusive"} and word in probe.explain()["reason"][0]


def test_without_controls_nothing_is_called_invariant(site):
    site.kernel = lambda x: torch.ones(len(x))  # no value of x could change it
    with CallSiteProbe("probe_toys:kernel", {"x": 0}) as probe:
        site.kernel(torch.randn(3, 8))
    assert probe.verdict() == {
        "rerun": "invariant",
        "contents": "inconclusive",
        "solo": "inconclusive",
        "position": "inconclusive",
    }

    site.kernel = pair_sum  # a batch of one has nothing to leave out, change or move
    with CallSiteProbe("probe_toys:kernel", {"x": 0}) as probe:
        site.kernel(torch.randn(1, 8))
    assert probe.verdict() == {
        "rerun": "invariant",
        "contents": "inconclusive",
        "solo": "inconclusive",
        "position": "inconclusive",
    }

    with CallSiteProbe("probe_toys:kernel", {"x": 0}, witness=lambda arguments: "one path") as probe:
        site.kernel(torch.randn(4, 8))
    assert (
        probe.verdict()["solo"] == "inconclusive"
        and "witness" in probe.explain().set_index("axis").loc["solo", "reason"]
    )

    with CallSiteProbe("probe_toys:kernel", {"x": 0}) as probe:
        pass
    assert set(probe.verdict().values()) == {"inconclusive"} and probe.frame().empty


def test_random_numbers_drawn_a_row_are_a_dependence_on_the_batch_but_no_rerun_difference(site):
    site.kernel = lambda x: pair_sum(x) * torch.rand(len(x))
    with CallSiteProbe("probe_toys:kernel", {"x": 0}, axes=("rerun", "position")) as probe:
        site.kernel(torch.randn(6, 8))
    assert probe.verdict() == {"rerun": "invariant", "position": "variant"}


# -- sampling
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"every": 1}, list(range(20))),
        ({"every": 7}, [0, 7, 14]),
        ({"every": 1, "max_calls": 3}, [0, 1, 2]),
        ({"every": 1, "max_seconds": 1e-9}, [0]),
        ({"every": None, "probability": 1.0}, list(range(20))),
    ],
)
def test_sampling_by_count_probability_and_caps(site, options, expected):
    site.kernel = pair_sum
    with CallSiteProbe("probe_toys:kernel", {"x": 0}, axes=("solo",), **options) as probe:
        for _ in range(20):
            site.kernel(torch.randn(2, 8))
    assert probe.frame()["call"].tolist() == expected
    assert probe.calls == 20 and probe.sampled == len(expected)


def test_a_spread_sample_takes_the_axes_in_turn_and_controls_now_and_then(site):
    ran = []
    site.kernel = lambda x: ran.append(len(x)) or batch_scaled(x)
    with CallSiteProbe(
        "probe_toys:kernel", {"x": 0}, axes=("rerun", "contents", "solo"), spread=True, rows=1, controls_every=3
    ) as probe:
        for _ in range(6):
            site.kernel(torch.randn(4, 8))
    assert probe.frame()["axis"].tolist() == ["rerun", "contents", "rerun", "solo"] * 3
    assert probe.records().query("axis == 'rerun'")["rows_sensitive"].tolist() == [1, 0, 0, 1, 0, 0]
    assert len(ran) == 6 * 3 + 2  # the call, the re-run, one axis; the positive control twice
    assert probe.verdict() == {"rerun": "invariant", "contents": "invariant", "solo": "variant"}


def test_probability_samples_its_share(site):
    site.kernel = pair_sum
    with CallSiteProbe("probe_toys:kernel", {"x": 0}, axes=("rerun",), every=None, probability=0.1) as probe:
        for _ in range(400):
            site.kernel(torch.randn(2, 8))
    assert 15 <= probe.sampled <= 75  # 40 expected; beyond 5.8 standard deviations on either side


def test_the_frame_has_the_columns_and_counts_that_design_fixes(site):
    site.kernel = batch_scaled
    with CallSiteProbe("probe_toys:kernel", {"x": Rows(0)}, rows=[0, 2]) as probe:
        site.kernel(torch.randn(4, 8))
    frame = probe.frame()
    assert list(frame.columns) == ["call", "axis", "rows_checked", "rows_differ", "max_ulp", "max_row_scaled_ulp"]
    assert frame["axis"].tolist() == ["rerun", "contents", "solo", "position"]
    solo = frame.set_index("axis").loc["solo"]
    assert solo["rows_checked"] == solo["rows_differ"] == 2
    # (1 + 4/1024) against (1 + 1/1024): 3/1024 of the value, whose ULP is between 2**-24 and 2**-23 of it.
    assert 3 * 2**13 * 0.99 < solo["max_ulp"] < 3 * 2**14 * 1.01


def test_the_wrapped_name_can_be_any_kind_of_callable(site):
    class Layer:
        @staticmethod
        def static(x):
            return pair_sum(x)

        @classmethod
        def of_class(cls, x):
            return pair_sum(x)

        def method(self, x):
            return pair_sum(x)

    class Derived(Layer):
        pass

    site.Layer = Layer
    layer, table = Derived(), {"sum": pair_sum}
    x = torch.randn(3, 8)
    cases = [
        ("probe_toys:Layer.static", lambda: Layer.static(x)),
        ("probe_toys:Layer.of_class", lambda: Layer.of_class(x)),
        ("probe_toys:Layer.method", lambda: layer.method(x)),
        (layer.method, lambda: layer.method(x)),
        ((Derived, "method"), lambda: layer.method(x)),
        ((table, "sum"), lambda: table["sum"](x)),
        (pair_sum, lambda: pair_sum(x)),
    ]
    for target, call in cases:
        with CallSiteProbe(target, {"x": 0}, axes=("solo",)) as probe:
            assert torch.equal(call(), pair_sum(x)), target
        assert probe.verdict() == {"solo": "invariant"}, (target, probe.explain(), probe.refusals)
        assert torch.equal(call(), pair_sum(x))
    assert "method" not in vars(Derived) and "method" not in vars(layer) and table == {"sum": pair_sum}
    with CallSiteProbe(
        (torch.nn.functional, "linear"), {"0": 0}, axes=("rerun",)
    ) as probe:  # a builtin without a signature
        torch.nn.functional.linear(x, torch.randn(4, 8))
    assert probe.verdict() == {"rerun": "invariant"}


def test_off_is_free(site):
    site.kernel = pair_sum
    probe = CallSiteProbe("probe_toys:kernel", {"x": 0})
    assert site.kernel is pair_sum
    with probe:
        assert site.kernel is not pair_sum
    assert site.kernel is pair_sum


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(target="probe_toys.kernel", batch_args={"x": 0}), "not of the form"),
        (dict(target="no_such_module_here:f", batch_args={"x": 0}), "cannot be imported"),
        (dict(target="probe_toys:absent", batch_args={"x": 0}), "has no 'absent'"),
        (dict(target="probe_toys:number", batch_args={"x": 0}), "not something that can be called"),
        (dict(target="probe_toys:kernel", batch_args={}), "batch_args is empty"),
        (dict(target="probe_toys:kernel", batch_args={"y": 0}), "no such argument: it takes x"),
        (dict(target="probe_toys:kernel", batch_args={"x": 0}, fresh={"meta": dict}), "fresh names 'meta'"),
        (dict(target="probe_toys:kernel", batch_args={"x": 0}, fresh={"x": dict}), "in batch_args and in fresh"),
        (dict(target="probe_toys:kernel", batch_args={"x": 0}, axes=("solo", "colour")), "colour"),
        (dict(target="probe_toys:kernel", batch_args={"x": 0}, axes=()), "empty"),
        (dict(target="probe_toys:kernel", batch_args={"x": 0}, every=0), "every = 0"),
        (dict(target="probe_toys:kernel", batch_args={"x": 0}, every=None), "no call would ever be sampled"),
        (dict(target="probe_toys:kernel", batch_args={"x": 0}, probability=1.5), "probability = 1.5"),
        (dict(target="probe_toys:kernel", batch_args={"x": 0}, rows="some"), "rows = 'some'"),
        (dict(target="probe_toys:kernel", batch_args={"x": 0}, lengths="x.0"), "lengths names"),
        (dict(target="probe_toys:kernel", batch_args={"x": 0}, constant=["w"]), "constant names 'w'"),
    ],
)
def test_bad_input_is_one_sentence(site, arguments, sentence):
    def kernel(x):
        return pair_sum(x)

    site.kernel, site.number = kernel, 3
    with pytest.raises(BadInput, match=sentence.replace("(", r"\(")) as caught:
        CallSiteProbe(**arguments)
    assert str(caught.value).count("\n") == 0


def test_too_large_arguments_are_refused_unless_passed_as_they_are(site, controls):
    def kernel(x, cache):
        return pair_sum(x) + cache[0, 0]

    site.kernel = kernel
    x, cache = torch.randn(3, 8), torch.randn(1000, 100)
    uncopied = {"whole" if controls == "now" else "constant": ["cache"]}
    with CallSiteProbe("probe_toys:kernel", {"x": 0}, max_bytes=10_000) as probe:
        site.kernel(x, cache)
    assert "argument 'cache' alone spans" in " ".join(probe.refusals)
    with CallSiteProbe("probe_toys:kernel", {"x": 0}, max_bytes=10_000, **uncopied) as probe:
        site.kernel(x, cache)
    assert set(probe.verdict().values()) == {"invariant"}


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32, torch.bool, torch.complex64],
)
def test_every_dtype_of_result_is_compared_by_bits(site, dtype):
    site.kernel = lambda x: x.to(dtype) if len(x) > 1 else (x + 1).to(dtype)
    with CallSiteProbe("probe_toys:kernel", {"x": 0}, axes=("rerun", "solo")) as probe:
        site.kernel(torch.full((3, 4), -1.0) if dtype is torch.bool else torch.full((3, 4), 2.0))
    assert probe.verdict() == {"rerun": "invariant", "solo": "variant"}, probe.explain()
    assert probe.frame()["max_ulp"].max() > 0


def test_signed_zero_and_nan_payloads_are_bits_too(site):
    site.kernel = lambda x: x * 0.0 if len(x) > 1 else x * -0.0
    with CallSiteProbe("probe_toys:kernel", {"x": 0}, axes=("solo",)) as probe:
        site.kernel(torch.ones(3, 4))
    frame = probe.frame()
    assert frame["rows_differ"].sum() == 3 and frame["max_ulp"].sum() == 0
    assert bits(torch.tensor([0.0, -0.0])).tolist() == [0, -(2**31)]

"""The input checks: each passes on well-formed calls, fails on the planted fault, and says nothing where it could not
fail.
"""

import functools
import types

import numpy as np
import pytest
import torch

from batch_variance.hooks import CallSiteProbe
from batch_variance.hooks.checks import Finding, LengthsMatch, ScalesPerRow, SelectionsAgree, SlotsStable, TailUnread


@pytest.fixture(params=["now", "later"], autouse=True)
def controls(request, monkeypatch):
    """Each test runs with controls made now and made later."""
    monkeypatch.setitem(globals(), "CallSiteProbe", functools.partial(CallSiteProbe, controls=request.param))


def run(check, calls, kernel=None, batch_args=None):
    engine = types.SimpleNamespace(kernel=kernel or (lambda x, **arguments: x * 2))
    with CallSiteProbe((engine, "kernel"), batch_args or {"x": 0}, axes=("rerun",), checks=[check]) as probe:
        for arguments in calls:
            engine.kernel(torch.randn(arguments.pop("rows", 3), 4), **arguments)
    assert not probe.refusals, probe.refusals
    (row,) = probe.well_formed().to_dict("records")
    return row


def test_selections_at_equal_positions():
    check = SelectionsAgree("indices", "position")
    good = {"indices": torch.tensor([[1, 2], [3, 4], [1, 2]]), "position": torch.tensor([7, 8, 7])}
    bad = {"indices": torch.tensor([[1, 2], [3, 4], [1, 5]]), "position": torch.tensor([7, 8, 7])}
    lonely = {"indices": torch.tensor([[1, 2], [3, 4], [1, 5]]), "position": torch.tensor([7, 8, 9])}
    assert run(check, [dict(good)])["verdict"] == "ok"
    failed = run(check, [dict(good), dict(bad)])
    assert failed["verdict"] == "fails" and failed["failed"] == 1 and "call 1: row 2" in failed["detail"]
    assert run(check, [dict(lonely)])["verdict"] == "inconclusive"
    # Slots differ where the logical tokens agree: a mapping makes them comparable.
    logical = SelectionsAgree("indices", "position", normalise=lambda chosen, row, arguments: chosen % 10)
    assert (
        run(logical, [{"indices": torch.tensor([[1, 2], [3, 4], [11, 22]]), "position": torch.tensor([7, 8, 7])}])[
            "verdict"
        ]
        == "ok"
    )


def test_bytes_behind_fetched_slots():
    cache = torch.randn(8, 4)
    touched = cache.clone()
    touched[5, 3] += 1
    slots = torch.tensor([[0, 5, -1], [2, 3, -1], [1, 0, 5]])
    assert run(SlotsStable("cache", "slots"), [{"cache": cache, "slots": slots}])["verdict"] == "inconclusive"
    assert run(SlotsStable("cache", "slots"), [{"cache": cache, "slots": slots}] * 2)["verdict"] == "ok"
    failed = run(SlotsStable("cache", "slots"), [{"cache": cache, "slots": slots}, {"cache": touched, "slots": slots}])
    assert failed["verdict"] == "fails" and failed["failed"] == 1 and "slot 5" in failed["detail"]
    renewed = SlotsStable("cache", "slots", epoch=lambda arguments: float(arguments["cache"].sum()))
    assert (
        run(renewed, [{"cache": cache, "slots": slots}, {"cache": touched, "slots": slots}])["verdict"]
        == "inconclusive"
    )


@pytest.mark.parametrize(
    "lengths, verdict, row",
    [([2, 0, 3], "ok", None), ([2, 1, 3], "fails", 1), ([3, 0, 3], "fails", 0), ([2, 0, 9], "fails", 2)],
)
def test_valid_lengths(lengths, verdict, row):
    indices = torch.tensor([[4, 2, -1], [-1, -1, -1], [0, 1, 2]])
    found = run(LengthsMatch("lengths", "indices"), [{"lengths": torch.tensor(lengths), "indices": indices}])
    assert found["verdict"] == verdict and (row is None or f"row {row} says" in found["detail"])
    gap = torch.tensor([[4, -1, 2], [-1, -1, -1], [0, 1, 2]])
    assert (
        run(LengthsMatch("lengths", "indices"), [{"lengths": torch.tensor([2, 0, 3]), "indices": gap}])["verdict"]
        == "fails"
    )
    full = torch.zeros(3, 3, dtype=torch.int64)
    assert (
        run(LengthsMatch("lengths", "indices"), [{"lengths": torch.tensor([3, 3, 3]), "indices": full}])["verdict"]
        == "inconclusive"
    )


def test_tails():
    def kernel(x, lengths, reads):
        inside = torch.arange(x.shape[1])[None] < lengths[:, None]
        # Multiplying by a mask does not keep NaN out: only choosing does.
        return (x * inside).sum(1) if reads else torch.where(inside, x, 0.0).sum(1)

    both = {"x": 0, "lengths": 0}
    some, full = torch.tensor([2, 3, 4]), torch.tensor([4, 4, 4])
    check = TailUnread("x", "lengths")
    assert run(check, [{"lengths": some, "reads": False}], kernel, both)["verdict"] == "ok"
    failed = run(check, [{"lengths": some, "reads": True}], kernel, both)
    assert failed["verdict"] == "fails" and failed["failed"] == 2
    assert run(check, [{"lengths": full, "reads": True}], kernel, both)["verdict"] == "inconclusive"
    last = TailUnread("x", "lengths", dim=-1)
    for reads, verdict in ((False, "ok"), (True, "fails")):
        assert run(last, [{"lengths": some, "reads": reads}], kernel, both)["verdict"] == verdict
    unread = run(check, [{"lengths": some, "reads": False}], lambda x, lengths, reads: lengths * 2.0, both)
    assert unread["verdict"] == "inconclusive"  # the positive control fails: this kernel reads none of it


def test_scales():
    check = lambda: ScalesPerRow("scale", "x")  # noqa: E731
    one, other = {"scale": torch.tensor(0.5)}, {"scale": torch.tensor(0.25)}
    assert run(check(), [{"scale": torch.rand(3, 1)}])["verdict"] == "ok"
    assert run(check(), [dict(one)])["verdict"] == "inconclusive"
    assert run(check(), [dict(one), dict(one)])["verdict"] == "ok"
    failed = run(check(), [dict(one), dict(other)])
    assert failed["verdict"] == "fails" and failed["failed"] == 3
    assert run(check(), [{**one, "rows": 1}, {**other, "rows": 1}])["verdict"] == "inconclusive"


def test_a_users_check_is_a_function_and_its_failure_stays_its_own():
    def positive(arguments):
        return bool((arguments["lengths"] > 0).all())

    assert run(positive, [{"lengths": torch.tensor([1, 2, 3])}])["verdict"] == "ok"
    failed = run(positive, [{"lengths": torch.tensor([1, 0, 3])}])
    assert failed["verdict"] == "fails" and failed["check"] == "positive"
    broken = run(lambda arguments: 1 / 0, [{}])
    assert broken["verdict"] == "inconclusive" and "ZeroDivisionError" in broken["detail"]
    found = run(lambda arguments: Finding(5, 2, True, "two of five"), [{}])
    assert found["rows"] == 5 and found["failed"] == 2 and found["detail"] == "two of five"


@pytest.mark.parametrize("truth", [lambda x: x.all(), lambda x: np.bool_(x.all()), lambda x: int(x.all())])
def test_what_numpy_and_torch_have_for_a_bool_is_one(truth):
    for lengths, verdict in (([1, 2, 3], "ok"), ([1, 0, 3], "fails")):
        given = {"lengths": torch.tensor(lengths)}
        assert run(lambda arguments: truth(arguments["lengths"] > 0), [given])["verdict"] == verdict
    several = run(lambda arguments: arguments["lengths"] > 0, [{"lengths": torch.tensor([1, 2, 3])}])
    assert several["verdict"] == "inconclusive" and "RuntimeError" in several["detail"]


def test_what_a_check_sees_is_the_call_before_it_ran():
    seen = []

    def kernel(x, lengths):
        lengths += 1
        return x * 2

    run(
        lambda arguments: seen.append(arguments["lengths"].clone()) or True,
        [{"lengths": torch.tensor([1, 2, 3])}],
        kernel,
    )
    assert seen[0].tolist() == [1, 2, 3]

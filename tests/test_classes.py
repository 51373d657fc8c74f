"""Equivalence classes by bits, tuning inside one, and the recorded tables."""

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from batch_variance.common import BadInput
from batch_variance.kernels import classes
from batch_variance.kernels.classes import Classes, bit_name, cached, classify, fastest_inside
from batch_variance.kernels.recorded import Benchmark, replace_rows
from batch_variance.kernels.tiles import by_tiles


def order_by_rows(limit):
    """A sum whose order of additions changes above ``limit`` rows."""
    weight = torch.randn(40, generator=torch.Generator().manual_seed(5))

    def run(x):
        terms = (x * weight).unbind(1)
        total = terms[0].clone()
        for term in terms[1:] if len(x) <= limit else (*terms[:0:-1],):
            total = total + term
        return total.unsqueeze(1)

    return run


@pytest.fixture
def rows():
    return torch.randn(70, 40, generator=torch.Generator().manual_seed(0))


def test_a_change_of_order_is_found_and_sought_out(rows):
    found = classify({"steady": order_by_rows(99), "steps": order_by_rows(20)}, rows, (1, 8, 16, 64), seek=True)
    held = Classes(found)
    assert held.invariant("steady") and not held.invariant("steps")
    steps = found[found.candidate == "steps"].set_index("m").bit_class
    assert steps[20] != steps[21] and steps.loc[:20].nunique() == 1 and steps.loc[21:].nunique() == 1
    assert set(found[found.candidate == "steady"].bit_class) == {steps[1]}


def test_rows_that_see_each_other_are_not_invariant(rows):
    found = Classes(classify({"leaks": lambda x: x + 1e-3 * x.cumsum(0)}, rows, (16, 32)))
    assert found.frame.rows_moved.gt(0).all() and not found.invariant("leaks")


def test_one_that_fails_is_a_result_and_no_member(rows):
    def fails(x):
        raise RuntimeError("out of resource: shared memory")

    found = Classes(classify({"fails": fails, "steady": order_by_rows(99)}, rows, (1, 8)))
    assert found.frame[found.frame.candidate == "fails"].failure.str.contains("shared memory").all()
    (name,) = found.of("steady")
    assert found.members(name) == ["steady"]
    with pytest.raises(BadInput, match="never ran"):
        found.of("fails")


def test_the_tuner_keeps_to_one_class(rows):
    held = Classes(
        classify(
            {"a": order_by_rows(99), "b": order_by_rows(99), "steps": order_by_rows(20), "other": order_by_rows(0)},
            rows,
            (1, 16, 32),
        )
    )
    (inside,) = held.of("a")
    assert held.members(inside) == ["a", "b"]
    assert fastest_inside(held, inside, {"a": 2.0, "b": 1.0, "steps": 0.1, "other": 0.1}) == "b"
    held.require("b", inside)
    for outside in ("steps", "other"):
        with pytest.raises(BadInput, match="outside class"):
            held.require(outside, inside)
    with pytest.raises(BadInput, match="timed"):
        fastest_inside(held, inside, {"steps": 0.1})


def test_the_cpus_matmul_has_several_classes_and_tiles_have_one():
    x, w = (torch.randn(64, 576, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    held = Classes(
        classify(
            {"F.linear": lambda r: F.linear(r, w), "tiles": lambda r: by_tiles(lambda t: F.linear(t, w), r)},
            x,
            (1, 2, 16, 64),
        )
    )
    assert len(held.of("F.linear")) > 1 and held.invariant("tiles")


def test_the_widest_class_covers_the_most_row_counts():
    runs = [
        dict(m=m, bit_class=name)
        for m, name in ((1, "a"), (1, "a"), (1, "a"), (1, "b"), (16, "b"), (64, ""), (16, "c"), (1, "c"), (16, "c"))
    ]
    assert classes.widest_class(runs) == "c"
    assert classes.widest_class([dict(m=1, bit_class="")]) == ""


def test_names_are_of_bits_and_dtypes():
    assert bit_name(torch.tensor([0.0])) != bit_name(torch.tensor([-0.0]))
    assert bit_name(torch.zeros(2)) != bit_name(torch.zeros(2, dtype=torch.int32))
    assert bit_name(torch.arange(6.0).view(2, 3).t()) == bit_name(torch.arange(6.0).view(2, 3).t().contiguous())


def test_a_classification_is_remembered_by_what_it_rests_on(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCH_VARIANCE_CACHE", str(tmp_path))
    calls = []

    def counted(x):
        calls.append(len(x))
        return order_by_rows(99)(x)

    first = cached("sum", "40", {"counted": counted}, rows, sizes=(1, 16))
    ran = len(calls)
    again = cached("sum", "40", {"counted": counted}, rows, sizes=(1, 16))
    assert ran and len(calls) == ran
    pd.testing.assert_frame_equal(first.frame, again.frame)
    cached("sum", "40", {"counted": counted}, rows + 1, sizes=(1, 16))
    assert len(calls) > ran


def test_no_size_that_fits_is_refused(rows):
    with pytest.raises(BadInput, match="70 rows"):
        classify({"steady": order_by_rows(99)}, rows, (0, 71))


def test_a_rerun_replaces_its_own_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "batch_variance.kernels.recorded.gpu_columns",
        lambda: dict(gpu="one", driver="1", torch="t", triton="r", commit="c", date="d"),
    )
    for value in (4.0, 2.0):
        bench = Benchmark("gemm")
        bench.add("gemm", "invariant", "N1 K1", 1, "time", "us", value, 4.0)
        bench.add("gemm", "default", "N1 K1", int(value), "time", "us", 4.0, 4.0)
        bench.save(tmp_path)
    table = pd.read_csv(tmp_path / "gemm.csv")
    assert list(table.columns) == list(
        "benchmark kernel policy shape m metric unit value baseline ratio gpu driver torch triton commit date".split()
    )
    mine = table[table.policy == "invariant"]
    assert mine["value"].tolist() == [2.0] and mine.ratio.tolist() == [0.5]
    assert sorted(table[table.policy == "default"].m) == [2, 4]
    replace_rows(tmp_path / "gemm.csv", [{**mine.iloc[0].to_dict(), "gpu": "two"}], classes_key())
    assert len(pd.read_csv(tmp_path / "gemm.csv")) == 4


def classes_key():
    from batch_variance.kernels.recorded import KEY

    return KEY


def test_sizes_lie_at_and_beside_powers_of_two():
    for power in (16, 32, 64, 128, 256):
        assert power in classes.SIZES
    assert {15, 17, 31, 33, 63, 65, 127, 129, 257} <= set(classes.SIZES)

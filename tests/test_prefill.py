"""Prefill attention that agrees with decode: on a CPU the emulation in raw bits, and the kernel in the interpreter."""

import pytest
import torch
from interpreted import interpreted
from prefill_cases import prefill_case, rows_of, same_bits

from batch_variance.common import BadInput
from batch_variance.kernels.decode import attend
from batch_variance.kernels.decode.reference import exact
from batch_variance.kernels.prefill import DeviceTiles, PrefillInputs, launch, prefill, tiles
from batch_variance.schedules import make_plan

COUNTS, CACHED = [33, 1, 0, 17, 64], [0, 15, 3, 31, 1]


@pytest.mark.parametrize("rule", ["free-2", "free-most-3", "never-split"])
def test_each_row_has_the_bits_of_decode_at_its_length(rule):
    inputs = prefill_case(COUNTS, CACHED, dtype=torch.bfloat16)
    out = torch.full(inputs.q.shape, torch.nan, dtype=torch.bfloat16)
    found = prefill(inputs, rule, 16, out)
    assert found[0] is out and not out.isnan().any()
    for row in (0, 14, 15, 16, 31, 32, 33, 34, 50, 51, 114):
        one = inputs.as_decode().row(row)
        alone = attend(one, make_plan(rule, one.lengths(16), 7, 16))
        assert same_bits([t[row : row + 1] for t in found], alone)
    truth, lse = exact(inputs.as_decode(), 16)
    assert (out.double() - truth).norm() / truth.norm() < 4e-3 and (found[1] - lse).abs().max() < 1e-4


@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_chunks_of_any_size_give_the_whole_prompts_bits(size):
    inputs = prefill_case(COUNTS, CACHED, dtype=torch.bfloat16)
    whole = prefill(inputs, "free-1", 16)
    for request, (start, count) in enumerate(zip(inputs.starts, COUNTS)):
        for first in range(0, count, size):
            last = min(first + size, count)
            part = prefill(rows_of(inputs, request, first, last), "free-1", 16)
            assert same_bits([t[start + first : start + last] for t in whole], part)


def test_rules_differ_so_equal_bits_mean_something():
    inputs = prefill_case([64], [64], dtype=torch.float32)
    found = [prefill(inputs, rule, 16)[0] for rule in ("free-1", "free-4", "never-split")]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_tiles_cover_each_row_once_and_no_two_requests():
    inputs = prefill_case(COUNTS, CACHED)
    lengths = inputs.lengths()
    for rows in (1, 2, 5, 16):
        found = tiles(inputs, rows)
        seen = [row for first, count, _, _ in found for row in range(first, first + count)]
        assert sorted(seen) == list(range(sum(COUNTS)))
        for first, count, request, length in found:
            assert 1 <= count <= rows and lengths[first] == length
            assert inputs.starts[request] <= first and first + count <= inputs.starts[request + 1]


def test_the_kernel_does_what_decode_does_interpreted():
    results = interpreted("prefill_interpreted.py")
    assert len(results) == 12
    for found in results:
        assert found["error"] < found["bound"] and found["lse_error"] < 1e-4, found
        assert found["unlike_decode"] == 0 and not found["unlike_chunk"], found
        assert found["reached"] == 0 and found["not_finite"] > 0, found


def test_no_rows_are_no_work():
    inputs = prefill_case([0, 0], [3, 0])
    out, lse = prefill(inputs)
    assert out.shape == (0, 8, 16) and lse.shape == (0, 8)


@pytest.mark.parametrize(
    "change,said",
    [
        (dict(starts=(0, 5)), "do not cut 4 rows"),
        (dict(starts=(0, 3, 2, 4), cached=(0, 0, 0)), "rising from 0 to 4"),
        (dict(cached=(-1,)), "a cached length is -1"),
        (dict(cached=(99,)), "a request reaches 103 tokens"),
        (dict(block_table=torch.zeros(2, 2, dtype=torch.int32)), "for 1 requests"),
        (dict(q=torch.zeros(4, 0, 16)), "heads and width not 0"),
        (dict(values=torch.zeros(1, 2, 3, 4)), "caches\\[0\\].values"),
    ],
)
def test_what_does_not_fit_is_named(change, said):
    good = prefill_case([4], [0])
    fields = {name: getattr(good, name) for name in ("q", "starts", "cached", "keys", "values", "block_table")}
    with pytest.raises(BadInput, match=said):
        PrefillInputs(**{**fields, **change})


def test_a_rule_that_does_not_fold_in_place_is_refused():
    with pytest.raises(BadInput, match="fixed-count-4"):
        prefill(prefill_case([4], [0]), "fixed-count-4")


@pytest.mark.parametrize(
    "out,said",
    [
        (torch.zeros(1, 8, 16, dtype=torch.float16), "shape \\[1, 8, 16\\]"),
        (torch.zeros(4, 8, 32, dtype=torch.float16), "shape \\[4, 8, 32\\]"),
        (torch.zeros(4, 8, 16), "dtype torch.float32"),
    ],
)
def test_an_out_of_another_shape_or_dtype_is_refused(out, said):
    inputs = prefill_case([4], [0])
    with pytest.raises(BadInput, match=said):
        prefill(inputs, out=out)
    with pytest.raises(BadInput, match=said):
        launch(inputs, DeviceTiles.upload(inputs, "free-1", 16), out)


def test_tiles_of_other_inputs_are_refused():
    inputs, other = prefill_case([4], [3]), prefill_case([4], [4])
    with pytest.raises(BadInput, match="upload tiles for these inputs"):
        launch(inputs, DeviceTiles.upload(other, "free-1", 16), torch.empty_like(inputs.q))

"""Split-KV decode: accuracy against float64, what changes a row's bits and what must not, and the Triton kernels'
logic."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from interpreted import interpreted

from batch_variance.common import BadInput
from batch_variance.kernels.decode import (
    FOLDS,
    Cache,
    DecodeInputs,
    Workspace,
    attend,
    emulate,
    exact,
    launch,
    plan_decode,
    random_inputs,
)
from batch_variance.kernels.decode.reference import fma
from batch_variance.schedules import make_plan, one_program_a_row

SHAPES = {
    "grouped": dict(heads=9, kv_heads=3, d_qk=64, d_v=64),
    "latent": dict(heads=16, d_qk=96, d_v=64),
    "sparse-two-caches": dict(
        heads=16, d_qk=64, d_v=64, sparse=True, extra_lengths=[20, 0, 5, 40, 1, 17], sink=True, invalid=0.1
    ),
}
LENGTHS = [175, 16, 0, 75, 33, 1]
BLOCK = 16


def plan_of(inputs, rule, programs):
    return plan_decode(inputs, rule, programs, BLOCK)


def folds_of(rule):
    return ("left",) if rule.startswith("free") else FOLDS


def bits(t):
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def same(a, b):
    return torch.equal(bits(a), bits(b))


def error(value, truth):
    return ((value.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["flashmla", "free-2", "free-most-3", "fixed-count-3", "never-split"])
def test_emulation_is_accurate(shape, rule):
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 6e-3)):
        inputs = random_inputs(LENGTHS, dtype=dtype, **SHAPES[shape])
        truth, lse = exact(inputs, BLOCK)
        for fold in folds_of(rule):
            out, got = emulate(inputs, plan_of(inputs, rule, 9), fold)
            assert error(out, truth) < bound
            assert torch.equal(got.isinf(), lse.isinf())
            assert (got - lse)[~lse.isinf()].abs().max() < 1e-5


def test_exact_agrees_with_torch_attention():
    inputs = random_inputs([100] * 3, heads=8, kv_heads=2, d_qk=64, d_v=64, dtype=torch.float64)
    cache = inputs.caches[0]
    tokens = torch.arange(100)
    places = cache.block_table.long()[:, tokens // 64] * 64 + tokens % 64
    keys, values = (t.flatten(0, 1)[places].transpose(1, 2).repeat_interleave(4, 1) for t in (cache.keys, cache.values))
    expected = torch.nn.functional.scaled_dot_product_attention(inputs.q[:, :, None], keys, values)[:, :, 0]
    assert torch.allclose(exact(inputs)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_length_rules_keep_bits_and_the_batch_wide_schedule_does_not(shape, dtype):
    inputs = random_inputs(LENGTHS, dtype=dtype, seed=1, **SHAPES[shape])
    for rule in ("free-2", "free-most-3", "fixed-count-3", "by-length-2-6"):
        for fold in folds_of(rule):
            out, lse = emulate(inputs, plan_of(inputs, rule, 40), fold)
            for row in range(inputs.batch):
                alone = inputs.row(row)
                one, one_lse = emulate(alone, plan_of(alone, rule, 7), fold)
                assert same(one, out[row : row + 1]) and same(one_lse, lse[row : row + 1])
    plans = [plan_of(inputs, "flashmla", parts) for parts in (1, 40)]
    assert (plans[0].pieces != plans[1].pieces).any()
    changed = [row for row in range(inputs.batch) if not same(*(emulate(inputs, p)[0][row] for p in plans))]
    assert changed and all(plans[0].pieces[row] != plans[1].pieces[row] for row in changed)


def test_free_has_the_bits_of_its_fixed_chunks_whatever_the_schedule():
    inputs = random_inputs(LENGTHS, seed=2, **SHAPES["latent"])
    want = emulate(inputs, plan_of(inputs, "fixed-chunk-2", 3))[0]
    plans = [plan_of(inputs, "free-2", n) for n in (1, 4, 64)]
    plans.append(one_program_a_row(plans[0]))
    assert len({p.num_slots for p in plans}) > 2
    assert all(same(emulate(inputs, p)[0], want) for p in plans)


def test_pieces_by_own_length_have_the_bits_of_a_rule_with_that_length():
    inputs = random_inputs(LENGTHS, seed=2, **SHAPES["latent"])
    plans = [plan_of(inputs, "free-most-3", n) for n in (1, 4, 64)]
    plans.append(one_program_a_row(plans[0]))
    assert len(set(plans[0].chunks.tolist())) > 1
    outs = [emulate(inputs, p)[0] for p in plans]
    assert all(same(out, outs[0]) for out in outs)
    for row, chunk in enumerate(plans[0].chunks):
        assert same(emulate(inputs, plan_of(inputs, f"free-{chunk}", 5))[0][row], outs[0][row])


def test_shuffled_rows_and_unread_places_change_nothing():
    inputs = random_inputs(LENGTHS, seed=3, **SHAPES["grouped"])
    out = emulate(inputs, plan_of(inputs, "free-2", 9))[0]
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    cache = inputs.caches[0]
    keys, values = cache.keys.clone(), cache.values.clone()
    used = torch.zeros(cache.places, dtype=torch.bool)
    for row, n in enumerate(LENGTHS):
        tokens = torch.arange(n)
        used[cache.block_table[row].long()[tokens // 64] * 64 + tokens % 64] = True
    keys.flatten(0, 1)[~used] = torch.nan
    values.flatten(0, 1)[~used] = torch.nan
    shuffled = DecodeInputs(inputs.q[order], (Cache(keys, values, cache.lengths[order], cache.block_table[order]),), 64)
    assert same(emulate(shuffled, plan_of(shuffled, "free-2", 9))[0], out[order])


def test_empty_rows_and_sinks():
    inputs = random_inputs([0, 3], sink=True, **SHAPES["latent"])
    for sink in (inputs.sink, torch.full((16,), torch.inf), torch.full((16,), -torch.inf)):
        with_sink = DecodeInputs(inputs.q, inputs.caches, 64, sink=sink)
        truth, lse = exact(with_sink)
        out, got = emulate(with_sink, plan_of(with_sink, "free-2", 3))
        assert (out[0] == 0).all() and got[0].isneginf().all()
        assert (
            torch.allclose(got[1].double(), lse[1], atol=1e-5)
            and error(out[1], truth[1]) < 6e-3
            or sink[0] == torch.inf
        )
    assert (
        emulate(
            DecodeInputs(inputs.q, inputs.caches, 64, sink=torch.full((16,), torch.inf)), plan_of(inputs, "free-2", 3)
        )[0]
        == 0
    ).all()


def test_fma_rounds_once():
    a = torch.tensor([1 + 2.0**-12])
    assert fma(a, a, torch.tensor([-1.0])).item() == 2.0**-11 + 2.0**-24
    assert (a * a - 1).item() != 2.0**-11 + 2.0**-24


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=torch.zeros(0, 9, 64)), "shape \\[0, 9, 64\\]"),
        (dict(q=torch.zeros(6, 10, 64)), "evenly"),
        (dict(q=torch.zeros(6, 9, 32)), "keys has shape"),
        (dict(d_v=32), "values has shape"),
        (dict(caches=()), "0 caches"),
        (dict(sink=torch.zeros(4)), "sink"),
        (dict(q=torch.zeros(5, 9, 64)), "5 rows"),
    ],
)
def test_mismatched_shapes(change, message):
    inputs = random_inputs(LENGTHS, dtype=torch.float32, **SHAPES["grouped"])
    with pytest.raises(BadInput, match=message):
        DecodeInputs(**{"q": inputs.q, "caches": inputs.caches, "d_v": inputs.d_v, **change})


def test_bad_lengths_plans_folds_and_buffers():
    inputs = random_inputs(LENGTHS, dtype=torch.float32, **SHAPES["grouped"])
    cache = inputs.caches[0]
    for value in (-1, 193):
        wrong = DecodeInputs(
            inputs.q,
            (Cache(cache.keys, cache.values, torch.full((6,), value, dtype=torch.int32), cache.block_table),),
            64,
        )
        with pytest.raises(BadInput, match=str(value)):
            wrong.lengths(64)
    with pytest.raises(BadInput, match="block_size is 0"):
        plan_decode(inputs, "free-2", 4, 0)
    with pytest.raises(BadInput, match="plan is for 1 rows"):
        emulate(inputs, make_plan("free-2", [5], 4))
    with pytest.raises(BadInput, match="fold 'tree'"):
        emulate(inputs, plan_of(inputs, "free-2", 4), "tree")
    with pytest.raises(BadInput, match="use fixed-chunk instead"):
        emulate(inputs, plan_of(inputs, "free-2", 4), "pairwise")
    with pytest.raises(BadInput, match="options of the Triton kernels"):
        attend(inputs, plan_of(inputs, "free-2", 4), workspace=None)
    plan = plan_of(inputs, "fixed-chunk-2", 4)
    small = Workspace.for_slots(plan.num_slots - 1, 9, 64, "cpu")
    with pytest.raises(BadInput, match="split buffer"):
        launch(inputs, plan, workspace=small)
    with pytest.raises(BadInput, match="powers of two"):
        launch(inputs, plan_decode(inputs, "free-2", 4, 48))
    with pytest.raises(BadInput, match="fold 'flashmla'"):
        launch(inputs, plan, "flashmla")


def test_importing_the_operation_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import batch_variance.kernels.decode"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_triton_kernels_in_the_interpreter():
    """Their logic only: the interpreter runs programs one after another and cannot show a GPU's order of additions."""
    found = interpreted("decode_interpreted.py")
    assert len(found) == 3 * (1 + 1 + 1 + 1 + 3)
    for case in found:
        assert case["error"] < case["bound"], case
        assert case["lse_error"] < 1e-5 and case["poison"] == 0, case
        assert case["emulation_equal"] > 0.98, case
        assert case["spread_differs"] == case["by_one_differs"] == 0, case
        if case["rule"] != "flashmla":
            assert case["solo_differs"] == 0, case
    assert any(case["solo_differs"] for case in found if case["rule"] == "flashmla")
    assert any(case["spread_slots"] for case in found if case["rule"] == "free-2")
    assert np.isfinite([case["error"] for case in found]).all()

"""Trees of additions: revealed from outputs, against trees known by construction and emulated tensor cores."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_variance.common import BadInput
from batch_variance.kernels.tiles import by_tiles
from batch_variance.numerics.trees import (
    Tree,
    folded_leaves,
    lanes,
    matmul_tree,
    pairwise,
    reduction_tree,
    reveal,
    segmented,
    sequential,
    units_for,
)

FLOAT32 = units_for(torch.float32)


def tensor_core(products: torch.Tensor, segment: int, way: int, kept_bits: int = 25) -> torch.Tensor:
    """[P, n] float64 products to [P] sums: ``way`` products and the accumulator aligned to the largest, cut off
    below it."""

    def chain(part):
        total = part.new_zeros(len(part))
        for k in range(0, part.shape[1], way):
            terms = torch.cat([total[:, None], part[:, k : k + way]], 1)
            top = terms.abs().amax(1, keepdim=True)
            grain = torch.exp2(torch.floor(torch.log2(top.clamp(min=2.0**-900))) - kept_bits)
            total = ((terms / grain).trunc() * grain).sum(1).float().double()
        return total

    found = None
    for start in range(0, products.shape[1], segment):
        part = chain(products[:, start : start + segment])
        found = part if found is None else (found.float() + part.float()).double()
    return found


def nested(draw, leaves):
    if len(leaves) == 1:
        return leaves[0]
    cut = draw(st.integers(1, len(leaves) - 1))
    return nested(draw, leaves[:cut]), nested(draw, leaves[cut:])


@st.composite
def any_tree(draw):
    n = draw(st.integers(1, 24))
    return Tree.of(nested(draw, draw(st.permutations(list(range(n))))))


@given(any_tree())
@settings(max_examples=60, deadline=None)
def test_any_binary_tree_is_revealed(tree):
    assert reveal(lambda probes: tree.evaluate(probes.float()), tree.leaves, FLOAT32) == tree


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 130, 400])
def test_known_orders(n):
    for tree in (sequential(n), pairwise(n), lanes(n, 4), segmented(n, 64)):
        assert reveal(lambda probes: tree.evaluate(probes.float()), n, FLOAT32) == tree
    assert sequential(n).depth == n - 1
    assert pairwise(n).depth == (n - 1).bit_length()


@pytest.mark.parametrize("way", [4, 8, 16])
@pytest.mark.parametrize("n,segment", [(64, 64), (128, 32), (100, 48)])
def test_wide_nodes_of_a_tensor_core(n, segment, way):
    found = reveal(lambda probes: tensor_core(probes, segment, way), n, FLOAT32)
    assert found == segmented(n, segment, way)
    assert max(found.ways) == way + 1 if segment > way else way


def test_equality_is_of_the_order_and_operands_may_change_places():
    assert Tree.of(((0, 1), (2, 3))) == Tree.of(((3, 2), (1, 0)))
    assert Tree.of(((0, 1), (2, 3))) != Tree.of((((0, 1), 2), 3))
    assert Tree.of(((0, 1), 2, 3)) != Tree.of((((0, 1), 2), 3))
    assert Tree.of(((0, 1), (2, 3))).name == Tree.of(((3, 2), (1, 0))).name
    assert str(Tree.of(((3, 2, 1), 0))) == "(0+(1+2+3))"
    assert Tree.of(((0,), (1,))) == sequential(2)


def test_joins_depths_and_leaf_order():
    tree = Tree.of((((0, 2), 1), (3, 4)))
    assert tree.joins(0).tolist() == [1, 3, 2, 5, 5]
    assert tree.joins(4).tolist() == [5, 5, 5, 2, 1]
    assert tree.leaf_order() == [0, 2, 1, 3, 4]
    assert tree.depth == 3 and tree.ways == {2: 4}
    assert len(tree.drawing().splitlines()) == 5


@pytest.mark.parametrize("wrong", [(0, 2), (0, (1, 1)), ()])
def test_leaves_must_be_numbered(wrong):
    with pytest.raises(BadInput, match="leaves"):
        Tree.of(wrong)


@pytest.mark.parametrize("rows", [8, 33])
@pytest.mark.parametrize("n", [16, 100, 700])
def test_torch_sum_evaluated_by_its_tree_has_its_bits(rows, n):
    tree = reduction_tree(lambda x: x.sum(-1), rows, n)
    data = torch.randn(rows, n, generator=torch.Generator().manual_seed(n))
    assert torch.equal(tree.evaluate(data).view(torch.int32), data.sum(-1).view(torch.int32))
    assert not torch.equal(sequential(n).evaluate(data), data.sum(-1))


def test_one_dtype_more_than_its_digits_can_count():
    assert reduction_tree(
        lambda x: sequential(300).evaluate(x.float()).to(x.dtype), 300, 300, torch.bfloat16
    ) == sequential(300)
    assert reduction_tree(lambda x: lanes(2100, 8).evaluate(x.float()).to(x.dtype), 2100, 2100, torch.float16) == lanes(
        2100, 8
    )


def test_the_cpus_matmul_changes_its_tree_with_the_row_count_and_tiles_do_not():
    default = {M: matmul_tree(F.linear, M, 128, 96) for M in (1, 2, 16, 64)}
    assert len(set(default.values())) > 1
    tiled = {M: matmul_tree(lambda x, w: by_tiles(lambda t: F.linear(t, w), x), M, 128, 96) for M in (1, 2, 16, 64)}
    assert len(set(tiled.values())) == 1


def test_a_compensated_sum_shows_its_order_and_other_bits():
    def compensated(rows):
        total, lost = rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
        for term in rows.unbind(1):
            step = term - lost
            new = total + step
            lost = (new - total) - step
            total = new
        return total

    assert reduction_tree(compensated, 8, 40) == sequential(40)
    data = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(sequential(40).evaluate(data), compensated(data))


def test_unequal_trees_and_unequal_bits_go_together():
    x, w = (
        torch.randn(64, 96, generator=torch.Generator().manual_seed(0)),
        torch.randn(128, 96, generator=torch.Generator().manual_seed(1)),
    )
    trees = {M: matmul_tree(F.linear, M, 128, 96) for M in (1, 64)}
    assert trees[1] != trees[64]
    assert not torch.equal(torch.cat([F.linear(x[i : i + 1], w) for i in range(64)]), F.linear(x, w))


def test_probes_by_rows_and_by_columns_agree():
    for M in (3, 32):
        assert matmul_tree(F.linear, M, 48, 40, probe="rows") == matmul_tree(F.linear, M, 48, 40)
    with pytest.raises(BadInput, match="rows"):
        matmul_tree(F.linear, 3, 48, 40, probe="diagonal")
    with pytest.raises(BadInput, match="batch of 3"):
        matmul_tree(F.linear, 3, 48, 40, row=3)


def test_what_is_no_tree_is_refused():
    calls = iter(range(10**9))

    def restless(rows):
        return (sequential(12) if next(calls) % 2 else pairwise(12)).evaluate(rows)

    with pytest.raises(BadInput, match="tree"):
        reduction_tree(restless, 1, 12)
    with pytest.raises(BadInput, match="int32"):
        reduction_tree(lambda x: x.sum(-1), 1, 12, torch.int32)
    with pytest.raises(BadInput, match="terms"):
        reveal(lambda probes: probes.sum(-1), 0, FLOAT32)


def test_blocks_of_neighbours_as_leaves():
    assert folded_leaves(segmented(64, 16), 16) == sequential(4)
    assert folded_leaves(sequential(64), 16) is None
    assert folded_leaves(pairwise(64), 8) == pairwise(8)

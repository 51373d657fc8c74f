"""What the interpreter's dot of these tests promises: a row's bits are the same wherever the row lies and however its tile is laid out."""

import numpy as np
import pytest

from interpreted import ordered_dot


def operands(m: int, n: int = 16, k: int = 96):
    rng = np.random.default_rng(m)
    return (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n), (m, n)))


@pytest.mark.parametrize("m", [1, 2, 15, 16, 17, 31, 32, 33, 64])
def test_a_row_has_one_sum_at_every_place_and_tile_size(m):
    a, b, d = operands(m)
    whole = ordered_dot(a, b, d).view(np.int32)
    for i in range(m):
        assert np.array_equal(ordered_dot(a[i : i + 1], b, d[i : i + 1]).view(np.int32)[0], whole[i])
    order = np.random.default_rng(1).permutation(m)
    assert np.array_equal(ordered_dot(a[order], b, d[order]).view(np.int32), whole[order])


def test_the_layout_of_an_operand_changes_no_bit():
    a, b, d = operands(33)
    whole = ordered_dot(a, b, d).view(np.int32)
    for other in (ordered_dot(np.asfortranarray(a), b, d), ordered_dot(a, np.asfortranarray(b), d), ordered_dot(a, b, np.asfortranarray(d))):
        assert np.array_equal(other.view(np.int32), whole)


def test_its_sum_is_right_and_its_order_is_seen():
    a, b, d = operands(33)
    exact = a.astype(np.float64) @ b.astype(np.float64) + d
    bound = 97 * np.finfo(np.float32).eps * (np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(d))
    assert np.all(np.abs(ordered_dot(a, b, d) - exact) <= bound)
    backwards = ordered_dot(a[:, ::-1], b[::-1], d)  # the control: another order is another sum
    assert not np.array_equal(backwards.view(np.int32), ordered_dot(a, b, d).view(np.int32))


def test_bits_held_in_integers_are_refused():
    a, b, d = operands(2)
    with pytest.raises(TypeError, match="uint16"):
        ordered_dot(a.astype(np.uint16), b, d)

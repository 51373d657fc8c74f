"""The engine's Triton kernels in the interpreter: what they compute. A GPU's order of additions needs a GPU."""

import subprocess
import sys

import pytest
from interpreted import interpreted

NAMES = {
    "gemv": 4,
    "gemm": 4 + 5,
    "gemv, all rounded": 4,
    "gemm, exact": 4,
    "gemm, exact weights": 4,
    "norm": 4,
    "attention": 9,
}


@pytest.fixture(scope="module")
def results():
    return interpreted("kernels_interpreted.py")


def test_every_result_is_written_and_close_to_float64(results):
    cases = [case for case in results if "worst" in case and not case.get("every_code")]
    counts = {name: sum(case["name"] == name for case in cases) for name in NAMES}
    assert counts == NAMES
    for case in cases:
        assert case["not_finite"] == 0 and case["beyond_bound"] == 0, case


def test_no_rows_give_no_rows(results):
    empty = {case["name"] for case in results if case.get("shape", [1])[0] == 0}
    assert empty == set(NAMES)


def test_a_row_alone_has_the_same_bits(results):
    cases = [case for case in results if "rows_differ" in case]
    assert len(cases) == 20 + 4 + 3 + 3
    assert not [case for case in cases if case["rows_differ"]]


def test_experts_and_their_sum_in_one_launch_give_the_bits_of_many(results):
    assert [case["same"] for case in results if case["name"] == "at once"] == [True] * 3


def test_every_code_and_scale_is_exact(results):
    cases = [case for case in results if case.get("every_code")]
    assert len(cases) == 5
    assert not [case for case in cases if case["beyond_bound"] or case["shape"] != [16, 254]]


def test_rounding_to_bfloat16_is_torchs(results):
    (case,) = (case for case in results if case["name"] == "rounding to bfloat16")
    assert case["beyond_bound"] == 0, case


def test_nan_and_infinity_stay_in_their_row(results):
    cases = [case["special"] for case in results if "special" in case]
    assert cases == [[True] * 4] * 5


def test_misfits_are_refused(results):
    (case,) = (case for case in results if case["name"] == "misfits")
    assert case["raised"] == [True] * 4


def test_importing_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import batch_variance.kernels.sets, batch_variance.engine"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Runs a script in a process of its own, where Triton's interpreter is on and its dot has one order of additions.

The interpreter gives `tl.dot` to the machine's BLAS, whose kernels for some CPUs add up a row in another order than for
others, and in another order by where in its tile the row lies. What these scripts test is Triton code, not a BLAS.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


def interpreted(script: str):
    """What the last line that ``script``, beside this file, prints says in JSON. Skips where Triton is absent."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, __file__, str(Path(__file__).with_name(script))],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def ordered_dot(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """``a @ b + d`` for a [m, k] and b [k, n], added from the first k to the last, then ``d``, each step rounded to d's dtype.

    The sum runs over the outermost axis of contiguous products, which numpy adds up in turn, whole tile by whole tile.
    """
    if not all(np.issubdtype(x.dtype, np.floating) for x in (a, b, d)):  # bfloat16 lies there as uint16
        raise TypeError(f"a dot of {a.dtype} and {b.dtype} into {d.dtype} is not floating point here: widen its operands first.")
    products = np.empty((a.shape[1], *d.shape), d.dtype)
    np.multiply(a.astype(d.dtype).T[:, :, None], b.astype(d.dtype)[:, None, :], out=products)
    return np.add.reduce(products, axis=0) + d


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(ordered_dot(a.data, b.data, d.data), d.dtype.scalar)


if __name__ == "__main__":
    from triton.runtime import interpreter

    interpreter.InterpreterBuilder.create_dot = _create_dot
    script = sys.argv.pop(1)
    runpy.run_path(script, run_name="__main__")

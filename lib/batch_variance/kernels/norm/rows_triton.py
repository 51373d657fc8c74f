"""Softmax, log-softmax, mean and sum over the last dimension for CUDA: one program a row, one block size, one order.

A row's columns are dealt to BLOCK lanes, each lane adds its own from left to right, and the lanes are added at the
end by the compiler's fixed tree. Nothing of that looks at how many rows there are.
"""

import triton
import triton.language as tl


@triton.jit
def softmax(x, y, K, BLOCK: tl.constexpr, LOG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        value = tl.load(x + row * K + start + columns, mask=start + columns < K, other=float("-inf")).to(tl.float32)
        # A NaN must reach the result: a plain maximum drops it.
        top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(top, axis=0)
    largest = tl.where(tl.sum((top != top).to(tl.int32), axis=0) > 0, float("nan"), largest)
    lanes = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        inside = start + columns < K
        value = tl.load(x + row * K + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        lanes += tl.where(inside, tl.exp(value - largest), 0.0)
    total = tl.sum(lanes, axis=0)
    for start in range(0, K, BLOCK):
        inside = start + columns < K
        value = tl.load(x + row * K + start + columns, mask=inside, other=0.0).to(tl.float32)
        if LOG:
            result = value - largest - tl.log(total)
        else:
            result = tl.exp(value - largest) / total
        tl.store(y + row * K + start + columns, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def sum_rows(x, y, K, divisor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    lanes = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        lanes += tl.load(x + row * K + start + columns, mask=start + columns < K, other=0.0).to(tl.float32)
    tl.store(y + row, (tl.sum(lanes, axis=0) / divisor).to(y.dtype.element_ty))

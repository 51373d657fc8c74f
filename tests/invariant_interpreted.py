"""Run by test_invariant.py in a process of its own with Triton's interpreter on: prints one JSON line of results.

Every output starts as NaN. Products are float32 or float16, since the interpreter's bfloat16 is wrong.
"""

import json

import torch
import triton.language as tl

from batch_variance.kernels.gemm import invariant
from batch_variance.kernels.gemm.invariant import Config
from batch_variance.kernels.moe import invariant as moe
from batch_variance.kernels.moe.reference import grouped_float64
from batch_variance.kernels.norm import rows_triton
from batch_variance.kernels.nvfp4 import invariant as nvfp4
from batch_variance.kernels.nvfp4.reference import matmul_float64
from batch_variance.numerics import NVFP4Tensor, pack, quantize

plain_empty = torch.empty


def poisoned(*size, **options):
    made = plain_empty(*size, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made


torch.empty = poisoned
results = []
FORMS = (
    "parallel 16x32x32 w4 s2",
    "parallel 32x32x64 w4 s2 tma",
    "parallel 16x64x32 w4 s2 swap",
    "parallel 16x64x64 w4 s2 tma swap",
    "in-turn 32x64x64 w4 s2 tma",
    "in-turn 16x64x32 w4 s2",
)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def record(name, found, exact, bound):
    results.append(
        {
            "name": name,
            "shape": list(found.shape),
            "beyond_bound": int((~((found.double() - exact).abs() <= bound)).sum()),
        }
    )


for dtype in (torch.float16, torch.float32):
    for m, n, k, count in (
        (5, 70, 264, 2),
        (37, 100, 384, 3),
        (1, 64, 128, 1),
        (33, 65, 200, 2),
        (20, 65, 192, 1),
        (0, 5, 16, 1),
    ):
        x, w, b = random(m, k, dtype=dtype), random(n, k, seed=1, dtype=dtype), random(n, seed=2, dtype=dtype)
        exact = x.double() @ w.double().t() + b.double()
        size = x.double().abs() @ w.double().abs().t() + b.double().abs()
        for form in (*FORMS, "in-turn 16x64x32 w4 s2 hold"):
            found = invariant.matmul(x, w, b, Config.parse(form), count)
            record("gemm", found, exact, torch.finfo(dtype).eps * exact.abs() + k * 2.0**-23 * size)

model = nvfp4.INVARIANT.but("no rounding of x", activations="float32")
for m, n, k, count in ((5, 70, 272, 2), (37, 100, 384, 3), (1, 64, 128, 1), (33, 65, 208, 2), (0, 5, 16, 1)):
    x, w = random(m, k), quantize(random(n, k, seed=1))
    exact = matmul_float64(x, w, model)
    size = x.abs().double() @ w.dequantize().abs().double().t()
    for form in FORMS:
        if "tma" not in form:
            record(
                "nvfp4", nvfp4.matmul(x, w, Config.parse(form), count, operand=tl.float32), exact, k * 2.0**-22 * size
            )

codes = pack(torch.arange(16, dtype=torch.uint8)).expand(254, 8).contiguous()
scales = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8).view(torch.float8_e4m3fn)
w = NVFP4Tensor(codes, scales.unsqueeze(1).contiguous(), torch.tensor(0.0123))
for form in FORMS[::2]:
    found = nvfp4.matmul(torch.eye(16), w, Config.parse(form), 1, operand=tl.float32)
    record("every code", found, matmul_float64(torch.eye(16), w, model).float().double(), 0.0)

for count, columns in ((3, 40), (2, 1030), (1, 1)):
    x = random(count, columns)
    for log in (False, True):
        y = torch.empty(count, columns)
        rows_triton.softmax[(count,)](x, y, columns, BLOCK=64, LOG=log)
        exact = (x.double().log_softmax if log else x.double().softmax)(-1)
        record("softmax", y, exact, 1e-6 * (1 + exact.abs()))
    y = torch.empty(count)
    rows_triton.sum_rows[(count,)](x, y, columns, float(columns), BLOCK=64)
    record("mean", y, x.double().mean(-1), 1e-6)
generator = torch.Generator().manual_seed(0)
for tokens, top_k, count, n, k, segments in (
    (1, 2, 4, 70, 128, 1),
    (40, 2, 3, 33, 200, 2),
    (9, 3, 3, 64, 64, 1),
    (0, 2, 4, 5, 16, 1),
):
    x, w = random(tokens, k), random(count, n, k, seed=1)
    experts = (
        torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)])
        if tokens
        else torch.zeros(0, 2).long()
    )
    if tokens == 40:
        experts[:, 0] = 1  # one expert crowded over several blocks, pairs of one token with itself among them
    for block in (16, 32):
        found = moe.launch(x, w, experts, block, segments)
        size = torch.einsum("tk,tjnk->tjn", x.double().abs(), w.double().abs()[experts])
        record("moe", found, grouped_float64(x, w, experts), k * 2.0**-23 * size)

x = random(3, 40)
x[0, 30], x[1, 5], x[2] = torch.nan, torch.inf, -torch.inf
y = torch.empty(3, 40)
rows_triton.softmax[(3,)](x, y, 40, BLOCK=16, LOG=False)
results.append({"name": "special", "nan": y.isnan().tolist() == x.softmax(-1).isnan().tolist()})
print(json.dumps(results))

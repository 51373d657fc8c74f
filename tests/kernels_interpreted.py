"""Run by test_kernels_triton.py in a process of its own with Triton's interpreter on: prints one JSON line of results.

Every output tensor starts as NaN. Products are float32, since the interpreter's bfloat16 is wrong.
"""

import json

import torch
import triton.language as tl

from batch_variance.kernels.attention import triton as attention
from batch_variance.kernels.attention.reference import attend_float64
from batch_variance.kernels.gemm import triton as gemm
from batch_variance.kernels.moe import in_turn as moe_reference
from batch_variance.kernels.moe import in_turn_triton as moe
from batch_variance.kernels.norm import triton as norm
from batch_variance.kernels.nvfp4 import GEMM, GEMV
from batch_variance.kernels.nvfp4 import triton as nvfp4
from batch_variance.kernels.nvfp4.reference import matmul_float64
from batch_variance.kernels.sets import PreparedExperts, PreparedNVFP4
from batch_variance.numerics import NVFP4Tensor, pack, quantize

ARITHMETICS = [
    GEMV, GEMM, GEMV.but("gemv, all rounded", activations="bfloat16", weights="bfloat16", tensor_scale="before"),
    GEMM.but("gemm, exact", activations="float32", weights="float32", tensor_scale="after"),
    GEMM.but("gemm, exact weights", tensor_scale="after"),
]
plain_empty = torch.empty
torch.empty = lambda *size, **options: plain_empty(*size, **options).fill_(torch.nan)
results = []


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def record(name, found, exact, bound, **more):
    """bound: largest error allowed at each element."""
    error = (found.double() - exact).abs()
    results.append({
        "name": name, "shape": list(found.shape), "not_finite": int((~found.isfinite()).sum()),
        "beyond_bound": int((~(error <= bound)).sum()), "worst": error.max().item() if error.numel() else 0.0, **more,
    })


def differ(operation, rows, alone=(0, 1)):
    """Rows whose bits differ when computed alone."""
    together = operation(rows)
    return sum(
        not torch.equal(operation(rows[i : i + 1])[0].view(torch.int32), together[i].view(torch.int32)) for i in alone
    )


def raises(operation):
    try:
        operation()
    except ValueError:
        return True
    return False


for arithmetic in ARITHMETICS:
    def run(x, w):
        return nvfp4.matmul(x, w, arithmetic, operand=tl.float32)

    for m, n, k in ((0, 5, 16), (1, 5, 16), (3, 20, 144), (65, 70, 80)):
        if m == 65 and arithmetic.order == "gemv":
            m = 9
        x, w = random(m, k), quantize(random(n, k, seed=1))
        bound = (k + 1) * 2.0**-23 * matmul_float64(x.abs(), NVFP4Tensor(w.codes & 0x77, w.block_scale, w.tensor_scale))
        record(arithmetic.name, run(x, w), matmul_float64(x, w, arithmetic), bound + 1e-30,
               rows_differ=differ(lambda rows: run(rows, w), x, (0, m - 1)) if m else 0)
    # Each finite e4m3 scale with each code, read out by one-hot rows: nothing is added, so nothing may differ.
    codes = pack(torch.arange(16, dtype=torch.uint8)).expand(254, 8).contiguous()
    scales = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    w = NVFP4Tensor(codes, scales.unsqueeze(1).contiguous(), torch.tensor(0.0123))
    exact = matmul_float64(torch.eye(16), w, arithmetic).float().double()
    record(arithmetic.name, run(torch.eye(16), w), exact, 0.0, every_code=True)
    # NaN and infinities stay in their row; the rounding to bfloat16 keeps them and ties go to even.
    x, w = random(4, 32), quantize(random(5, 32, seed=1).abs() + 1)
    x[1, 0], x[2, 0] = torch.nan, torch.inf  # what a load past row 0 or 1 would meet
    found = run(x, w)
    results.append(
        {
            "name": arithmetic.name,
            "special": [
                found[0].isfinite().all().item(),
                found[1].isnan().all().item(),
                found[2].isposinf().all().item(),
                found[3].isfinite().all().item(),
            ],
        }
    )

odd = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 3.3e38, 1e-40, -0.0, 5.5])
x = torch.diag_embed(odd)
x = torch.cat([x, torch.zeros(8, 8)], dim=1)
ones = NVFP4Tensor(
    torch.full((3, 8), 0x22, dtype=torch.uint8), torch.ones(3, 1).to(torch.float8_e4m3fn), torch.tensor(1.0)
)
record("rounding to bfloat16", nvfp4.matmul(x, ones, GEMV.but("rounded", activations="bfloat16")),
       odd.bfloat16().double()[:, None].expand(8, 3), 0.0)

# All experts at once: each row's bits are those of its own expert's matmul, whichever arithmetic that one takes.
counts, arithmetics = [2, 0, 66, 1, 3], [GEMV, GEMM, GEMM, GEMM, GEMV]
x, experts = random(sum(counts), 48), [quantize(random(20, 48, seed=e)) for e in range(5)]
found = nvfp4.grouped_matmul(x, PreparedExperts([PreparedNVFP4(w) for w in experts]).stacked, counts, arithmetics, operand=tl.float32)
alone = [nvfp4.matmul(*case, operand=tl.float32) for case in zip(x.split(counts), experts, arithmetics)]
results.append({"name": "at once", "same": torch.equal(found.view(torch.int32), torch.cat(alone).view(torch.int32))})

for rounded in (False, True):
    parts = torch.cat([random(9, 12, 300), torch.tensor([0.0, -0.0, 1e38, torch.inf, torch.nan]).repeat(9, 12, 4)], dim=2)
    found, plain = moe.add_in_turn(parts, rounded), moe_reference.add_in_turn(parts, rounded)
    same = torch.equal(found.nan_to_num(7.0).view(torch.int32), plain.nan_to_num(7.0).view(torch.int32))
    results.append({"name": "at once", "same": same and torch.equal(found.isnan(), plain.isnan())})

for m, n, k in ((0, 5, 7), (1, 1, 1), (17, 65, 33), (3, 70, 64)):
    x, w = random(m, k), random(n, k, seed=1)
    bound = k * 2.0**-23 * (x.abs().double() @ w.abs().double().t())
    record(
        "gemm",
        gemm.matmul(x, w),
        x.double() @ w.double().t(),
        bound,
        rows_differ=differ(lambda rows: gemm.matmul(rows, w), x) if m > 1 else 0,
    )
strided = random(6, 40)[:, ::2]
record("gemm", gemm.matmul(strided, random(5, 20, seed=1)), strided.double() @ random(5, 20, seed=1).double().t(), 1e-4)

for rows, k in ((0, 40), (1, 40), (3, 1030)):
    x, w = random(rows, k), random(k, seed=1)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    record("norm", norm.rms_norm(x, w, 1e-5), exact, 1e-6 * exact.abs() + 1e-30,
           rows_differ=differ(lambda part: norm.rms_norm(part, w, 1e-5), x) if rows > 1 else 0)
turned, w = random(40, 3).t(), random(40, seed=1)
exact = turned.double() / (turned.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
record("norm", norm.rms_norm(turned, w, 1e-5), exact, 1e-5)

for heads, kv_heads, dim, page in ((6, 2, 16, 16), (4, 4, 32, 16), (20, 1, 16, 32)):
    lengths = torch.tensor([0, 1, page, page + 1, 2 * page + 5])
    tables = torch.randperm(16, generator=torch.Generator().manual_seed(3))[:15].view(5, 3)
    k, v = random(16, page, kv_heads, dim), random(16, page, kv_heads, dim, seed=1)
    for row, length in enumerate(lengths.tolist()):
        for pages in (k, v):
            held = pages[tables[row]].flatten(0, 1)
            held[length:] = torch.nan
            pages[tables[row]] = held.view(3, page, kv_heads, dim)
    q = random(5, heads, dim, seed=2)
    record(
        "attention",
        attention.attend_paged(q, k, v, tables, lengths),
        attend_float64(q, k, v, tables, lengths),
        2e-6,
        rows_differ=differ(
            lambda i: attention.attend_paged(q[i], k, v, tables[i], lengths[i]), torch.arange(5), (0, 1, 3, 4)
        ),
    )
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    record(
        "attention",
        attention.attend_paged(turned, k, v, tables, lengths),
        attend_float64(q, k, v, tables, lengths),
        2e-6,
    )
    none = attention.attend_paged(q[:0], k, v, tables[:0], lengths[:0])
    record("attention", none, torch.zeros(0, heads, dim, dtype=torch.float64), 0.0)

w = quantize(random(5, 32))
results.append(
    {
        "name": "misfits",
        "raised": [
            raises(lambda: nvfp4.matmul(random(3, 16), w, GEMV)),
            raises(lambda: nvfp4.matmul(random(3, 32).double(), w, GEMM)),
            raises(lambda: gemm.matmul(random(3, 16), random(5, 8))),
            raises(lambda: gemm.matmul(random(3, 16).half(), random(5, 16))),
        ],
    }
)
print(json.dumps(results))

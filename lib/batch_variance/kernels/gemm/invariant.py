"""y = x W^T + b with one bit class over every number of rows: the class, its configurations, and the launch.

The class of a weight is its number of segments and their length, functions of (N, K) alone. Inside it a
configuration is chosen by M as freely as an autotuner likes; what may be chosen is what `classes` has proved on the
device, and the table of chosen ones is data (``data/tuned/gemm.csv``).
"""

import csv
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...common import BadInput, data_path
from ..counters import arrival_counters

MARKS = ("tma", "swap", "hold")
STEP = 128  # segments are whole multiples of this many products; every block_k divides it


@dataclass(frozen=True)
class Config:
    """One launch shape. form: "parallel" (a program a segment) or "in-turn" (a program a tile, its segments one after
    another); tma: tiles are fetched by tensor descriptors; swap: the weight is the first operand, so that few rows fill
    the narrow side of the tensor core; hold: in turn, the running sum stays in registers."""

    form: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    tma: bool = False
    swap: bool = False
    hold: bool = False

    def __str__(self) -> str:
        marks = "".join(f" {mark}" for mark in MARKS if getattr(self, mark))
        return f"{self.form} {self.block_m}x{self.block_n}x{self.block_k} w{self.warps} s{self.stages}{marks}"

    @classmethod
    def parse(cls, text: str) -> "Config":
        """The configuration that ``str`` wrote. Raises BadInput for other text."""
        try:
            form, blocks, warps, stages, *marks = text.split()
            block_m, block_n, block_k = (int(size) for size in blocks.split("x"))
            found = cls(
                form, block_m, block_n, block_k, int(warps[1:]), int(stages[1:]), *(mark in marks for mark in MARKS)
            )
        except (ValueError, TypeError) as error:
            raise BadInput(f"{text!r} is no configuration: write it as 'parallel 16x64x128 w4 s4 tma swap'.") from error
        if form not in ("parallel", "in-turn") or set(marks) - set(MARKS) or STEP % found.block_k:
            raise BadInput(
                f"{text!r} is no configuration: parallel or in-turn, block_k a divisor of {STEP}, marks {', '.join(MARKS)}."
            )
        return found


# Used where the table has nothing for the shape: (largest M, configuration).
DEFAULTS = (
    (16, Config("parallel", 16, 64, 128, 4, 5, tma=True, swap=True)),
    (32, Config("parallel", 32, 64, 128, 4, 4, tma=True, swap=True)),
    (128, Config("parallel", 64, 64, 128, 4, 4, tma=True)),
    (512, Config("parallel", 64, 128, 64, 4, 4, tma=True)),
    (None, Config("in-turn", 128, 256, 64, 8, 3, tma=True)),
)

# float32 products are made without tensor cores, and its tiles are twice as large: one plain shape serves.
FLOAT32 = Config("parallel", 32, 64, 32, 4, 3)


@lru_cache
def tuned(benchmark: str) -> dict[tuple[int, int], tuple[int, tuple[tuple[int, Config], ...]]]:
    """The table ``data/tuned/<benchmark>.csv`` as (N, K) to the number of segments and (largest M, configuration) by M;
    empty where there is none."""
    path = data_path("tuned", f"{benchmark}.csv")
    found: dict[tuple[int, int], tuple[int, list]] = {}
    if path.exists():
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                entry = found.setdefault((int(row["n"]), int(row["k"])), (int(row["segments"]), []))
                entry[1].append((int(row["m"]), Config.parse(row["config"])))
    return {shape: (count, tuple(sorted(rows, key=lambda r: r[0]))) for shape, (count, rows) in found.items()}


BEYOND = 1024  # the last configuration of a table that ends below is not taken for more rows: it was tuned for few


def by_rows(table, defaults, M: int) -> Config:
    """The configuration of the smallest row count in the table that is M or more; beyond all, the last, or the
    defaults' where the table ends early or is empty. table, defaults: (largest M, configuration) rising, None for any
    M."""
    if not table or table[-1][0] < min(M, BEYOND):
        table = defaults
    return next((config for most, config in table if most is None or M <= most), table[-1][1])


def chosen(benchmark: str, defaults, M: int, N: int, K: int) -> Config:
    """What the table of a benchmark, or else the defaults, choose for M rows of a weight [N, K]."""
    return by_rows(tuned(benchmark).get((N, K), (0, ()))[1], defaults, M)


def segments(N: int, K: int) -> int:
    """Segments that K falls into for a weight [N, K]: enough that a few rows keep a GPU's multiprocessors busy."""
    if (N, K) in tuned("gemm"):
        return tuned("gemm")[N, K][0]
    wanted = 1 if N > 6144 else 2 if N > 3072 else 4
    return max(min(wanted, K // 512), 1)


def segment_steps(K: int, count: int) -> int:
    """Length of a segment in steps of STEP products; the last one may be shorter. Raises BadInput for no such cut."""
    steps = -(-K // STEP)
    length = -(-steps // max(count, 1))
    if count < 1 or (count - 1) * length >= max(steps, 1):
        raise BadInput(f"{K} products cannot fall into {count} segments of whole multiples of {STEP}: give fewer.")
    return length


def configuration(M: int, N: int, K: int) -> Config:
    """What the table, or else the defaults, choose for M rows."""
    return chosen("gemm", DEFAULTS, M, N, K)


def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: Config | None = None,
    count: int | None = None,
) -> torch.Tensor:
    """[M, N] in x's dtype from x [M, K], weight [N, K] and bias [N]; products exact, sums float32, one rounding at
    the end.

    bfloat16, float16 or float32 (IEEE products, no TF32). config and count override the table's configuration and
    the class's number of segments. Raises BadInput for shapes, dtypes or devices that do not fit.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from . import invariant_triton as kernels

    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or 0 in weight.shape:
        raise BadInput(f"x is {list(x.shape)} and weight {list(weight.shape)}: give [M, K] and [N, K], N and K not 0.")
    same = {t.dtype for t in (x, weight, bias) if t is not None}
    if len(same) != 1 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise BadInput(f"dtypes {', '.join(sorted(map(str, same)))}: give one of bfloat16, float16 and float32 to all.")
    (M, K), N = x.shape, weight.shape[0]
    if bias is not None and list(bias.shape) != [N]:
        raise BadInput(f"bias is {list(bias.shape)}: give [{N}].")
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    count = segments(N, K) if count is None else count
    length = segment_steps(K, count)
    config = config or (FLOAT32 if x.dtype == torch.float32 else configuration(M, N, K))
    x, weight = x.contiguous(), weight.contiguous()
    tma = config.tma and all(t.data_ptr() % 16 == 0 for t in (x, weight)) and K * x.element_size() % 16 == 0
    a, b = x, weight
    if tma:
        a = TensorDescriptor.from_tensor(x, [config.block_m, config.block_k])
        b = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])
    shape = dict(BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k)
    # In turn, every segment takes as many steps, so the last one may run past K where K is not so many whole segments.
    even = K == count * length * STEP if config.form == "in-turn" else K % config.block_k == 0
    marks = dict(TMA=tma, EVEN=even, BIAS=bias is not None)
    launch = dict(num_warps=config.warps, num_stages=config.stages)
    tiles_m, tiles_n = -(-M // config.block_m), -(-N // config.block_n)
    bias = y if bias is None else bias
    if config.form == "in-turn":
        programs = min(_programs(x.device), tiles_m * tiles_n)
        cells = programs * config.block_m * config.block_n if count > 1 and not config.hold else 1
        parked = torch.empty(cells, dtype=torch.float32, device=x.device)
        kernels.in_turn[(programs,)](
            a, b, bias, y, parked, M, N, K, length, **shape, SEGMENTS=count, GROUP=8, HOLD=config.hold, **marks, **launch
        )
        return y
    split = count > 1
    tiles = tiles_m * tiles_n if split else 1
    parts = torch.empty(
        tiles * count * config.block_m * config.block_n if split else 1, dtype=torch.float32, device=x.device
    )
    arrived = arrival_counters(x.device, tiles)
    kernels.parallel[(tiles_n, count, tiles_m)](
        a, b, bias, y, parts, arrived, M, N, K, length, count, **shape, SPLIT=split, GROUP=8, SWAP=config.swap,
        **marks, **launch
    )
    return y

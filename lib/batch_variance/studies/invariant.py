"""Invariant against default: whose bits change with the number of rows, in which order they add, how wrong they are,
what they cost.

The library's matmul and this project's invariant one are run live on the device at hand, a CPU's on a CPU; GPU
tables come from ``data/recorded``, where ``batch-variance bench`` put them, and are shown where they exist.
"""

from functools import cache
from itertools import combinations

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from pydantic import field_validator

from ..common import Rate, data_path, resolve_device
from ..common.devices import simulated_tier
from ..kernels.classes import Classes, classify
from ..kernels.decode import Cache, DecodeInputs, attend
from ..kernels.use import InvariantKernels, linear
from ..numerics.trees import (
    Tree,
    in_batches,
    lanes,
    matmul_tree,
    pairwise,
    reduction_tree,
    reveal,
    segmented,
    sequential,
    units_for,
)
from ..schedules import BATCH_WIDE, make_plan, own_length_rule
from .parameters import StudyParameters
from .sources import cite, named

BLOCK, PROBES = 64, 64  # tokens in a block of the KV cache, and probes that one decode call carries
LIBRARY, INVARIANT, ALONE = "library", "invariant", "library, row by row"


class Parameters(StudyParameters):
    """Notebook 05's parameters."""

    features: int
    outputs: int
    sizes: list[int]
    tree_terms: int
    tree_sizes: list[int]
    split_lengths: list[int]
    split_rule: str
    split_parts: int
    error_rows: int
    seed: int
    device: str

    @field_validator("split_lengths")
    @classmethod
    def _lengths(cls, values):
        if len(values) < 2 or not 2 * BLOCK <= values[0] <= 64 * BLOCK or min(values) < 1:
            raise ValueError(
                f"give two lengths or more, the first (the row watched) of {2 * BLOCK} to {64 * BLOCK} tokens."
            )
        return values

    @field_validator("split_rule")
    @classmethod
    def _rule(cls, value):
        own_length_rule(value)
        return value

    @field_validator("features", "outputs", "error_rows", "split_parts")
    @classmethod
    def _positive(cls, value):
        if value < 1:
            raise ValueError("give 1 or more.")
        return value

    @field_validator("tree_terms")
    @classmethod
    def _terms(cls, value):
        if not 8 <= value <= 512:
            raise ValueError("give 8 to 512 terms: a drawing of more shows nothing.")
        return value

    @field_validator("sizes", "tree_sizes")
    @classmethod
    def _sizes(cls, values):
        if len(set(values)) < 2 or min(values) < 1:
            raise ValueError("give two row counts or more, each 1 or more: something must change between them.")
        return sorted(set(values))


def tier(p: Parameters) -> str:
    return "live-gpu" if resolve_device(p.device).type == "cuda" else "cpu-native"


def _random(p: Parameters, *shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * p.seed + seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(resolve_device(p.device))


# ---------------------------------------------------------------- bits over row counts


def bit_classes(p: Parameters) -> pd.DataFrame:
    """`kernels.classes.classify` of the library's and the invariant matmul in float32 and bfloat16, boundaries
    sought."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        x = _random(p, max(p.sizes), p.features, dtype=dtype)
        w = _random(p, p.outputs, p.features, seed=1, dtype=dtype)
        word = str(dtype).removeprefix("torch.")
        candidates = {
            f"{LIBRARY}, {word}": lambda rows, w=w: F.linear(rows, w),
            f"{INVARIANT}, {word}": lambda rows, w=w: linear(rows, w),
        }
        found.append(classify(candidates, x, p.sizes, seek=True))
    return named(pd.concat(found, ignore_index=True), "classes")


def boundaries(frame: pd.DataFrame, candidate: str) -> list[int]:
    """Row counts at which the candidate's class is another than at the size tried before."""
    mine = frame[frame.candidate == candidate].sort_values("m")
    return mine.m[mine.bit_class != mine.bit_class.shift()].tolist()[1:]


def class_verdict(frame: pd.DataFrame) -> dict:
    """Counts and controls for the check that the invariant kernels keep their bits where the library's do not."""
    held = Classes(frame)
    ours = [name for name in frame.candidate.unique() if name.startswith(INVARIANT)]
    theirs = [name for name in frame.candidate.unique() if name.startswith(LIBRARY)]
    mine = frame[frame.candidate.isin(ours)]
    first = mine.groupby("candidate").bit_class.transform("first")
    return {
        "kept": Rate(int((mine.bit_class == first).sum()), len(mine)),
        "holds": all(held.invariant(name) for name in ours),
        "library_classes": {name: len(held.of(name)) for name in theirs},
        "library_varies": any(len(held.of(name)) > 1 for name in theirs),
        "no_row_moved": not bool(frame.rows_moved.any()),
    }


# ---------------------------------------------------------------- trees


def trees(p: Parameters) -> dict[tuple[str, int], Tree]:
    """(kernel, rows) to the tree by which it adds ``tree_terms`` products in float32."""
    device = resolve_device(p.device)
    return {
        (name, M): matmul_tree(operation, M, p.outputs, p.tree_terms, torch.float32, device)
        for name, operation in ((LIBRARY, F.linear), (INVARIANT, linear))
        for M in p.tree_sizes
    }


def tree_table(found: dict[tuple[str, int], Tree]) -> pd.DataFrame:
    """One row a kernel and row count: kernel, rows, tree (its name), depth, operands of its widest node."""
    rows = [
        {"kernel": k, "rows": M, "tree": t.name, "depth": t.depth, "widest node": max(t.ways)}
        for (k, M), t in found.items()
    ]
    return named(pd.DataFrame(rows), "trees")


def tree_edges(found: dict[tuple, Tree], what: str = " rows") -> pd.DataFrame:
    """Every different tree as edges to draw: panel, x, step, child_x, child_step. A term's place is its turn in the
    tree, a node's the middle of its operands; its step is the earliest at which its addition can happen."""
    panels: dict[Tree, dict[str, list]] = {}
    for (kernel, where), tree in found.items():
        panels.setdefault(tree, {}).setdefault(kernel, []).append(where)
    rows = []
    for tree, users in panels.items():
        where = "; ".join(f"{kernel}: {', '.join(map(str, places))}" for kernel, places in users.items())
        x, step = list(map(float, np.argsort(tree.leaf_order()))), [0] * tree.leaves
        for parts in tree.nodes:
            x.append(float(np.mean([x[part] for part in parts])))
            step.append(1 + max(step[part] for part in parts))
            rows += [(f"{where}{what} (depth {tree.depth})", x[-1], step[-1], x[part], step[part]) for part in parts]
    return pd.DataFrame(rows, columns=["panel", "x", "step", "child_x", "child_step"])


def trees_against_bits(p: Parameters, found: dict[tuple[str, int], Tree]) -> pd.DataFrame:
    """Every two row counts of a kernel: kernel, low, high, trees_equal, values_differ, values; float32 values of the
    rows that both have, over eight batches."""
    rows = []
    for name, operation in ((LIBRARY, F.linear), (INVARIANT, linear)):
        for low, high in combinations(p.tree_sizes, 2):
            differ = values = 0
            for seed in range(8):
                x, w = (
                    _random(p, high, p.tree_terms, seed=10 + seed),
                    _random(p, p.outputs, p.tree_terms, seed=50 + seed),
                )
                a, b = operation(x[:low], w), operation(x, w)[:low]
                differ += int((a.view(torch.int32) != b.view(torch.int32)).sum())
                values += a.numel()
            equal = found[name, low] == found[name, high]
            rows.append(
                {
                    "kernel": name,
                    "low": low,
                    "high": high,
                    "trees_equal": equal,
                    "values_differ": differ,
                    "values": values,
                }
            )
    return pd.DataFrame(rows)


def known_trees(n: int = 40) -> pd.DataFrame:
    """Trees of n terms known by construction, and whether the method gives them back: tree, recovered."""
    known = [sequential(n), pairwise(n), lanes(n, 8), segmented(n, 16)]
    found = [reduction_tree(lambda x, t=tree: t.evaluate(x), 8, n) == tree for tree in known]
    return named(pd.DataFrame({"tree": [tree.name for tree in known], "recovered": found}), "known-trees")


def tree_verdict(found: dict[tuple[str, int], Tree], against: pd.DataFrame, p: Parameters) -> dict:
    """Counts and controls for the checks on trees."""
    count = {
        name: len({tree.name for (kernel, _), tree in found.items() if kernel == name}) for name in (LIBRARY, INVARIANT)
    }
    agree = against.trees_equal == (against.values_differ == 0)
    again = matmul_tree(F.linear, p.tree_sizes[0], p.outputs, p.tree_terms, torch.float32, resolve_device(p.device))
    known = known_trees()
    recovered = Rate(int(known.recovered.sum()), len(known))
    return {
        "library": count[LIBRARY],
        "invariant": count[INVARIANT],
        "agree": Rate(int(agree.sum()), len(agree)),
        "stable": again == found[LIBRARY, p.tree_sizes[0]],
        "recovered": recovered,
        "known": known,
        "told_apart": sequential(40) != pairwise(40) and recovered.events == recovered.trials,
        "both_happened": bool(against.trees_equal.any() and not against.trees_equal.all()),
    }


def split_tree(lengths: list[int], rule: str, parts: int, device: torch.device) -> Tree:
    """The tree by which split-KV decode adds the blocks of row 0 in this batch, a leaf a block.

    Queries and keys are zero, so every token has weight one; each column of the values carries a probe, in the first
    token of each block of row 0. float32; the Triton kernels on CUDA, their emulation elsewhere.
    """
    blocks, pages = -(-lengths[0] // BLOCK), -(-max(lengths) // BLOCK)
    table = torch.arange(len(lengths) * pages, dtype=torch.int32, device=device).view(len(lengths), pages)
    tokens = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = torch.zeros(len(lengths), 16, 16, device=device)
    keys = torch.zeros(table.numel(), BLOCK, 1, 16, device=device)
    plan = make_plan(rule, lengths, parts, BLOCK)

    def run(probes: torch.Tensor) -> torch.Tensor:
        values = torch.zeros(table.numel(), BLOCK, 1, PROBES, device=device)
        values[:blocks, 0, 0] = probes.t().float().to(device)
        out, _ = attend(DecodeInputs(q, (Cache(keys, values, tokens, block_table=table),), PROBES), plan)
        # The kernel divides by the row's length in float32: undo it, and the rounding that it brought.
        counts = out[0, 0].double().cpu() * lengths[0]
        near = counts.round()
        return torch.where((counts - near).abs() < 1e-3, near, counts)

    return reveal(in_batches(run, PROBES), blocks, units_for(torch.float32))


def split_trees(p: Parameters) -> dict[tuple[str, str], Tree]:
    """(rule, where) to the tree of the watched row, alone and in its batch, under the batch-wide schedule and the
    rule."""
    device = resolve_device(p.device)
    batches = (("alone", p.split_lengths[:1]), ("in the batch", p.split_lengths))
    return {
        (rule, where): split_tree(lengths, rule, p.split_parts, device)
        for rule in (BATCH_WIDE, p.split_rule)
        for where, lengths in batches
    }


def split_tier(p: Parameters) -> str:
    return simulated_tier(resolve_device(p.device))


def split_verdict(found: dict[tuple[str, str], Tree], p: Parameters) -> dict:
    """Trees of each schedule and controls for the check that an own-length rule keeps the row's tree."""
    again = split_tree(p.split_lengths, p.split_rule, p.split_parts, resolve_device(p.device))
    pieces = {key: plan_pieces(p, *key) for key in found}
    return {
        "default": len({tree.name for (rule, _), tree in found.items() if rule == BATCH_WIDE}),
        "own": len({tree.name for (rule, _), tree in found.items() if rule == p.split_rule}),
        "stable": again == found[p.split_rule, "in the batch"],
        "pieces": pieces,
        "moved": pieces[BATCH_WIDE, "alone"] != pieces[BATCH_WIDE, "in the batch"],
    }


def split_table(found: dict[tuple[str, str], Tree], p: Parameters) -> pd.DataFrame:
    """The watched row under each schedule, alone and in the batch: rule, where, pieces, tree (its name)."""
    rows = [
        {"rule": rule, "where": where, "pieces": plan_pieces(p, rule, where), "tree": tree.name}
        for (rule, where), tree in found.items()
    ]
    return named(pd.DataFrame(rows), "split-trees")


def plan_pieces(p: Parameters, rule: str, where: str) -> int:
    """Pieces that the plan cuts the watched row into."""
    lengths = p.split_lengths[:1] if where == "alone" else p.split_lengths
    return int(make_plan(rule, lengths, p.split_parts, BLOCK).pieces[0])


# ---------------------------------------------------------------- error


def errors(p: Parameters) -> pd.DataFrame:
    """Relative error against float64: dtype, kernel, rows, error, over ``error_rows`` rows, for the library all at
    once and row by row; "coarse" is the library's result moved by 2^-7 of itself, a positive control."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        x = _random(p, p.error_rows, p.features, seed=2, dtype=dtype)
        w = _random(p, p.outputs, p.features, seed=3, dtype=dtype)
        exact = x.double() @ w.double().t()
        plain = F.linear(x, w)
        alone = torch.cat([F.linear(x[i : i + 1], w) for i in range(len(x))])
        coarse = (plain.float() * (1 + 2.0**-7)).to(dtype)
        for kernel, y in ((LIBRARY, plain), (ALONE, alone), (INVARIANT, linear(x, w)), ("coarse", coarse)):
            error = float((y.double() - exact).norm() / exact.norm())
            found.append(
                {"dtype": str(dtype).removeprefix("torch."), "kernel": kernel, "rows": p.error_rows, "error": error}
            )
    return named(pd.DataFrame(found), "errors")


def error_verdict(frame: pd.DataFrame) -> dict:
    """Largest ratio of the invariant kernel's error to the library's in the batch and row by row, and the coarse
    one's least."""
    wide = frame.pivot(index="dtype", columns="kernel", values="error")
    return {
        "batch": float((wide[INVARIANT] / wide[LIBRARY]).max()),
        "alone": float((wide[INVARIANT] / wide[ALONE]).max()),
        "coarse": float((wide.coarse / wide[LIBRARY]).min()),
    }


# ---------------------------------------------------------------- in use


def _model(p: Parameters, dtype) -> torch.nn.Module:
    torch.manual_seed(p.seed)
    parts = torch.nn
    model = parts.Sequential(
        parts.Linear(p.features, p.outputs),
        parts.SiLU(),
        parts.Linear(p.outputs, p.features),
        parts.RMSNorm(p.features),
        parts.Linear(p.features, 256),
        parts.LogSoftmax(-1),
    )
    return model.to(dtype).to(resolve_device(p.device))


def in_use(p: Parameters) -> tuple[pd.DataFrame, InvariantKernels]:
    """A feed-forward model alone and in batches, as it is and under `InvariantKernels`: kernels, rows_checked,
    rows_differ, rerun_differs; and what the context manager saw."""
    model, x = _model(p, torch.float32), _random(p, max(p.sizes), p.features, seed=4)
    used, found = InvariantKernels(), []

    def inside(rows):
        with used:
            return model(rows)

    with torch.no_grad():
        for name, run in (("default", model), (INVARIANT, inside)):
            checked = min(32, len(x))
            alone = torch.cat([run(x[i : i + 1]) for i in range(checked)])
            again = torch.cat([run(x[i : i + 1]) for i in range(checked)])
            differ = total = 0
            for M in p.sizes:
                rows = min(M, checked)
                differ += int((run(x[:M])[:rows] != alone[:rows]).any(1).sum())
                total += rows
            found.append(
                {
                    "kernels": name,
                    "rows_checked": total,
                    "rows_differ": differ,
                    "rerun_differs": int((alone != again).sum()),
                }
            )
    return pd.DataFrame(found), used


# ---------------------------------------------------------------- recorded on a GPU


@cache
def recorded(name: str) -> pd.DataFrame | None:
    """A recorded table, or None where no GPU has written it yet."""
    path = data_path("recorded", f"{name}.csv")
    return pd.read_csv(path) if path.exists() else None


def recorded_on(frame: pd.DataFrame) -> str:
    one = frame.iloc[-1]
    return f"{one.gpu}, driver {one.driver}, torch {one.torch}, triton {one.triton}, {one.date}, commit {one.commit}"


def recorded_ratios(name: str, metric: str = "time") -> pd.DataFrame | None:
    """Invariant time over the default's in the same run: shape, m, value, baseline, ratio; None where not recorded."""
    frame = recorded(name)
    if frame is None:
        return None
    mine = frame[(frame.metric == metric) & (frame.policy == INVARIANT)]
    columns = ["kernel", "policy", "shape", "m", "value", "baseline", "ratio"]
    return named(mine[columns].reset_index(drop=True), f"{name} {metric}") if len(mine) else None


def recorded_classes(kernel: str = "gemm") -> pd.DataFrame | None:
    """shape, candidate, m, bit_class, rows_moved as recorded on a GPU; None where not recorded."""
    frame = recorded("gemm_classes")
    frame = None if frame is None else frame[frame.kernel == kernel]
    return None if frame is None or frame.empty else frame.reset_index(drop=True)


def geometric_mean(values) -> float:
    return float(np.exp(np.log(np.asarray(values, float)).mean()))


def cost_sentence(name: str, frame: pd.DataFrame | None) -> str:
    """What a recorded comparison says, or that there is none yet."""
    if frame is None:
        return f"No GPU has recorded `{name}` yet: `batch-variance bench {name}` does."
    best, worst = frame.loc[frame.ratio.idxmin()], frame.loc[frame.ratio.idxmax()]
    at = lambda text, row: cite(text, frame, kernel=row.kernel, shape=row["shape"], m=row.m)  # noqa: E731
    return (
        f"{name}: over {cite(len(frame), frame)} shapes and row counts the invariant kernel takes "
        f"{cite(format(geometric_mean(frame.ratio), '.3f'), frame)} times the default's time (geometric mean), at best "
        f"{at(f'{best.ratio:.2f}', best)} and at worst {at(f'{worst.ratio:.2f}', worst)} "
        f"(m = {at(worst.m, worst)}, {at(worst['shape'], worst)})."
    )


def class_counts(frame: pd.DataFrame) -> pd.DataFrame:
    """How many bit classes each candidate has for each recorded shape: shape, and a column a candidate."""
    found = frame.groupby(["shape", "candidate"], sort=False).bit_class.nunique().unstack()
    return named(found.reset_index().rename_axis(columns=None), "recorded-classes")


def recorded_class_verdict(frame: pd.DataFrame) -> dict:
    """Counts and controls for the recorded check: shapes in which the invariant dispatch keeps one class."""
    default = LIBRARY if (frame.candidate == LIBRARY).any() else "default"
    classes = class_counts(frame).set_index("shape")
    ours = frame[frame.candidate == INVARIANT]
    return {
        "kept": Rate(int((classes[INVARIANT] == 1).sum()), len(classes)),
        "default_classes": classes[default].astype(int).to_dict(),
        "default_varies": bool((classes[default] > 1).any()),
        "ran": bool((ours.failure.isna() | (ours.failure == "")).all()),
        "no_row_moved": not bool(ours.rows_moved.any()),
        "configurations": int(frame.candidate.nunique() - 2),
    }

"""How a decode scheduler cuts a row, what that does to the row's bits, and what a rule of the row's own length costs.

Schedules are exact integers everywhere. Arithmetic runs on the Triton kernels where there is a GPU and is emulated
elsewhere; the GPU's own measurements come from ``data/recorded`` (``split_scheduler_recording`` made them).
"""

import json
from functools import cache

import numpy as np
import pandas as pd
import torch
from pydantic import field_validator, model_validator

from ..common import Rate, data_path, resolve_device
from ..common.devices import simulated_tier
from ..kernels.decode import DecodeInputs, attend, exact, random_inputs
from ..kernels.decode.inputs import Cache
from ..numerics import row_scaled_ulp, ulp_distance
from ..schedules import BATCH_WIDE, decode_lengths, flashmla_schedule, make_plan, own_length_rule
from .parameters import StudyParameters
from .sources import named

EARLIER_BEST_SINGLE_RULE = (
    1.395  # fixed-chunk-4, batches 1 to 256, an H200 on 2026-11-30, one part a piece and one stream
)
BATCH_RANGES = ((1, 8), (16, 32), (64, 128), (256, 512), (1, 32), (64, 512), (1, 256), (1, 512))
ULP_BINS = (0, 1, 2, 4, 8, 16, 64, 1024, np.inf)


class Parameters(StudyParameters):
    """Notebook 02's parameters."""

    lengths: list[int]
    distribution: str
    batch: int
    longest: int
    heads: int
    num_sm_parts: int
    block_size: int
    overhead: int
    rule: str
    watched_row: int
    batch_sizes: list[int]
    arithmetic_batches: list[int]
    seed: int
    device: str

    @field_validator("lengths")
    @classmethod
    def _lengths(cls, values):
        if any(value < 0 for value in values):
            raise ValueError(f"{min(values)} is negative: a length is 0 tokens or more.")
        return values

    @field_validator("distribution")
    @classmethod
    def _distribution(cls, value):
        if value not in ("uniform", "full", "lognormal"):
            raise ValueError("give uniform, full or lognormal.")
        return value

    @field_validator("batch", "longest", "num_sm_parts")
    @classmethod
    def _positive(cls, value):
        if value < 1:
            raise ValueError("give 1 or more.")
        return value

    @field_validator("block_size", "heads")
    @classmethod
    def _tile(cls, value):
        if value < 16 or value & (value - 1):
            raise ValueError("give a power of two from 16, as the kernels' tiles are.")
        return value

    @field_validator("overhead", "watched_row")
    @classmethod
    def _not_negative(cls, value):
        if value < 0:
            raise ValueError("give 0 or more.")
        return value

    @field_validator("rule")
    @classmethod
    def _rule(cls, value):
        own_length_rule(value)
        return value

    @field_validator("batch_sizes", "arithmetic_batches")
    @classmethod
    def _sizes(cls, values):
        if not values or min(values) < 1:
            raise ValueError("give one batch size or more, each 1 or more.")
        return values

    @model_validator(mode="after")
    def _watched(self):
        rows = len(self.lengths) or self.batch
        if rows < 2:
            raise ValueError("the batch has one row: give two or more, so that there is a neighbour.")
        if self.watched_row >= rows:
            raise ValueError(f"watched_row is {self.watched_row}, but the batch has rows 0 to {rows - 1} only.")
        return self


def batch_lengths(p: Parameters, batch: int | None = None, seed: int = 0) -> list[int]:
    """Tokens a row: the given lengths, or ``batch`` draws from the distribution."""
    if p.lengths and batch is None:
        return list(p.lengths)
    count = batch or p.batch
    rng = np.random.default_rng([p.seed, seed, count])
    if p.distribution == "full":
        return [p.longest] * count
    if p.distribution == "uniform":
        return rng.integers(1, p.longest + 1, count).tolist()
    return np.clip(rng.lognormal(np.log(p.longest / 3), 0.8, count).astype(int), 1, p.longest).tolist()


def plan_of(p: Parameters, lengths: list[int], rule: str = BATCH_WIDE):
    return make_plan(rule, lengths, p.num_sm_parts, p.block_size, p.overhead)


# ---------------------------------------------------------------- schedules


@cache
def golden() -> list[dict]:
    return json.loads(data_path("golden", "flashmla_schedules_h200.json").read_text())["cases"]


def golden_matches(overhead: int = 5) -> Rate:
    """Recorded FlashMLA schedules that ``flashmla_schedule`` reproduces to the integer, of all."""

    def same(case):
        lengths = decode_lengths(
            case["topk"], case["topk_length"], case["extra_topk"], case["extra_topk_length"], batch=case["batch"]
        )
        found = flashmla_schedule(lengths, case["num_sm_parts"], fixed_overhead_blocks=overhead)
        return found.num_splits == case["num_splits"] and [list(part) for part in found.parts] == case["parts"]

    return Rate(sum(map(same, golden())), len(golden()))


def batch_table(p: Parameters) -> pd.DataFrame:
    """`batch_lengths` as a table: row, tokens."""
    lengths = batch_lengths(p)
    return named(pd.DataFrame({"row": range(len(lengths)), "tokens": lengths}), "lengths")


def gantt(p: Parameters, lengths: list[int], rule: str = BATCH_WIDE) -> pd.DataFrame:
    """One row a segment: part, row, begin_block, end_block, and start and stop on the part's clock in blocks (each
    segment begins with the fixed overhead)."""
    plan = plan_of(p, lengths, rule)
    found = []
    for part in range(plan.programs):
        clock = 0
        for row, begin, end, _ in plan.segments[plan.program_starts[part] : plan.program_starts[part + 1]].tolist():
            stop = clock + p.overhead + end - begin
            found.append(
                {"part": part, "row": row, "begin_block": begin, "end_block": end, "start": clock, "stop": stop}
            )
            clock = stop
    return pd.DataFrame(found)


def splits_against_batch(p: Parameters) -> pd.DataFrame:
    """Split count of a row of ``longest`` tokens as row 0 of batches of the sizes in ``batch_sizes``: batch, schedule,
    splits."""
    found = []
    for batch in p.batch_sizes:
        lengths = [p.longest] + batch_lengths(p, batch, seed=1)[1:]
        for rule in (BATCH_WIDE, p.rule):
            found.append({"batch": batch, "schedule": rule, "splits": int(plan_of(p, lengths, rule).pieces[0])})
    return named(pd.DataFrame(found), "batch-splits")


def splits_against_neighbour(p: Parameters) -> pd.DataFrame:
    """Split count of the watched row while one neighbour grows: neighbour_tokens, schedule, splits."""
    lengths = batch_lengths(p)
    neighbour = (p.watched_row + 1) % len(lengths)
    found = []
    for tokens in np.unique(np.geomspace(1, 64 * p.longest, 60).astype(int)).tolist():
        changed = [*lengths[:neighbour], tokens, *lengths[neighbour + 1 :]]
        for rule in (BATCH_WIDE, p.rule):
            found.append(
                {
                    "neighbour_tokens": tokens,
                    "schedule": rule,
                    "splits": int(plan_of(p, changed, rule).pieces[p.watched_row]),
                }
            )
    return named(pd.DataFrame(found), "neighbour-splits")


def trees(p: Parameters) -> pd.DataFrame:
    """The watched row's pieces alone and in its batch: where, schedule, piece, begin_block, end_block."""
    lengths = batch_lengths(p)
    found = []
    for rule in (BATCH_WIDE, p.rule):
        for where, some, row in (("alone", [lengths[p.watched_row]], 0), ("in the batch", lengths, p.watched_row)):
            bounds = plan_of(p, some, rule).bounds_of(row)
            found += [
                {"schedule": rule, "where": where, "piece": i, "begin_block": a, "end_block": b}
                for i, (a, b) in enumerate(zip(bounds, bounds[1:]))
            ]
    return named(pd.DataFrame(found), "pieces")


# ---------------------------------------------------------------- arithmetic


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def _inputs(p: Parameters, batch: int) -> DecodeInputs:
    """bf16 latent attention (576 key and 512 value numbers a token) over drawn lengths."""
    lengths = batch_lengths(p, batch, seed=2)
    return random_inputs(lengths, p.heads, page_size=p.block_size, device=resolve_device(p.device), seed=p.seed + batch)


def _other_contents(inputs: DecodeInputs, row: int) -> DecodeInputs:
    """The batch with every other row's query replaced: shapes and lengths kept."""
    q = inputs.q.flip(0).clone()
    q[row] = inputs.q[row]
    return DecodeInputs(
        q,
        tuple(Cache(c.keys, c.values, c.lengths, c.block_table, c.indices) for c in inputs.caches),
        inputs.d_v,
        inputs.scale,
    )


def _one_rounding_more(out: torch.Tensor) -> torch.Tensor:
    """The values moved up and down in turn by 2**-9 of themselves, bfloat16's largest rounding error."""
    sign = 1.0 - 2.0 * (torch.arange(out.shape[-1], device=out.device) % 2)
    return out.float() * (1 + sign * 2.0**-9)


def solo_against_batch(p: Parameters) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Each row of each batch in ``arithmetic_batches``, decoded in the batch and alone, under FlashMLA's schedule and
    the rule.

    Returns one frame with a row a decoded row: schedule, batch, row, tokens, splits_batch, splits_solo, rerun_differs,
    contents_differs, solo_differs, values_differ, values, max_row_scaled_ulp, error_batch, error_solo, error_coarse
    (relative to float64; coarse is the solo result with one rounding more, a positive control); and a ULP histogram:
    schedule, ulp_from, ulp_to, values. contents_differs is looked at in row 0.
    """
    rows, counts = [], {}
    for batch in p.arithmetic_batches:
        inputs = _inputs(p, batch)
        lengths = inputs.lengths(p.block_size)
        truth = exact(inputs, p.block_size)[0]
        for rule in (BATCH_WIDE, p.rule):
            plan = plan_of(p, lengths, rule)
            out, again = attend(inputs, plan)[0], attend(inputs, plan)[0]
            swapped = attend(_other_contents(inputs, 0), plan)[0]
            for row in range(batch):
                alone = plan_of(p, [lengths[row]], rule)
                solo = attend(inputs.row(row), alone)[0][0]
                distance = ulp_distance(out[row], solo)
                counts[rule] = counts.get(rule, 0) + np.histogram(distance.cpu().numpy().ravel(), bins=ULP_BINS)[0]
                coarse = _one_rounding_more(solo)
                errors = {
                    name: float((x.double() - truth[row]).norm() / truth[row].norm())
                    for name, x in (("batch", out[row]), ("solo", solo), ("coarse", coarse))
                }
                rows.append(
                    {
                        "schedule": rule,
                        "batch": batch,
                        "row": row,
                        "tokens": lengths[row],
                        "splits_batch": int(plan.pieces[row]),
                        "splits_solo": int(alone.pieces[0]),
                        "rerun_differs": _bits_differ(out[row], again[row]),
                        "contents_differs": row == 0 and _bits_differ(out[0], swapped[0]),
                        "solo_differs": _bits_differ(out[row], solo),
                        "values_differ": int((distance > 0).sum()),
                        "values": distance.numel(),
                        "max_row_scaled_ulp": float(row_scaled_ulp(out[row].flatten(), solo.flatten()).max()),
                        **{f"error_{name}": value for name, value in errors.items()},
                    }
                )
    histogram = [
        {"schedule": rule, "ulp_from": low, "ulp_to": high, "values": int(n)}
        for rule, found in counts.items()
        for low, high, n in zip(ULP_BINS, ULP_BINS[1:], found)
    ]
    return pd.DataFrame(rows), pd.DataFrame(histogram)


def verdicts(rows: pd.DataFrame, p: Parameters) -> dict:
    """Counts for the checks, of ``solo_against_batch``'s frame: rates and controls of FlashMLA's schedule and of the
    rule."""
    default, own = rows[rows.schedule == BATCH_WIDE], rows[rows.schedule == p.rule]
    changed = default.splits_batch != default.splits_solo
    moved = default[default.solo_differs]
    nearer = int((moved.error_batch < moved.error_solo).sum())
    return {
        "coincide": Rate(int((changed == default.solo_differs).sum()), len(default)),
        "default_differs": Rate(int(default.solo_differs.sum()), len(default)),
        "own_differs": Rate(int(own.solo_differs.sum()), len(own)),
        "batch_nearer": Rate(nearer, len(moved)),
        "coarse_is_worse": bool((moved.error_coarse > moved.error_solo).all()) and len(moved) > 0,
        "identical": not bool((rows.rerun_differs | rows.contents_differs).any()),
        "both_happened": bool(changed.any()) and bool((~changed).any()),
        "own_pieces": int(own.splits_batch.max()),
        "median_values": float((moved.values_differ / moved["values"]).median()) if len(moved) else 0.0,
    }


def tier(p: Parameters) -> str:
    return simulated_tier(resolve_device(p.device))


# ---------------------------------------------------------------- recorded on the GPU


@cache
def _recorded(name: str) -> pd.DataFrame:
    return pd.read_csv(data_path("recorded", f"{name}.csv"))


def recorded_on() -> str:
    """Where the recorded tables come from, in a few words."""
    one = _recorded("decode_bits").iloc[0]
    return f"{one.gpu}, driver {one.driver}, torch {one.torch}, triton {one.triton}, {one.date}, commit {one.commit}"


def recorded_bits() -> pd.DataFrame:
    """One row a kernel and policy: rows checked, re-runs and rows that differ, by whether the split count changed,
    with the 95% interval of the solo rate; ``schedules_differ`` counts other schedules of the same rule that changed a
    bit."""
    found = _recorded("decode_bits").fillna({"schedules_tried": 0, "schedules_differ": 0})
    columns = [
        "rows_checked",
        "rerun_differs",
        "solo_differs",
        "rows_split_changed",
        "differ_split_changed",
        "differ_split_same",
        "schedules_tried",
        "schedules_differ",
    ]
    table = found.groupby(["kernel", "policy"])[columns].sum().astype(int).reset_index()
    table.insert(2, "batches", found.groupby(["kernel", "policy"]).size().to_numpy())
    table["solo_interval"] = [
        "{:.1%} to {:.1%}".format(*Rate(r.solo_differs, r.rows_checked).interval) for r in table.itertuples()
    ]
    return table


def recorded_rate(kernel: str, invariant: bool) -> tuple[Rate, pd.Series]:
    """Rows that differ from the row alone, over the default policy or over all invariant ones, and the sums behind."""
    table = recorded_bits()
    mine = table[(table.kernel == kernel) & (table.policy.str.startswith("invariant") == invariant)]
    sums = mine.drop(columns=["kernel", "policy", "solo_interval"]).sum()
    return Rate(int(sums.solo_differs), int(sums.rows_checked)), sums


def recorded_errors() -> pd.DataFrame:
    """FlashMLA's default schedule, a row a batch in which values differ: batch's sizes, and the median error against
    float64 in the batch and alone."""
    found = _recorded("decode_bits")
    found = found[(found.kernel == "flashmla") & (found.policy == "default")].dropna(subset=["error_batch"])
    columns = [name for name in found if name in ("shape", "m", "batch", "topk", "lengths", "error_batch", "error_solo")]
    return named(found[columns].reset_index(drop=True), "recorded-errors")


def recorded_precision() -> dict:
    """FlashMLA's default schedule: of values that differ, in how many batches the batched row lay nearer to float64."""
    found = recorded_errors()
    return {
        "nearer": Rate(int((found.error_batch < found.error_solo).sum()), len(found)),
        "error_batch": float(found.error_batch.median()),
        "error_solo": float(found.error_solo.median()),
    }


def recorded_ulps(kernel: str = "flashmla") -> pd.DataFrame:
    """ULP histogram of the rows that differ under the default schedule: ulp_up_to (upper edge of the bin), values,
    share."""
    found = _recorded("decode_ulp")
    found = found[(found.kernel == kernel) & (found.policy == "default")]
    table = found.groupby("ulp_up_to", sort=False)["values"].sum().reset_index()
    return named(table.assign(share=table["values"] / table["values"].sum()), "recorded-ulps")


def costs(kernel: str = "flashmla") -> pd.DataFrame:
    """Recorded time over the default's in the same run: shape, m (batch), policy, value (us), ratio."""
    found = _recorded("decode")
    found = found[(found.metric == "time") & (found.kernel == kernel) & ~found.policy.str.contains("-streams")]
    return found[["shape", "m", "policy", "value", "ratio"]].reset_index(drop=True)


def geometric_mean(values) -> float:
    return float(np.exp(np.log(np.asarray(values, float)).mean()))


def cost_by_range(kernel: str = "flashmla") -> pd.DataFrame:
    """Geometric mean of each policy's cost in each batch range: policy, low, high, cost, worst, configurations."""
    found = costs(kernel)
    rows = []
    for low, high in BATCH_RANGES:
        inside = found[(found.m >= low) & (found.m <= high)]
        for policy, part in inside.groupby("policy"):
            if len(part) == len(inside[inside.policy == "default"]):  # measured in every shape and batch of the range
                rows.append(
                    {
                        "policy": policy,
                        "low": low,
                        "high": high,
                        "cost": geometric_mean(part.ratio),
                        "worst": part.ratio.max(),
                        "configurations": len(part),
                    }
                )
    return named(pd.DataFrame(rows), f"cost-by-range-{kernel}")


def recommendation(kernel: str = "flashmla") -> pd.DataFrame:
    """The least costly own-length rule of each batch range: batches, rule, cost, worst, and the runner-up.

    A server must keep one rule for all batches that it may form: choose by the range that it works in.
    """
    table = cost_by_range(kernel)
    table = table[table.policy.str.startswith("invariant")].sort_values("cost")
    rows = []
    for low, high in BATCH_RANGES:
        ranked = table[(table.low == low) & (table.high == high)]
        if len(ranked) > 1:
            best, second = ranked.iloc[0], ranked.iloc[1]
            rows.append(
                {
                    "batches": f"{low} to {high}",
                    "rule": best.policy.removeprefix("invariant-"),
                    "cost": best.cost,
                    "worst": best.worst,
                    "runner_up": second.policy.removeprefix("invariant-"),
                    "runner_up_cost": second.cost,
                    "configurations": best.configurations,
                }
            )
    return named(pd.DataFrame(rows), f"recommendation-{kernel}")


def by_length_against_single(low: int = 1, high: int = 256) -> dict:
    """The best rule whose piece count follows the row's length, against the best with one number for all rows."""
    table = cost_by_range("flashmla")
    table = table[(table.low == low) & (table.high == high)]
    adaptive = table[table.policy.str.contains("by-length|root-length")].sort_values("cost").iloc[0]
    single = table[table.policy.str.contains("fixed|never")].sort_values("cost").iloc[0]
    return {
        "rule": adaptive.policy.removeprefix("invariant-"),
        "cost": adaptive.cost,
        "single": single.policy.removeprefix("invariant-"),
        "single_cost": single.cost,
        "configurations": int(adaptive.configurations),
    }

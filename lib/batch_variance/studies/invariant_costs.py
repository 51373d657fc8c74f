"""What the recorded timings of the invariant matmuls say: against the default, against the goal, against the limit of
the device, and what the tuner's own timings give as the reason where a goal is missed.

The limit is the larger of two times: bytes that must be moved over the bandwidth of a copy, and FLOPs over the rate
of bfloat16 matrix products. Both rates were measured on an NVIDIA H200; neither is a data sheet's.
"""

import numpy as np
import pandas as pd

from ..common import data_path
from ..kernels.gemm.bench import ROWS, SHAPES
from .invariant import INVARIANT, cost_sentence, geometric_mean, recorded, recorded_ratios
from .sources import cite, named

COPY_RATE = 4.3  # TB/s, read and written together, of a large device-to-device copy
MATRIX_RATE = 790.0  # TFLOP/s of a large bfloat16 matmul on random values
PROCESSORS = 132  # multiprocessors of an H200
WEIGHT_BYTES = {"gemm": 2.0, "nvfp4": 0.5625}  # a weight; an NVFP4 code and its share of a block scale
VALUE_BYTES = {"gemm": 2, "nvfp4": 4}  # an activation or result
MEAN_GOAL, WORST_GOAL = 1.00, 1.15  # of the GEMM's time over the library's: geometric mean, and any point
GOAL_WEIGHTS = [f"N{n} K{k}" for k, n in SHAPES]  # the goal is set for these at ROWS
LATENT_GOAL, LATENT_GOAL_AT = 1.25, ("h64 d576 topk2048 full", 128)  # latent decode over FlashMLA: shape, batch
DECODE_MEAN, DECODE_WORST = 1.01, 1.08  # of decode under a free rule over the best batch-wide schedule of its kernel


def weight_of(shape: str) -> tuple[int, int]:
    """(N, K) of a recorded shape such as "N4096 K7168"."""
    n, k = shape.split()
    return int(n[1:]), int(k[1:])


def against_limit(name: str) -> pd.DataFrame | None:
    """shape, m, default, invariant and limit (microseconds), ratio, bound ("bandwidth" or "arithmetic"), of_limit
    (share of the limit that the invariant kernel reaches), default_of_limit; None where not recorded."""
    frame = recorded_ratios(name)
    if frame is None:
        return None
    rows = []
    for one in frame.itertuples():
        n, k = weight_of(one.shape)
        moved = WEIGHT_BYTES[name] * n * k + VALUE_BYTES[name] * one.m * (n + k)
        times = {"bandwidth": moved / COPY_RATE / 1e6, "arithmetic": 2 * one.m * n * k / MATRIX_RATE / 1e6}
        bound = max(times, key=times.__getitem__)
        limit = times[bound]
        rows.append(
            {
                "shape": one.shape,
                "m": one.m,
                "default": one.baseline,
                "invariant": one.value,
                "ratio": one.ratio,
                "limit": limit,
                "bound": bound,
                "of_limit": limit / one.value,
                "default_of_limit": limit / one.baseline,
            }
        )
    return named(pd.DataFrame(rows), f"{name} against the limit")


def limit_sentence(frame: pd.DataFrame) -> str:
    """Shares of the limit that both reach, by what bounds them. frame: `against_limit`."""
    parts = [
        cite(f"{bound}, {len(mine)} points: {geometric_mean(mine.of_limit):.0%}", frame, bound=bound)
        + f" (the default {cite(format(geometric_mean(mine.default_of_limit), '.0%'), frame, bound=bound)})"
        for bound, mine in frame.groupby("bound", sort=False)
    ]
    return (
        f"Share of the limit that the invariant kernel reaches, by what bounds it ({'; '.join(parts)}). Taken as the "
        f"device's rates: {COPY_RATE:g} TB/s, measured of a copy, and {MATRIX_RATE:g} TFLOP/s, measured of a large "
        "bfloat16 matmul on random values."
    )


def by_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Time over the default's: a line a number of rows, a column a weight, and the geometric mean of those recorded.
    frame: `against_limit`."""
    wide = frame.pivot(index="m", columns="shape", values="ratio")[list(dict.fromkeys(frame["shape"]))]
    wide["geometric mean"] = [geometric_mean(values[~np.isnan(values)]) for values in wide.to_numpy()]
    return wide.round(3).reset_index().rename(columns={"m": "rows"})


def goal_sentence(frame: pd.DataFrame) -> str:
    """Whether the GEMM's goal is reached, and where not. frame: `against_limit`."""
    asked = frame[frame["shape"].isin(GOAL_WEIGHTS) & frame.m.isin(ROWS)]
    if asked.empty:
        return "No GPU has recorded the points for which the goal is set: `batch-variance bench gemm` does."
    mean, worst = geometric_mean(asked.ratio), asked.loc[asked.ratio.idxmax()]
    above = asked[asked.ratio > WORST_GOAL].sort_values("ratio", ascending=False)
    met = mean <= MEAN_GOAL and above.empty
    at = lambda text, row: cite(text, frame, shape=row.shape, m=row.m)  # noqa: E731
    where = ", ".join(at(f"{one.ratio:.2f} at {one.m} rows of {one.shape}", one) for one in above.itertuples())
    below = asked[asked.ratio <= 1]
    others = frame.drop(asked.index)
    return (
        f"Goal, for {asked['shape'].nunique()} weights at {asked.m.nunique()} numbers of rows: a geometric mean of {MEAN_GOAL:.2f} at most "
        f"and no point above {WORST_GOAL:.2f}. "
        f"{'Reached' if met else 'Missed'}: {cite(f'{mean:.3f}', frame)}, worst "
        f"{cite(f'{worst.ratio:.3f}', frame, shape=worst['shape'], m=worst.m)}. "
        f"{cite(f'{len(below)} of {len(asked)}', frame)} points are no slower than the library's. "
        + (f"Above {WORST_GOAL:.2f}: {where}." if len(above) else "No point lies above.")
        + (f" The {cite(len(others), frame)} other points, of an engine's weights, have {cite(f'{geometric_mean(others.ratio):.3f}', frame)}." if len(others) else "")
    )


def decode_by_rule() -> pd.DataFrame | None:
    """Decode of grouped queries under the free rules over the best batch-wide schedule of the same kernel, best rule
    first: rule, timings, geometric mean, worst, and where the worst is; None where not recorded."""
    frame = recorded("decode")
    if frame is None:
        return None
    mine = frame[(frame.kernel == "triton") & (frame.metric == "time") & frame["shape"].str.contains(" kv8 ")]
    mine = mine[mine.policy.str.startswith("invariant-free")]
    rows = []
    for policy, part in mine.groupby("policy"):
        worst = part.loc[part.ratio.idxmax()]
        rows.append(
            {
                "rule": policy.removeprefix("invariant-"),
                "timings": len(part),
                "geometric mean": round(geometric_mean(part.ratio), 3),
                "worst": round(worst.ratio, 3),
                "worst at": f"batch {worst.m}, {worst['shape']}",
            }
        )
    return named(pd.DataFrame(rows).sort_values("geometric mean", ignore_index=True), "decode") if rows else None


def decode_sentence(frame: pd.DataFrame | None) -> str:
    """Whether the goal for decode is reached, or that nothing is recorded. frame: `decode_by_rule`."""
    if frame is None:
        return "No GPU has recorded decode under a free rule yet: `batch-variance bench decode` does."
    best = frame.iloc[0]
    at = lambda text: cite(text, frame, rule=best.rule)  # noqa: E731
    met = best["geometric mean"] <= DECODE_MEAN and best.worst <= DECODE_WORST
    own = frame.rule.str.startswith("free-most").any()
    return (
        f"Goal: a geometric mean of {DECODE_MEAN:.2f} at most and no point above {DECODE_WORST:.2f}. "
        f"{'Reached' if met else 'Missed'}: the best rule recorded, {best.rule}, has {at(format(best['geometric mean'], '.3f'))}, worst "
        f"{at(format(best.worst, '.2f'))} ({at(best['worst at'])})."
        + ("" if own else " Rules whose pieces grow with the row's own length (free-most-N) are not recorded yet.")
    )


def latent() -> pd.DataFrame | None:
    """Latent decode under own-length rules beside FlashMLA's in the last run, the fastest rule of a point first: shape,
    batch, rule, FlashMLA us, us, over FlashMLA, over the batch-wide schedule of the same kernel; None where not
    recorded."""
    frame = recorded("decode")
    if frame is None:
        return None
    times = frame[(frame.metric == "time") & frame["shape"].str.contains(" d576 ")]
    theirs = times[(times.kernel == "flashmla") & (times.policy == "default")]
    ours = times[(times.kernel == "triton") & (times.policy != "default")]
    ours = ours[ours.commit == ours.sort_values("date").commit.iloc[-1]] if len(ours) else ours  # the kernel as it is
    both = ours.merge(theirs[["shape", "m", "value", "commit", "date"]], on=["shape", "m", "commit", "date"], suffixes=("", "_theirs"))
    if both.empty:
        return None
    found = both.assign(rule=both.policy.str.removeprefix("invariant-"), over=both.value / both.value_theirs)
    found = found.sort_values(["shape", "m", "over"], ignore_index=True)[["shape", "m", "rule", "value_theirs", "value", "over", "ratio"]]
    words = {"m": "batch", "value_theirs": "FlashMLA us", "value": "us", "over": "over FlashMLA", "ratio": "over batch-wide"}
    return named(found.round(3).rename(columns=words), "latent")


def latent_sentence(frame: pd.DataFrame | None) -> str:
    """Latent decode under a free schedule against FlashMLA, and its goal. frame: `latent`."""
    if frame is None:
        return "No GPU has recorded latent decode beside FlashMLA in one run: `batch-variance bench decode` does, where FlashMLA is found."
    free = frame[frame.rule.str.startswith("free")]
    best = free.loc[free.groupby(["shape", "batch"], sort=False)["over FlashMLA"].idxmin()]
    at = lambda text, row: cite(text, frame, shape=row["shape"], batch=row["batch"], rule=row["rule"])  # noqa: E731
    low, high = (best.loc[pick(best["over FlashMLA"])] for pick in (pd.Series.idxmin, pd.Series.idxmax))
    text = (
        f"Latent decode, each point under the free rule that suits it best, takes {at(format(low['over FlashMLA'], '.2f'), low)} to "
        f"{at(format(high['over FlashMLA'], '.2f'), high)} of FlashMLA's time over {cite(len(best), frame)} points."
    )
    goal = best[(best["shape"] == LATENT_GOAL_AT[0]) & (best.batch == LATENT_GOAL_AT[1])]
    if goal.empty:
        return text
    one = goal.iloc[0]
    met = "Reached" if one["over FlashMLA"] <= LATENT_GOAL else "Missed"
    return text + (
        f" Goal at {one['shape']}, batch {one.batch}: {LATENT_GOAL:.2f} at most. {met}: {at(format(one['over FlashMLA'], '.2f'), one)} under {one['rule']}."
    )


def _tuning() -> pd.DataFrame | None:
    """The tuner's timings inside the class with shape and ratio (to the library's time); None where not recorded."""
    found, times = recorded("gemm_tuning"), recorded_ratios("gemm")
    if found is None or times is None:
        return None
    found = found.dropna(subset="time_us")
    found = found.assign(shape=[f"N{n} K{k}" for n, k in zip(found.n, found.k)])
    found = found.merge(times[["shape", "m", "baseline"]], on=["shape", "m"])
    return found.assign(ratio=found.time_us / found.baseline)


def by_segments() -> pd.DataFrame | None:
    """The fastest configuration's time over the library's: a line a weight and number of segments (a class each), a
    column a number of rows at which classes are chosen, the geometric mean, and whether that class is the one in use. A
    class that has no configuration at one of its weight's row counts is left out."""
    found = _tuning()
    if found is None:
        return None
    found = found[found.m.isin(ROWS)]
    fastest = found.groupby(["shape", "segments", "m"], sort=False).ratio.min().unstack()
    asked = fastest.notna().groupby(level="shape").transform("any")  # some weights are tuned at fewer row counts
    fastest = fastest.loc[(fastest.notna() | ~asked).all(axis=1), sorted(fastest.columns)]
    means = [geometric_mean(values[~np.isnan(values)]) for values in fastest.to_numpy()]
    used = _chosen().drop_duplicates("shape").set_index("shape").segments
    fastest = fastest.round(3)
    fastest["geometric mean"] = np.round(means, 4)
    fastest["in use"] = [used.get(shape) == count for shape, count in fastest.index]
    fastest = fastest.reset_index().sort_values(["shape", "segments"], ignore_index=True).rename_axis(columns=None)
    return named(fastest, "segments")


def segments_sentence(frame: pd.DataFrame) -> str:
    """What a second segment costs at many rows and whether the classes in use are the best tried. frame:
    `by_segments`."""
    best = frame.loc[frame.groupby("shape")["geometric mean"].idxmin()]
    many = [column for column in frame.columns if isinstance(column, (int, np.integer)) and column >= 1024]
    wide = frame.set_index(["shape", "segments"])[many]
    both = [shape for shape in frame["shape"].unique() if {(shape, 1), (shape, 2)} <= set(wide.index)]
    in_use = cite(f"{int(best['in use'].sum())} of {len(best)}", frame)
    text = (
        f"The number of segments is the class, so a weight has one for every number of rows. The one in use has the "
        f"least geometric mean of those tried for {in_use} weights."
    )
    if both and many:
        costs = [wide.loc[(s, 2), m] / wide.loc[(s, 1), m] - 1 for s in both for m in many]
        costs = [cost for cost in costs if not np.isnan(cost)]
        text += (
            f" From 1,024 rows on a second segment costs "
            f"{cite(f'{min(costs):.0%} to {max(costs):.0%} ({len(costs)} pairs)', frame)}: partial sums of a tile go through memory."
        )
    untried = [shape for shape in best["shape"] if (shape, 1) not in wide.index]
    if untried:
        text += f" One segment was not tried for {', '.join(untried)}: few columns make few tiles at few rows."
    return text


def _chosen() -> pd.DataFrame:
    frame = pd.read_csv(data_path("tuned", "gemm.csv"))
    return frame.assign(shape=[f"N{n} K{k}" for n, k in zip(frame.n, frame.k)])


def tiling() -> pd.DataFrame | None:
    """The configuration in use at every point: shape, m, segments, config, ratio, pieces (tiles, times segments where
    they run in parallel), waves (pieces over multiprocessors), filled (share of the multiprocessors' turns that have
    a piece), again (recorded time over the tuner's of the same configuration)."""
    times, tuned = recorded_ratios("gemm"), _tuning()
    if tuned is None:
        return None
    found = _chosen().merge(times[["shape", "m", "value", "ratio"]], on=["shape", "m"])
    keys = ["shape", "m", "segments", "config"]
    found = found.merge(tuned[[*keys, "time_us"]], on=keys)
    sizes = [[int(size) for size in config.split()[1].split("x")[:2]] for config in found.config]
    tiles = np.array([-(-m // bm) * -(-n // bn) for m, n, (bm, bn) in zip(found.m, found.n, sizes)])
    pieces = np.where(found.config.str.startswith("parallel"), tiles * found.segments, tiles)
    waves = pieces / PROCESSORS
    found = found.assign(pieces=pieces, waves=waves, filled=waves / np.ceil(waves), again=found.value / found.time_us)
    return named(found[[*keys, "ratio", "pieces", "waves", "filled", "again"]], "tiling")


def slowest(frame: pd.DataFrame, count: int = 8) -> pd.DataFrame:
    """The points with the highest ratio, rounded to read. frame: `tiling`."""
    words = {"m": "rows", "ratio": "over the library", "again": "recorded over tuned"}
    return named(frame.nlargest(count, "ratio").round(3).rename(columns=words).reset_index(drop=True), "slowest")


def reason_sentence(frame: pd.DataFrame) -> str:
    """What the points above the goal have in common, and how far two timings of one configuration lie apart. frame:
    `tiling`."""
    above = frame[frame.ratio > WORST_GOAL]
    apart = (frame.again - 1).abs()
    text = (
        f"Two timings of one configuration in this run, the tuner's and the recorded one, lie "
        f"{cite(f'{apart.median():.1%}', frame)} apart at the median and {cite(f'{apart.max():.0%}', frame)} at most, so a point's ratio is known no better than that."
    )
    if above.empty:
        return text
    few = above[above.waves < 2]
    return (
        f"At {cite(len(few), frame)} of the {cite(len(above), frame)} points above {WORST_GOAL:.2f} the fastest configuration cuts the result "
        f"into {cite(f'{few.pieces.min()} to {few.pieces.max()}', frame)} pieces for {PROCESSORS} multiprocessors, "
        f"{cite(f'{few.waves.min():.2f} to {few.waves.max():.2f}', frame)} waves: with one or two pieces for a multiprocessor, little overlaps a piece's first "
        "loads and its last stores. That is reckoned from the launch; what the counters say stands below. " + text
        if len(few)
        else text
    )


def prefill() -> pd.DataFrame | None:
    """Recorded prefill attention that agrees with decode: shape, tokens, microseconds and TFLOP/s of the library's and
    of ours, over the library (a ratio), rows held against decode and how many of them differ; None where not recorded.
    """
    frame = recorded("prefill")
    if frame is None:
        return None
    ours = frame[frame.policy != "default"].pivot_table(index=["shape", "m"], columns="metric", values="value", sort=False)
    base = frame[frame.policy != "default"].pivot_table(
        index=["shape", "m"], columns="metric", values="baseline", sort=False
    )
    found = pd.DataFrame(
        {
            "library us": base["time"],
            "us": ours["time"],
            "over the library": ours["time"] / base["time"],
            "library TFLOP/s": base["rate"],
            "TFLOP/s": ours["rate"],
            "rows checked": base["rows unlike decode"].astype(int),
            "rows unlike decode": ours["rows unlike decode"].astype(int),
        }
    )
    return named(found.reset_index().rename(columns={"m": "tokens"}), "prefill")


def prefill_sentence(frame: pd.DataFrame | None) -> str:
    """What agreement with decode costs a prefill. frame: `prefill`."""
    if frame is None:
        return cost_sentence("prefill", None)
    ratios, unlike = frame["over the library"], frame["rows unlike decode"]
    at = lambda text, row: cite(text, frame, shape=row["shape"])  # noqa: E731
    best, worst = frame.loc[ratios.idxmin()], frame.loc[ratios.idxmax()]
    return (
        f"Of {cite(frame['rows checked'].sum(), frame)} prefilled rows {cite(unlike.sum(), frame)} have other bits than a"
        f" decode step of their length. That costs {at(format(ratios.min(), '.1f'), best)} to"
        f" {at(format(ratios.max(), '.1f'), worst)} times the library's causal attention, which owes decode nothing."
    )


def engine_kinds() -> pd.DataFrame | None:
    """Recorded device time of an engine step by kind of kernel: concurrency, kind, milliseconds of the default's and of
    ours, ratio; None where not recorded."""
    frame = recorded("engine")
    if frame is None:
        return None
    mine = frame[(frame.policy == INVARIANT) & frame.metric.str.startswith("device time,")]
    kinds = mine.metric.str.removeprefix("device time, ")
    found = mine.assign(kind=kinds).rename(columns={"m": "concurrency", "baseline": "default ms", "value": "ms"})
    return named(found[["concurrency", "kind", "default ms", "ms", "ratio"]].reset_index(drop=True), "engine-kinds")


def engine_sentence(frame: pd.DataFrame) -> str:
    """Which kernels invariance costs an engine step most, at the highest concurrency. frame: `engine_kinds`."""
    most = frame[frame.concurrency == frame.concurrency.max()]
    worst = most.loc[(most.ms - most["default ms"]).idxmax()]
    at = lambda text: cite(text, frame, concurrency=worst.concurrency, kind=worst.kind)  # noqa: E731
    extra = (most.ms - most["default ms"]).sum()
    return (
        f"At concurrency {at(worst.concurrency)} most of the extra device time is {worst.kind}:"
        f" {at(f'{worst.ms:.3f}')} instead of {at(format(worst['default ms'], '.3f'))} ms, of"
        f" {cite(f'{extra:.3f}', frame, concurrency=worst.concurrency)} ms more in all. By the clock a step run"
        " from Python costs more still, since the device waits most of it for launches; replayed as a CUDA graph it does not."
    )

"""What bounds the kernels at the recorded points that miss their goal, read off hardware counters by rule.

The counters are ``data/recorded/profile.csv``'s (``kernels.profile``): one launch, cold caches, clocks as they are, so
a profile's time is not the benchmark's. Where a unit is near its peak it is the bound; else what keeps the units from
being busy is, in the order of `bound_of`.
"""

import math

import numpy as np
import pandas as pd

from ..kernels.profile.counters import NOT_STALLS, PROCESSORS, RESIDENT, stall_of, value_of
from . import invariant_costs as costs
from .invariant import INVARIANT, recorded
from .sources import cite, cite_all, named

OTHER = "another pipe"  # of the multiprocessor: the busiest, where it is neither the tensor pipe nor the issue slots
LIMITS = ("DRAM", "L2", "L1", "tensor pipe", "issue slots", OTHER)
DRAWN = ("DRAM", "L2", "tensor pipe", "issue slots")
POINT = ["kernel", "policy", "shape", "m"]
SHOWN = [
    *POINT,
    "launch",
    "us",
    "of_call",
    *LIMITS,
    "busy",
    "waves",
    "warps",
    "registers",
    "shared_kb",
    "bound",
    "says",
]
NEAR = 0.75  # of its peak: a unit so busy bounds the kernel
FEW = 0.75  # of the multiprocessors have a block, or of the time are busy: below that, idle ones are the bound
LOST = 0.15  # of the device's time, at the end, where the last wave of blocks is not full
SPILLED = 0.02  # of all instructions read or write what registers did not hold
WARPS = 64  # that a multiprocessor of compute capability 9.0 holds

NVFP4_GOALS = ((32, 1.00), (math.inf, 1.05))  # up to so many rows
PREFILL_GOAL = 1.00  # none was set: the library's own time
ENGINE_GOAL = 1.03  # of an engine step's time by the clock
ENGINE_STEPS = {"engine step": "step", "engine step as a CUDA graph": "step, CUDA graphs"}  # operation: metric

WORDS = {
    "DRAM": "DRAM bandwidth",
    "L2": "L2 bandwidth",
    "L1": "L1 and shared memory",
    "tensor pipe": "the tensor pipe",
    "issue slots": "the issue of instructions",
    OTHER: "a pipe other than the tensor pipe",
    "spills": "spilled registers",
    "few blocks": "too few blocks for the device",
    "last wave": "a last wave that is not full",
    "idle multiprocessors": "multiprocessors that idle while others work",
    "latency": "latency, no unit being near its peak",
    "unknown": "not known for want of counters",
}
WAITS = {
    "long scoreboard": "data from L2 or DRAM",
    "short scoreboard": "shared memory or special functions",
    "gmma": "warp-group products",
    "barrier": "its block's barrier",
    "wait": "a result of fixed latency",
    "math pipe throttle": "a busy arithmetic pipe",
    "mio throttle": "the queue to shared memory",
    "lg throttle": "the queue to global memory",
    "membar": "a memory fence",
    "no instruction": "instructions to be fetched",
    "branch resolving": "branches",
    "drain": "its last stores",
}
HOLDS = {"shared mem": "shared memory", "blocks": "the most blocks allowed", "warps": "the most warps allowed"}


def reading(counters: dict[str, float], processors: int) -> dict:
    """One launch's counters (as recorded, by name) in words that bounds are made of. NaN, 0 or "" where one is missing.

    Shares from 0 to 1: one for each of LIMITS, nearest_share, busy (of the elapsed cycles a multiprocessor worked, on
    average), spills, conflicts (of shared memory's wavefronts), stall_share. blocks, resident (blocks a multiprocessor
    can hold), limiter (what limits these), registers (a thread), shared_kb (a block), waves, used (multiprocessors with
    a block), lost (share of the waves' room that has no block), warps (active, on average), stall (what a warp waits
    for most), bound (of WORDS).
    """

    def at(role):
        value = value_of(role, counters)
        return math.nan if value is None else value

    found = {name: at(name) / 100 for name in LIMITS if name != OTHER}
    busiest = at("multiprocessor") / 100
    shown = np.nanmax([0.0, found["tensor pipe"], found["issue slots"]])
    found[OTHER] = busiest if busiest > shown + 0.03 else math.nan
    known = {name: share for name, share in found.items() if not math.isnan(share)}
    nearest = max(known, key=known.__getitem__, default="")
    held = {name.removeprefix(RESIDENT): value for name, value in counters.items() if name.startswith(RESIDENT)}
    resident = int(min(held.values(), default=0))
    limits = [name.replace("_", " ") for name, value in held.items() if value == resident]
    blocks = at("blocks")
    waves = blocks / (processors * resident) if resident else math.nan
    reasons = {stall_of(name): value for name, value in counters.items() if stall_of(name)}
    stalls = {reason: value for reason, value in reasons.items() if reason not in NOT_STALLS}
    stall = max(stalls, key=stalls.__getitem__, default="")
    local = np.nansum([at("local loads"), at("local stores")])
    wavefronts = at("shared wavefronts")
    found |= {
        "nearest": nearest,
        "nearest_share": known.get(nearest, math.nan),
        "blocks": blocks,
        "resident": resident,
        "limiter": " and ".join(HOLDS.get(name, name) for name in limits),
        "registers": at("registers"),
        "shared_kb": (at("shared bytes, dynamic") + at("shared bytes, static")) / 1024,
        "waves": waves,
        "used": min(blocks, processors),
        "lost": 1 - waves / math.ceil(waves) if waves > 0 else math.nan,
        "busy": at("cycles active") / at("cycles elapsed"),
        "warps": at("warps active") / 100 * WARPS,
        "spills": local / at("instructions"),
        "conflicts": at("bank conflicts") / wavefronts if wavefronts else 0.0,
        "stall": stall,
        "stall_share": stalls[stall] / sum(reasons.values()) if stall and sum(reasons.values()) else math.nan,
    }
    return found | {"bound": bound_of(found, processors)}


def bound_of(one: dict, processors: int) -> str:
    """The bound, a key of WORDS, of a `reading`; the first that holds: a unit near its peak, spills, few blocks, the
    last wave, idle multiprocessors, latency. A figure that is missing holds nothing."""
    if not one["nearest"]:
        return "unknown"
    if one["nearest_share"] >= NEAR:
        return one["nearest"]
    if one["spills"] >= SPILLED:
        return "spills"
    if one["used"] < FEW * processors:
        return "few blocks"
    if one["waves"] > 1 and one["lost"] >= LOST:
        return "last wave"
    if one["busy"] < FEW:
        return "idle multiprocessors"
    return "latency"


def sentence(one: dict, processors: int) -> str:
    """What the counters say of a launch: the three busiest units, the blocks and multiprocessors, the warps and what
    limits them, what they wait for, spills and bank conflicts where there are some. one: a `reading`."""
    shares = sorted(((one[name], name) for name in LIMITS if not math.isnan(one[name])), reverse=True)
    parts = [", ".join(f"{name} {share:.0%}" for share, name in shares[:3])]
    if one["waves"] > 0:
        last = one["waves"] - math.ceil(one["waves"]) + 1
        whole = f"one wave on {one['used']:.0f} of {processors} multiprocessors"
        waves = f"{one['waves']:.2f} waves, the last {last:.0%} full" if one["waves"] > 1 else whole
        parts.append(f"{one['blocks']:.0f} blocks, {waves}")
    if not math.isnan(one["busy"]):
        parts.append(f"a multiprocessor busy {one['busy']:.0%} of the time")
    if not math.isnan(one["warps"]):
        fit = "1 block fits" if one["resident"] == 1 else f"{one['resident']} blocks fit"
        held = f" ({fit}, by {one['limiter']})" if one["resident"] else ""
        parts.append(f"{one['warps']:.1f} of {WARPS} warps{held}")
    if one["stall_share"] > 0:
        waits = WAITS.get(one["stall"])
        for_what = f"{waits} ({one['stall']})" if waits else one["stall"]
        parts.append(f"{one['stall_share']:.0%} of their time they wait for {for_what}")
    if one["spills"] > 0:
        parts.append(f"{one['spills']:.1%} of instructions for spilled registers")
    if one["conflicts"] >= 0.1:
        parts.append(f"bank conflicts in {one['conflicts']:.0%} of shared memory's wavefronts")
    return "; ".join(part for part in parts if part)


def readings(frame: pd.DataFrame | None = None) -> pd.DataFrame | None:
    """The longest launch of every profiled case: kernel, policy, shape, m, launch (the GPU kernel), us, of_call (its
    share of the call's device time), `reading`'s columns, and says (`sentence`); None where no profile is recorded.
    frame: profile.csv's rows, those recorded if None."""
    frame = recorded("profile") if frame is None else frame
    if frame is None:
        return None
    rows, keys = [], ["policy", "shape", "m"]
    frame = frame.assign(operation=frame.kernel.str.partition("/")[0])
    for (operation, *where), part in frame.groupby(["operation", *keys], sort=False):
        whole, launches = part[part.kernel == operation], part[part.kernel != operation]
        processors = int(whole[whole.metric == PROCESSORS].value.iloc[0])
        times = launches[launches.metric == "time"].set_index("kernel").value
        longest = launches[launches.kernel == times.idxmax()]
        found = reading(dict(zip(longest.metric, longest.value)), processors)
        rows.append(
            {"kernel": operation, **dict(zip(keys, where)), "launch": times.idxmax().partition("/")[2]}
            | {"us": times.max(), "of_call": times.max() / times.sum(), **found, "says": sentence(found, processors)}
        )
    return named(pd.DataFrame(rows), "profile")


# ---------------------------------------------------------------- points that miss their goal


def goals() -> pd.DataFrame | None:
    """Every recorded point that has a goal: operation, kernel, policy, shape, m, default (microseconds), us, ratio,
    goal (of the ratio), against (the kernel that the default's time is of); None where nothing is recorded."""
    found = [*_gemm(), *_decode(), *_latent(), *_prefill(), *_nvfp4(), *_engine()]
    columns = ["operation", *POINT, "default", "us", "ratio", "goal", "against"]
    return pd.DataFrame(found, columns=columns) if found else None


def _times(name: str) -> pd.DataFrame:
    frame = recorded(name)
    return pd.DataFrame(columns=[*POINT, "metric"]) if frame is None else frame[frame.metric == "time"]


def _point(operation: str, one, goal: float, **other) -> dict:
    found = dict(kernel=one.kernel, policy=one.policy, shape=one.shape, m=one.m, default=one.baseline, us=one.value)
    return {"operation": operation, "ratio": one.ratio, "goal": goal, "against": one.kernel, **found, **other}


def _gemm():
    frame = _times("gemm")
    for one in frame[frame.policy == INVARIANT].itertuples():
        yield _point("GEMM", one, costs.WORST_GOAL)


def _decode():
    rules = costs.decode_by_rule()
    if rules is None:
        return
    frame = _times("decode")
    mine = frame[(frame.kernel == "triton") & (frame.policy == f"invariant-{rules.rule[0]}")]
    for one in mine[mine["shape"].str.contains(" kv8 ")].itertuples():
        yield _point("decode", one, costs.DECODE_WORST)


def _latent():
    frame = _times("decode")
    if frame.empty:
        return
    shape, m = costs.LATENT_GOAL_AT
    here = frame[(frame["shape"] == shape) & (frame.m == m)]
    theirs = here[(here.kernel == "flashmla") & (here.policy == "default")]
    ours = here[(here.kernel == "triton") & here.policy.str.startswith("invariant-free")]
    if len(theirs) and len(ours):
        best, base = next(ours.nsmallest(1, "value").itertuples()), float(theirs.value.iloc[0])
        yield _point("latent decode", best, costs.LATENT_GOAL, default=base, ratio=best.value / base, against="flashmla")


def _prefill():
    frame = _times("prefill")
    for one in frame[frame.policy != "default"].itertuples():
        yield _point("prefill", one, PREFILL_GOAL)


def _nvfp4():
    frame = _times("nvfp4")
    for one in frame[frame.policy == INVARIANT].itertuples():
        yield _point("NVFP4", one, next(goal for rows, goal in NVFP4_GOALS if one.m <= rows))


def _engine():
    frame = recorded("engine")
    if frame is None:
        return
    for operation, metric in ENGINE_STEPS.items():
        for one in frame[(frame.policy == INVARIANT) & (frame.metric == metric)].itertuples():
            yield _point(operation, one, ENGINE_GOAL, default=1e3 * one.baseline, us=1e3 * one.value)


def _missed(points: pd.DataFrame) -> pd.DataFrame:
    """The points above their goal, operation by operation, the worst first."""
    order = {operation: place for place, operation in enumerate(points.operation.unique())}
    missed = points[points.ratio > points.goal]
    missed = missed.assign(place=missed.operation.map(order))
    return missed.sort_values(["place", "ratio"], ascending=[True, False])


def misses(points: pd.DataFrame | None, profile: pd.DataFrame | None) -> pd.DataFrame | None:
    """The points above their goal, the worst of each operation first: point, default us, us, ratio, goal, bound (a key
    of WORDS, "launches from the host", a kind of kernel, or "not profiled"), and of the longest launch the busiest
    unit, waves, warps active and what they wait for. points: `goals`; profile: `readings`."""
    if points is None:
        return None
    rows = []
    for one in _missed(points).itertuples():
        figures = {"default us": round(one.default, 1), "us": round(one.us, 1), "ratio": round(one.ratio, 3)}
        found = _at(profile, one.kernel, one.policy, one.shape, one.m)
        if one.kernel == "engine":
            bound, _, busy = _engine_bound(one.operation, one.m)
            counted = {"busiest unit": f"device {busy:.0%}"}
        elif found is None:
            bound, counted = "not profiled", {}
        else:
            bound, counted = (
                found.bound,
                {
                    "busiest unit": f"{found.nearest} {found.nearest_share:.0%}",
                    "waves": f"{found.waves:.2f}",
                    "warps": f"{found.warps:.1f}",
                    "wait for": f"{found.stall} {found.stall_share:.0%}",
                },
            )
        rows.append({"point": _label(one), **figures, "goal": one.goal, "bound": bound, **counted})
    columns = ["point", "default us", "us", "ratio", "goal", "bound", "busiest unit", "waves", "warps", "wait for"]
    return named(pd.DataFrame(rows, columns=columns).fillna({name: "" for name in columns[6:]}), "misses")


def _label(one) -> str:
    rule = one.policy.removeprefix(INVARIANT).replace("-", " ", 1)
    rows = f", {one.m} rows"
    size = {"GEMM": rows, "NVFP4": rows, "prefill": "", **dict.fromkeys(ENGINE_STEPS, f", concurrency {one.m}")}
    return f"{one.operation}{rule}, {one.shape}{size.get(one.operation, f', batch {one.m}')}"


def worst_sentences(points: pd.DataFrame | None, profile: pd.DataFrame | None, missed: pd.DataFrame | None) -> str:
    """What bounds the worst point of each operation that misses its goal, a line each; "" where none does. points:
    `goals`; profile: `readings`; missed: `misses`."""
    lines = []
    for one in () if points is None else _missed(points).drop_duplicates("operation").itertuples():
        label = _label(one)
        goal = "the library's own time, no goal being set" if one.operation == "prefill" else f"a goal of {one.goal:.2f}"
        head = f"- {label}, {cite(f'{one.ratio:.2f}', missed, point=label)} against {goal}: "
        found = _at(profile, one.kernel, one.policy, one.shape, one.m)
        if one.kernel == "engine":
            bound, says, _ = _engine_bound(one.operation, one.m)
            lines.append(f"{head}**{bound}**: {cite_all(says, missed, point=label)}.")
        elif found is None:
            lines.append(f"{head}not profiled.")
        else:
            key = {"policy": one.policy, "shape": one.shape, "m": one.m}
            rest = "" if found.of_call > 0.98 else f"; {found.launch} takes {found.of_call:.0%} of the call"
            says = cite_all(found.says + rest, profile, kernel=one.kernel, **key)
            lines.append(f"{head}**{WORDS[found.bound]}**: {says}.")
    return "\n".join(lines)


def _at(profile: pd.DataFrame | None, kernel: str, policy: str, shape: str, m: int):
    if profile is None:
        return None
    mine = profile[(profile[POINT] == [kernel, policy, shape, m]).all(axis=1)]
    return mine.iloc[0] if len(mine) else None


def _engine_bound(operation: str, concurrency: int) -> tuple[str, str, float]:
    """The engine step's bound, a sentence on it, and the share of a step for which the device has work, by the
    engine's own table."""
    frame = recorded("engine")
    mine = frame[(frame.policy == INVARIANT) & (frame.m == concurrency)].set_index("metric")
    step, device = mine.loc[ENGINE_STEPS[operation]], mine.loc["device time"]
    busy, extra = device.value / step.value, step.value - step.baseline
    kinds = mine[mine.index.str.startswith("device time, ")]
    kind = (kinds.value - kinds.baseline).idxmax().removeprefix("device time, ")
    says = (
        f"the device has work for {busy:.0%} of a step ({device.baseline / step.baseline:.0%} under the default); of "
        f"{extra:.3f} ms more {device.value - device.baseline:.3f} are the device's, most of them in {kind}"
    )
    return "launches from the host" if busy < FEW else kind, says, busy


def misses_sentence(points: pd.DataFrame | None, missed: pd.DataFrame | None) -> str:
    """How many points miss their goal and what bounds them. points: `goals`; missed: `misses`."""
    if points is None:
        return "No GPU has recorded a benchmark that has a goal."
    if missed.empty:
        return f"All {len(points)} recorded points that have a goal reach it."
    counts = missed.bound.value_counts()
    what = ", ".join(f"{WORDS.get(bound, bound)} {cite(count, missed, bound=bound)}" for bound, count in counts.items())
    text = f"{cite(len(missed), missed)} of {len(points)} recorded points that have a goal miss it. Bounds: {what}."
    if "not profiled" in counts:
        text += " What is not profiled, `batch-variance bench profile` may add."
    return text


# ---------------------------------------------------------------- beside the default


def shares(points: pd.DataFrame | None, profile: pd.DataFrame | None, most: int = 12) -> pd.DataFrame | None:
    """Shares of the peak at the profiled points that miss their goal, ours beside the default's, a row a point and unit
    of DRAWN: point, unit, default, invariant; the worst of each operation in turn until there are ``most`` points. None
    where no such point is profiled with its default."""
    if points is None or profile is None:
        return None
    found = []
    for one in _missed(points).itertuples():
        ours = _at(profile, one.kernel, one.policy, one.shape, one.m)
        base = _at(profile, one.against, "default", one.shape, one.m)
        if ours is not None and base is not None:
            turn = sum(other.operation == one.operation for _, other, *_ in found)
            found.append((turn, one, ours, base))
    chosen = sorted(sorted(found, key=lambda f: f[0])[:most], key=lambda f: (f[1].place, f[0]))
    rows = [
        {"point": _label(one), "unit": unit, "default": base[unit], "invariant": ours[unit]}
        for _, one, ours, base in chosen
        for unit in DRAWN
    ]
    return named(pd.DataFrame(rows), "shares of the peak") if rows else None


def shares_sentence(frame: pd.DataFrame) -> str:
    """How busy each unit is in ours and in the default, over the points drawn. frame: `shares`."""
    at = lambda share, unit: cite(format(share, ".0%"), frame, unit=unit)  # noqa: E731
    middle = frame.groupby("unit", sort=False)[["default", "invariant"]].median()
    parts = [
        f"{one.Index} {at(one.invariant, one.Index)} (default {at(one.default, one.Index)})"
        for one in middle.itertuples()
    ]
    best = frame.loc[frame.invariant.idxmax()]
    top = cite(format(best.invariant, ".0%"), frame, point=best.point, unit=best.unit)
    return (
        f"Median share of the peak over the {cite(frame.point.nunique(), frame)} points drawn: {', '.join(parts)}. The "
        f"busiest unit of an invariant kernel is {best.unit}, at {top} ({best.point})."
    )


def absent_sentence() -> str:
    return "No GPU has recorded hardware counters yet: `batch-variance bench profile` does."

"""The argument of the whole suite, read off whatever has been recorded: rates, costs, findings, and what is not known.

It computes nothing but sums, rates and geometric means of recorded tables, and copes with any of them missing: what a
missing table would have said is then among the things not known.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import field_validator

from ..common import Rate, data_path
from .parameters import StudyParameters
from .sources import cite, cite_all, named


class Parameters(StudyParameters):
    """Notebook 00's parameters."""

    recorded: str

    @field_validator("recorded")
    @classmethod
    def _folder(cls, value: str) -> str:
        if value and not Path(value).is_dir():
            raise ValueError("this is no folder: give a folder of recorded tables, or '' for data/recorded.")
        return value


@dataclass(frozen=True)
class Recorded:
    """A folder of recorded tables."""

    folder: Path

    def table(self, name: str) -> pd.DataFrame:
        """A table by its file's stem, empty where it is not there."""
        path = self.folder / f"{name}.csv"
        return pd.read_csv(path) if path.is_file() else pd.DataFrame()

    @cached_property
    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.csv"))


def recorded(p: Parameters) -> Recorded:
    return Recorded(Path(p.recorded) if p.recorded else data_path("recorded"))


def tier_of(row: pd.Series) -> str:
    """recorded-gpu for a row measured on a GPU; else what the row itself says, or cpu-native."""
    if str(row.get("tier", "live-gpu")) != "live-gpu":
        return str(row["tier"])
    return "recorded-gpu" if str(row.get("gpu", "none")) not in ("none", "nan") else "cpu-native"


def place(row: pd.Series) -> str:
    """Where a recorded row was measured."""
    return str(row["gpu"]) if tier_of(row) == "recorded-gpu" else str(row.get("processor", "a CPU"))


# --- Rates ------------------------------------------------------------------------------------------------------------

_SUBJECTS = ["subject", "dispatch", "events", "trials", "low", "high", "tier", "table"]


def rates(found: Recorded) -> pd.DataFrame:
    """How often a row's bits, or a request's text, depend on its batch, under default and under invariant dispatch.

    A row a (subject, dispatch): subject, dispatch, events, trials, low, high (exact 95%), tier, table.
    """
    rows = [*_decode_rates(found), *_threshold_rates(found), *_concurrency_rates(found), *_attribution_rates(found)]
    return named(pd.DataFrame(rows, columns=_SUBJECTS), "rates")


def _rate(subject: str, dispatch: str, events: int, trials: int, tier: str, table: str) -> dict:
    rate = Rate(int(events), int(trials))
    return dict(zip(_SUBJECTS, (subject, dispatch, rate.events, rate.trials, *rate.interval, tier, table)))


def _decode_rates(found: Recorded):
    bits = found.table("decode_bits")
    for kernel in dict.fromkeys(bits.get("kernel", [])):
        mine = bits[bits.kernel == kernel]
        own = mine.policy.str.startswith("invariant")
        for dispatch, part in (("default", mine[~own]), ("invariant", mine[own])):
            if len(part):
                yield _rate(
                    f"bits of a row, {kernel} decode",
                    dispatch,
                    part.solo_differs.sum(),
                    part.rows_checked.sum(),
                    tier_of(part.iloc[0]),
                    "decode_bits",
                )


def _threshold_rates(found: Recorded):
    for ffn in ("moe", "dense"):
        name = f"row_threshold_{ffn}_variants"
        table = found.table(name)
        busy = table[table.concurrency > 1] if len(table) else table
        for dispatch, policies in (("default", ["default"]), ("invariant", ["force-gemv", "force-gemm"])):
            part = busy[busy.policy.isin(policies)] if len(busy) else busy
            if len(part):
                yield _rate(
                    f"text of a request, row threshold, {ffn}",
                    dispatch,
                    part["differ from alone"].sum(),
                    part.requests.sum(),
                    tier_of(part.iloc[0]),
                    name,
                )


def _concurrency_rates(found: Recorded):
    for ffn in ("moe", "dense"):
        name = f"concurrency_{ffn}_outputs"
        table = found.table(name)
        if not len(table):
            continue
        for level, part in table[table.run.isin(["A", "B"]) & (table.concurrency > 1)].groupby("concurrency"):
            yield _rate(
                f"text of a request, all mechanisms, {ffn}, concurrency {level}",
                "default",
                part["differ from alone"].sum(),
                part.requests.sum(),
                tier_of(part.iloc[0]),
                name,
            )
        twin = table[table.run == "twin"]
        if len(twin):
            yield _rate(
                f"text of a request, all mechanisms, {ffn}, twin",
                "invariant",
                twin["differ from alone"].sum(),
                twin.requests.sum(),
                tier_of(twin.iloc[0]),
                name,
            )


# Parts of the attribution's table, and what their settings are called here.
_ATTRIBUTED = {"budget": "", "amplifiers:storage and logits in bfloat16": ", all in bfloat16"}


def _attribution_rates(found: Recorded):
    """Each mechanism alone on, all on, and none on, from the part of the table that shares changed texts out, and from
    the one that keeps every value in bfloat16."""
    for ffn, (kind, named) in itertools.product(("moe", "dense"), _ATTRIBUTED.items()):
        name = f"attribution_{ffn}_prompts"
        table = found.table(name)
        chosen = table[table.part == kind] if len(table) else table
        for mechanisms, part in chosen.groupby("mechanisms", sort=False) if len(chosen) else ():
            if mechanisms == part.studied.iloc[0]:
                what = "all mechanisms together"
            elif "+" in mechanisms:
                continue
            else:
                what = "no mechanism" if mechanisms == "none" else f"{mechanisms.replace('_', ' ')} alone"
            dispatch = "invariant" if mechanisms == "none" else "default"
            subject = f"text of a request, {what}, {ffn}{named}"
            yield _rate(subject, dispatch, part.changed.sum(), part.requests.sum(), tier_of(part.iloc[0]), name)


# --- Costs ------------------------------------------------------------------------------------------------------------

_TIMES = ("time", "step, CUDA graphs")
_COSTS = ["benchmark", "kernel", "policy", "cost", "least", "most", "configurations", "tier"]


def costs(found: Recorded) -> pd.DataFrame:
    """What invariance costs: for each benchmark and kernel the least costly invariant policy that was measured wherever
    the default was. Columns: benchmark, kernel, policy, cost (geometric mean of time over the default's), least, most,
    configurations, tier."""
    rows = []
    for name in ("gemm", "nvfp4", "decode", "prefill", "engine"):
        table = found.table(name)
        if not len(table):
            continue
        table = table[table.metric.isin(_TIMES) & ~table.policy.str.contains("-streams")]
        for kernel, part in table.groupby("kernel"):
            full = len(part[part.policy == "default"])
            means = {
                policy: some.ratio
                for policy, some in part.groupby("policy")
                if policy != "default" and len(some) == full
            }
            means = {policy: ratio for policy, ratio in means.items() if policy.startswith("invariant")}
            if means:
                best = min(means, key=lambda policy: np.log(means[policy]).mean())
                ratio = means[best]
                rows.append(
                    (
                        name,
                        kernel,
                        best.removeprefix("invariant").strip("-") or "invariant",
                        float(np.exp(np.log(ratio).mean())),
                        ratio.min(),
                        ratio.max(),
                        full,
                        tier_of(part.iloc[0]),
                    )
                )
    return named(pd.DataFrame(rows, columns=_COSTS), "costs")


# --- Findings ---------------------------------------------------------------------------------------------------------


def findings(found: Recorded) -> pd.DataFrame:
    """What the recorded tables say, a sentence each: finding, n, tier, table. Tables that are missing say nothing."""
    rows = [*_rate_findings(rates(found)), *_ulp_findings(found), *_audit_findings(found), *_probe_findings(found)]
    rows += [
        (
            f"Invariance in {row.benchmark} ({row.kernel}) costs {row.cost:.2f} times the default's time with "
            f"{row.policy}, "
            f"{row.least:.2f} to {row.most:.2f} by shape.",
            f"{row.configurations} configurations",
            row.tier,
            row.benchmark,
        )
        for row in costs(found).itertuples()
    ]
    return pd.DataFrame(rows, columns=["finding", "n", "tier", "table"])


def findings_count(table: pd.DataFrame) -> pd.DataFrame:
    """How many findings, from which table: tier, table, findings. table: `findings`."""
    return named(table.groupby(["tier", "table"], sort=False).size().rename("findings").reset_index(), "findings-count")


def findings_sentence(table: pd.DataFrame) -> str:
    return cite_all(f"{len(table)} findings from {table.table.nunique()} tables.", findings_count(table))


def _rate_findings(table: pd.DataFrame):
    for row in table.itertuples():
        said = f"{row.events:,} of {row.trials:,} ({row.low:.2%} to {row.high:.2%})"
        unit = "rows" if row.subject.startswith("bits") else "requests"
        yield (
            f"{row.subject.capitalize()}, {row.dispatch} dispatch: {said} differ from the same alone.",
            f"{row.trials:,} {unit}",
            row.tier,
            row.table,
        )


def _ulp_findings(found: Recorded):
    table = found.table("decode_ulp")
    for kernel in dict.fromkeys(table.get("kernel", [])):
        part = table[(table.kernel == kernel) & (table.policy == "default")]
        counts = part.groupby("ulp_up_to")["values"].sum()
        moved = counts.sum() - counts.get("0", 0)
        if moved:
            yield (
                f"Of the values that move in a {kernel} decode row, {counts.get('1', 0) / moved:.0%} move by one ULP.",
                f"{int(moved):,} values",
                tier_of(part.iloc[0]),
                "decode_ulp",
            )


def _audit_findings(found: Recorded):
    table = found.table("audit")
    tokens = found.table("audit_tokens")
    for key, part in table.groupby(["device", "dtype", "batch"]) if len(table) else ():
        first = part.iloc[0]
        kinds = part[part.introduces > 0].op.drop_duplicates().tolist()
        said = ", ".join(sorted(one.removeprefix("_") for one in kinds)[:4]) + (" and others" if len(kinds) > 4 else "")
        words = (
            f"{len(kinds)} kind{'s' if len(kinds) != 1 else ''} of operation "
            f"introduce{'s' if len(kinds) == 1 else ''} a difference in {first.model}, {key[1]}, batch of {key[2]}"
            + (f" ({said})" if kinds else "")
        )
        if len(tokens):
            own = tokens[(tokens.device == key[0]) & (tokens.dtype == key[1]) & (tokens.batch == key[2])]
            words += f"; the text of {int((own.first_difference >= 0).sum())} of {len(own)} rows changes"
        yield words + ".", f"{int(part.calls.sum()):,} operations", tier_of(first), "audit"


def _probe_findings(found: Recorded):
    table = found.table("probe_zoo")
    planted = table[table.axis != "none"] if len(table) else table
    if len(planted):
        yield (
            f"The probe finds {int(planted.found.sum()):,} of {int(planted.instances.sum()):,} planted faults on "
            f"their own axis, "
            f"{int(planted.found_elsewhere.sum())} on another.",
            f"{int(planted.instances.sum()):,} faults",
            tier_of(planted.iloc[0]),
            "probe_zoo",
        )


# --- What is not known ------------------------------------------------------------------------------------------------

WANTED = {
    "row_threshold_moe_variants": "how often a GPU's row threshold changes text in a gathered MoE",
    "row_threshold_dense_variants": "how often a GPU's row threshold changes text in a dense model",
    "concurrency_moe_outputs": "how text varies with concurrency on a GPU, MoE",
    "concurrency_dense_outputs": "how text varies with concurrency on a GPU, dense",
    "attribution_moe_*": "which mechanism is to blame for how many changed texts, MoE",
    "attribution_dense_*": "which mechanism is to blame for how many changed texts, dense",
    "gemm": "what an invariant GEMM costs",
    "nvfp4": "what an NVFP4 matmul without a threshold costs",
    "decode": "what own-length splits cost",
    "prefill": "what a prefill that agrees with decode costs",
    "engine": "what invariance costs a whole step",
}


def unknown(found: Recorded) -> pd.DataFrame:
    """What the recorded tables leave open: question, why. First what a count of zero still allows."""
    rows = [
        (f"{row.subject}, {row.dispatch} dispatch: is it never?", f"0 of {row.trials:,} still allow {row.high:.2%}")
        for row in rates(found).itertuples()
        if row.events == 0
    ]
    for pattern, question in WANTED.items():
        if not list(found.folder.glob(f"{pattern}.csv")):
            rows.append((question, f"no table {pattern} is recorded"))
    places = {
        place(row)
        for name in found.names
        if len(table := found.table(name))
        for row in [table.iloc[-1]]
        if "gpu" in row
    }
    gpus = sorted(one for one in places if one.startswith("NVIDIA") or "GPU" in one)
    rows.append(
        ("whether other GPUs and drivers behave alike", f"recorded on {', '.join(gpus) if gpus else 'no GPU'} only")
    )
    return pd.DataFrame(rows, columns=["question", "why it is open"])


def inventory(found: Recorded) -> pd.DataFrame:
    """Every recorded table: table, rows, where, last date, commits, tier."""
    rows = []
    for name in found.names:
        table = found.table(name)
        if not len(table):
            continue
        known = [name for name in ("gpu", "processor") if name in table]
        where = list(dict.fromkeys(place(row) for _, row in table[known].drop_duplicates().iterrows())) if known else []
        date = "–" if "date" not in table else str(table.date.max())
        commits = "–" if "commit" not in table else ", ".join(sorted(set(table.commit.astype(str)))[:3])
        rows.append((name, len(table), ", ".join(where) or "–", date, commits, tier_of(table.iloc[-1])))
    return pd.DataFrame(rows, columns=["table", "rows", "where", "last date", "commits", "tier"])


# --- In words ---------------------------------------------------------------------------------------------------------


def argument(found: Recorded) -> str:
    """The argument in a few sentences, each only as far as tables carry it."""
    table, cost = rates(found), costs(found)
    parts = [
        "A sum of floating-point numbers has the bits of its tree of additions. Where a kernel lets the batch "
        "choose the tree, a row's bits depend on its company."
    ]
    by = {dispatch: part for dispatch, part in table.groupby("dispatch")}
    if "default" in by:
        at = lambda text: cite(text, table, subject=most.subject, dispatch="default")  # noqa: E731
        most = by["default"].assign(share=lambda t: t.events / t.trials).sort_values("share").iloc[-1]
        parts.append(
            f"Recorded so far, default dispatch changes up to {at(f'{most.share:.0%}')} ({most.subject}: "
            f"{at(f'{most.events:,} of {most.trials:,}')})."
        )
    if "invariant" in by:
        own = by["invariant"]
        parts.append(
            f"With the tree fixed, {cite(f'{int(own.events.sum()):,} of {int(own.trials.sum()):,}', table)} rows and "
            f"requests differ; in the smallest of these {cite(len(own), table, dispatch='invariant')} groups that still "
            f"allows {cite(f'{own.high.max():.2%}', table, dispatch='invariant', high=own.high.max())}."
        )
    if len(cost):
        said = "; ".join(
            f"{row.benchmark} ({row.kernel}) {cite(f'{row.cost:.2f}', cost, benchmark=row.benchmark, kernel=row.kernel)}"
            for row in cost.itertuples()
        )
        parts.append(f"Fixing it costs, as a factor of the default's time: {said}.")
    if len(parts) == 1:
        parts.append("Nothing is recorded in this folder, so nothing more can be said here.")
    return " ".join(parts)


def rates_sentence(table: pd.DataFrame) -> str:
    """What the figure of rates shows."""
    if not len(table):
        return "No rate is recorded."
    zero = table[(table.dispatch == "invariant") & (table.events == 0)]
    some = table[(table.dispatch == "default") & (table.events > 0)]
    varied = f"{len(some)} of {int((table.dispatch == 'default').sum())}"
    none = f"{len(zero)} of {int((table.dispatch == 'invariant').sum())}"
    return (
        f"{cite(varied, table)} subjects vary under default dispatch; under invariant dispatch "
        f"{cite(none, table)} show none, over {cite(f'{int(zero.trials.sum()):,}', table)} rows and requests."
    )


def costs_sentence(table: pd.DataFrame) -> str:
    """What the figure of costs shows."""
    if not len(table):
        return "No cost is recorded."
    worst = table.sort_values("most").iloc[-1]
    at = lambda text, row: cite(text, table, benchmark=row.benchmark, kernel=row.kernel)  # noqa: E731
    low, high = table.loc[table.cost.idxmin()], table.loc[table.cost.idxmax()]
    return (
        f"The least costly invariant policy takes {at(f'{low.cost:.2f}', low)} to {at(f'{high.cost:.2f}', high)} times "
        f"the default's time in the geometric mean; the worst single case is {at(f'{worst.most:.2f}', worst)} "
        f"({worst.benchmark}, {worst.kernel})."
    )

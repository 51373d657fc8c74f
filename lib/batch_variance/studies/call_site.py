"""Notebook 06: what a probe at one call site can say, how far to trust it, and which operation of a model is to blame.

It runs the zoo of planted faults, a live session at one call site of the real model (or reads one from a log), a
well-formed and a broken input session, and the audit; each returns tidy frames. Drawing is in
``reporting.plots.call_site``.
"""

import types
import warnings
from pathlib import Path
from typing import Sequence

import pandas as pd
import torch
from pydantic import Field, field_validator

from ..common import BadInput, data_path, resolve_device
from ..engine.checkpoint import hf_folder
from ..hooks import AXES, CallSiteProbe, read_log, verdicts
from ..hooks.adapters import SITES, probe_at
from ..hooks.checks import LengthsMatch, ScalesPerRow, SelectionsAgree, SlotsStable, TailUnread, summarise
from ..hooks.command import audit_report, changes
from ..hooks.record import recorded
from ..hooks.subjects import PROMPTS, causal_subject
from ..hooks.zoo import ZOO, Planted, instance
from .parameters import StudyParameters
from .sources import cite, cite_all, named


class Parameters(StudyParameters):
    """The notebook's parameters; see its parameters cell."""

    model: str
    dtype: str
    device: str
    batch: int = Field(ge=2, le=256)
    rows_watched: int = Field(ge=1)
    decode_steps: int = Field(ge=0)
    tokens: int = Field(ge=1)
    zoo_instances: int = Field(ge=1)
    clean_calls: int = Field(ge=1)
    site: str
    site_calls: int = Field(ge=1)
    log: str
    seed: int

    @field_validator("site")
    @classmethod
    def _site_known(cls, value: str) -> str:
        if value not in SITES:
            raise ValueError(f"it is no known call site: give one of {', '.join(SITES)}.")
        return value

    @field_validator("log")
    @classmethod
    def _log_readable(cls, value: str) -> str:
        if value and not Path(value).is_file():
            raise ValueError("there is no such file: give a log that a probe wrote, or '' for a live session.")
        return value


# -- how far to trust the probe
# --------------------------------------------------------------------------------------------


def zoo(p: Parameters) -> pd.DataFrame:
    """Each toy kernel on random instances. Columns: kernel, planted, axis, verdict, instances.

    ``axis`` runs over the probe's axes and ``tail`` (the input check); ``instances`` counts those with that verdict.
    """
    rows = []
    for planted in ZOO:
        generator = torch.Generator().manual_seed(p.seed)
        for number in range(p.zoo_instances):
            for axis, verdict in examine(planted, number, generator).items():
                rows.append(
                    {"kernel": planted.name, "planted": planted.axis or "none", "axis": axis, "verdict": verdict}
                )
    return (
        pd.DataFrame(rows)
        .groupby(["kernel", "planted", "axis", "verdict"], sort=False)
        .size()
        .rename("instances")
        .reset_index()
    )


def examine(planted: Planted, seed: int, generator: torch.Generator) -> dict[str, str]:
    """One instance of a toy kernel: the verdict of each axis, and of the tail check (``variant`` where it fails)."""
    engine = types.SimpleNamespace(kernel=planted.make())
    with CallSiteProbe(
        (engine, "kernel"),
        {"x": 0, "lengths": 0},
        axes=AXES,
        lengths="lengths",
        pad={"x": 1},
        rows=1,
        seed=seed,
        checks=[TailUnread("x", "lengths")],
    ) as probe:
        engine.kernel(*instance(generator))
    tail = probe.well_formed()["verdict"][0]
    return {**probe.verdict(), "tail": {"fails": "variant", "ok": "invariant"}.get(tail, tail)}


def zoo_score(frame: pd.DataFrame) -> pd.DataFrame:
    """Per kernel: instances found on the planted axis, and found anywhere else."""
    variant = frame[frame["verdict"].eq("variant")]
    own = variant[variant["axis"].eq(variant["planted"])].groupby("kernel")["instances"].sum()
    other = variant[variant["axis"].ne(variant["planted"])].groupby("kernel")["instances"].sum()
    table = frame[frame["axis"].eq("rerun")].groupby(["kernel", "planted"], sort=False)["instances"].sum().reset_index()
    return named(table.assign(
        found=table["kernel"].map(own).fillna(0).astype(int),
        found_elsewhere=table["kernel"].map(other).fillna(0).astype(int),
    ), "zoo-score")


def clean_session(p: Parameters) -> dict:
    """One long session on the clean kernel: calls, rows compared, rows that differ (false alarms), and the verdicts."""
    generator = torch.Generator().manual_seed(p.seed)
    engine = types.SimpleNamespace(kernel=ZOO[0].make())
    with CallSiteProbe((engine, "kernel"), {"x": 0, "lengths": 0}, axes=AXES, lengths="lengths", rows=1) as probe:
        for _ in range(p.clean_calls):
            engine.kernel(*instance(generator))
    frame = probe.frame()
    return {
        "calls": probe.sampled,
        "rows": int(frame["rows_checked"].sum()),
        "differ": int(frame["rows_differ"].sum()),
        "verdicts": probe.verdict(),
        "ms_per_call": 1000 * probe.seconds / probe.sampled,
    }


def clean_table(clean: dict) -> pd.DataFrame:
    """`clean_session` as a row."""
    return named(pd.DataFrame([{name: clean[name] for name in ("calls", "rows", "differ", "ms_per_call")}]), "clean")


def recorded_zoo() -> pd.DataFrame:
    """The recorded zoo: session, kernel, axis, instances, found, found elsewhere, date; clean calls are the last
    row.
    """
    table = pd.read_csv(data_path("recorded", "probe_zoo.csv"), keep_default_na=False)
    columns = ["session", "kernel", "axis", "instances", "found", "found_elsewhere", "date"]
    return named(table[columns].rename(columns={"found_elsewhere": "found elsewhere"}), "recorded-zoo")


# -- one call site of the real model
# ---------------------------------------------------------------------------------------


def session(p: Parameters, path: str | Path) -> pd.DataFrame:
    """The log of a live session at ``p.site`` while the model decodes a batch, or the log that ``p.log`` names.

    Raises BadInput for a log that is not one, or a site that cannot be probed here.
    """
    if p.log:
        return read_log(p.log)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = causal_subject(
            str(hf_folder(p.model)), p.batch, PROMPTS, _dtype(p), str(resolve_device(p.device)), p.decode_steps
        )
        calls = _calls(subject, p)
        with (
            torch.no_grad(),
            probe_at(
                p.site,
                axes=AXES,
                every=max(calls // p.site_calls, 1),
                max_calls=p.site_calls,
                log=path,
                rows=p.rows_watched,
            ) as probe,
        ):
            subject.greedy(range(p.batch), 1 + max(p.decode_steps, 1))
    if not probe.sampled:
        raise BadInput(f"no call at {p.site} was sampled ({'; '.join(probe.refusals) or 'it was never called'}).")
    return read_log(path)


def _calls(subject, p: Parameters) -> int:
    """How often the site is called in such a session, counted by one without replays."""
    with torch.no_grad(), probe_at(p.site, axes=("rerun",), every=10**9) as counter:
        subject.greedy(range(p.batch), 1 + max(p.decode_steps, 1))
    return counter.calls


def session_verdicts(log: pd.DataFrame) -> pd.DataFrame:
    """Verdict per site and axis, from a log."""
    rows = log[log["kind"].eq("axis")]
    axes = tuple(axis for axis in AXES if axis in set(rows["axis"]))
    parts = [verdicts(part, axes).assign(site=site) for site, part in rows.groupby("site", sort=False)]
    return named(pd.concat(parts, ignore_index=True), "verdicts")


def ulp_distribution(log: pd.DataFrame) -> pd.DataFrame:
    """ULP distances of the elements that differ: site, axis, ulp_from (lower end of a power-of-two bucket), elements,
    share.
    """
    rows = []
    for (site, axis), part in log[log["kind"].eq("axis")].groupby(["site", "axis"], sort=False):
        counts = sum(torch.tensor(list(h)) for h in part["ulp_histogram"])
        total = int(part["elements"].sum())
        for bucket in counts.nonzero().flatten().tolist():
            lower = 0 if bucket == 0 else 2 ** (bucket - 1)
            rows.append(
                {
                    "site": site,
                    "axis": axis,
                    "ulp_from": lower,
                    "elements": int(counts[bucket]),
                    "share": int(counts[bucket]) / max(total, 1),
                }
            )
    return named(pd.DataFrame(rows, columns=["site", "axis", "ulp_from", "elements", "share"]), "ulp")


def ulp_sentence(distribution: pd.DataFrame) -> str:
    """How many elements differ and how far, from `ulp_distribution`."""
    if distribution.empty:
        return "No element differs over all replays."
    differing = int(distribution.elements.sum())
    small = distribution[distribution.ulp_from <= 4].elements.sum() / differing
    text = f"{differing:,} elements differ over all replays; {small:.0%} of them by 7 ULP or less."
    if small < 1:
        return cite_all(text, distribution) + " The rest are mostly values near zero, where one ULP is tiny: a maximum alone would mislead."
    return cite_all(text, distribution)


def introduced_sentence(vary: pd.DataFrame, first: dict | None, uncompared: Sequence[dict] = ()) -> str:
    """How many calls bring a difference in, from `varying`, the first operation that does, and how much was not compared."""
    missing = f" {len(uncompared)} operations could not be compared, the first `{uncompared[0]['op']}` in `{uncompared[0]['module']}`." if uncompared else ""
    if vary.empty:
        return ("No operation that was compared" if missing else "No operation") + " gives a row other bits in the batch than alone." + missing
    brought = vary[vary.introduces > 0]
    text = f"{int(brought.introduces.sum())} calls of {len(brought)} kinds bring a difference in, {int(vary.propagates.sum())} only pass one on. "
    named_first = f"The first is `{first['op']}` in `{first['module']}` ({first['phase']})." if first else "None introduces one."
    return cite_all(text, vary) + named_first + missing


# -- are the inputs well formed?
# -------------------------------------------------------------------------------------------

FAULTS = ("none", "a selection", "a cache slot", "a length", "a tail read", "a batch-wide scale")


def well_formed(calls: int = 6, seed: int = 0) -> pd.DataFrame:
    """The five input checks on a small sparse decode, as it should be and with one fault planted in each.

    Columns: planted, and those of ``checks.summarise``.
    """
    return named(pd.concat([_decode_session(fault, calls, seed) for fault in FAULTS], ignore_index=True), "input-checks")


def _decode_session(fault: str, calls: int, seed: int) -> pd.DataFrame:
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(64, 16, generator=generator)

    def sparse_decode(q, indices, lengths, positions, cache, scale):
        inside = torch.arange(indices.shape[1])[None] < lengths[:, None]
        fetched = cache[indices.clamp(min=0)]
        kept = fetched if fault == "a tail read" else torch.where(inside[..., None], fetched, 0.0)
        return (q[:, None] * scale + kept).sum(1)

    engine = types.SimpleNamespace(sparse_decode=sparse_decode)
    checks = [
        SelectionsAgree("indices", "positions"),
        SlotsStable("cache", "indices"),
        LengthsMatch("lengths", "indices"),
        ScalesPerRow("scale", "q"),
    ]
    with CallSiteProbe(
        (engine, "sparse_decode"), {"q": 0, "indices": 0, "lengths": 0, "positions": 0}, axes=("rerun",), checks=checks
    ) as probe:
        for call in range(calls):
            q = torch.randn(4, 16, generator=generator)
            lengths = torch.tensor([3, 5, 3, 8])
            indices = torch.full((4, 8), -1)
            for row, length in enumerate(lengths.tolist()):
                indices[row, :length] = torch.arange(length) * 7 % 64
            if fault == "a selection" and call == calls - 1:
                indices[2, 0] = 9
            if fault == "a cache slot" and call == calls - 1:
                cache[7] += 1
            given = lengths.clone()
            if fault == "a length" and call == calls - 1:
                given[1] = 4
            scale = q.abs().amax() / 127 if fault == "a batch-wide scale" else torch.tensor(0.5)
            engine.sparse_decode(q, indices, given, torch.tensor([10, 11, 10, 12]), cache, scale)
    table = probe.well_formed()
    return pd.concat([table, _tail_session(fault, seed)], ignore_index=True).assign(planted=fault)


def _tail_session(fault: str, seed: int) -> pd.DataFrame:
    """The tail check needs padded values, which the zoo's kernels have."""
    name = "tail read" if fault == "a tail read" else "clean"
    engine = types.SimpleNamespace(kernel=next(planted for planted in ZOO if planted.name == name).make())
    with CallSiteProbe(
        (engine, "kernel"), {"x": 0, "lengths": 0}, axes=("rerun",), checks=[TailUnread("x", "lengths")]
    ) as probe:
        engine.kernel(*instance(torch.Generator().manual_seed(seed)))
    return probe.well_formed()


# -- which operation brings the difference in
# ------------------------------------------------------------------------------


def audit(p: Parameters) -> dict:
    """The audit of the model as the command makes it; see ``hooks.command.audit_report``."""
    return audit_report(p.model, p.batch, _dtype(p), p.device, list(PROMPTS), p.tokens, p.rows_watched, p.decode_steps)


def _dtype(p: Parameters) -> str:
    return p.dtype if p.dtype != "auto" else ("bfloat16" if resolve_device(p.device).type == "cuda" else "float32")


def varying(operations: pd.DataFrame) -> pd.DataFrame:
    """The kinds of operation that give a row other bits in the batch than alone."""
    columns = [
        "phase",
        "module",
        "op",
        "calls",
        "solo",
        "introduces",
        "propagates",
        "max_ulp_in",
        "max_ulp_out",
        "max_row_scaled_ulp_out",
    ]
    return named(operations.loc[operations["solo"].gt(0), columns].reset_index(drop=True), "varying")


def size_map(sizes: pd.DataFrame) -> pd.DataFrame:
    """Bit class by operation and batch size, of the operations with more than one class; index: phase, module and op
    in words.
    """
    kinds = changes(sizes)
    chosen = sizes.merge(kinds.loc[kinds["classes"].gt(1), ["phase", "module", "op"]], on=["phase", "module", "op"])
    name = (
        chosen["phase"]
        + " · "
        + chosen["module"].str.replace("model.layers.*.", "", regex=False)
        + " · "
        + chosen["op"]
    )
    return chosen.assign(operation=name).pivot_table(index="operation", columns="size", values="bit_class", sort=False)


def recorded_summary() -> pd.DataFrame:
    """The recorded audits: tier, dtype, gpu or processor, batch, operations that vary alone, kinds that introduce,
    tokens.
    """
    axes, operations, tokens = (recorded(name) for name in ("audit_axes", "audit", "audit_tokens"))
    rows = []
    for (tier, model, dtype, device, batch), part in axes.groupby(
        ["tier", "model", "dtype", "device", "batch"], sort=False
    ):
        here = lambda table: table[
            (table[["model", "dtype", "device"]] == [model, dtype, device]).all(axis=1) & table["batch"].eq(batch)
        ]  # noqa: E731
        found, told = here(operations), here(tokens)
        by_axis = part.set_index("axis")["vary"]
        rows.append(
            {
                "tier": tier,
                "device": part["gpu"].iloc[0] if device == "cuda" else part["processor"].iloc[0].split(",")[0],
                "dtype": dtype,
                "batch": batch,
                **{f"{axis} varies": by_axis.get(axis) for axis in ("rerun", "contents", "position", "solo")},
                "kinds that introduce": ", ".join(dict.fromkeys(found.loc[found["introduces"].gt(0), "op"])) or "none",
                "rows whose logits differ": int(told["logits_differ"].sum()),
                "rows whose tokens differ": int(told["first_difference"].ge(0).sum()),
                "rows": len(told),
                "note": "; ".join(note for note in found["note"].dropna().unique() if "axes" in note),
            }
        )
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["tier", "kinds that introduce"])


def recorded_cost() -> pd.DataFrame:
    """What a probe in the engine cost on a GPU, a row a site and sampling: calls, sampled, run time probed over plain and
    after the probe over plain (medians), the probe's own share of the run, ms a sample, and of its controls where they
    were made after the load ("ms later"); empty where none is recorded."""
    path = data_path("recorded", "probe_overhead.csv")
    if not path.exists():
        return pd.DataFrame()
    names = {
        "ratio": "probed over plain",
        "off_ratio": "after over plain",
        "ms_per_sample": "ms a sample",
        "later_ms_per_sample": "ms later",
        "us_per_call_not_sampled": "us not sampled",
    }
    cost = pd.read_csv(path).rename(columns=names)
    return named(cost if "ms later" in cost else cost.assign(**{"ms later": 0.0}), "probe-cost")


def cost_sentence(cost: pd.DataFrame, goal: float = 0.02) -> str:
    """Whether one call in 100 costs less than ``goal`` of the engine's time, from `recorded_cost`: surely, if the upper
    quartile of the rounds is below it as well."""
    if cost.empty:
        return "No GPU's cost of a probe is recorded."
    row, told, later, limited = cost.iloc[0], [], [], []
    at = lambda text, row: cite(text, cost, site=row.site, sampling=row.sampling)  # noqa: E731
    plain = cost[cost.sampling == "re-run and solo"]
    for each in plain.rename(columns={"ms a sample": "ms"}).itertuples():
        told.append(
            f"at `{each.site}` {at(f'{each.share:.2%}', each)} of the run ({at(f'{each.ms:.2f}', each)} ms a sample,"
            f" {at(f'{each.plain_s / each.calls * each.rounds * 1000:.2f}', each)} ms of engine a call)"
        )
    postponed = cost[cost.sampling == "re-run and solo, later"]
    for each in postponed.rename(columns={"ms a sample": "ms", "ms later": "ms_later"}).itertuples():
        later.append(
            f"{at(f'{each.share:.2%}', each)} at `{each.site}` ({at(f'{each.ms:.2f}', each)} ms a sample, and"
            f" {at(f'{each.ms_later:.2f}', each)} ms after the load)"
        )
    for each in cost[cost.sampling.str.endswith("at most 2%")].itertuples():
        one_in = at(f"{each.calls / max(each.sampled, 1):.0f}", each)
        limited.append(f"one call in {one_in} at `{each.site}`, {at(f'{each.share:.2%}', each)} of the run")

    def held(rows: pd.DataFrame, what: str) -> str:
        if rows["share_high"].max() < goal:
            return f"under {what}"
        return f"under {what} at the median, not surely" if rows["share"].max() < goal else f"not everywhere under {what}"

    return (
        f"Recorded on {row.gpu} ({row.date}), one call in {cite(row.every, cost)}, re-run and solo: {'; '.join(told)}. That is"
        f" {held(plain, f'the goal of {goal:.0%}')}. A sample makes two more calls, which alone are 2% of a site's own time."
        + (f" With its controls made later it takes {'; '.join(later)}, {held(postponed, 'the goal')}." if later else "")
        + (f" With `max_share` = 0.02 the probe samples {'; '.join(limited)}." if limited else "")
        + ("" if "us not sampled" in cost else " What the calls not sampled cost was not measured then and is in none of these.")
    )


def attention_by_threads(
    lengths: tuple[int, ...] = (46, 47, 48, 64), rows: int = 8, threads: tuple[int, ...] = (1, 2)
) -> pd.DataFrame:
    """Does a row's place in the batch change its bits in torch's CPU attention, and does one thread end it?

    The batch holds one row ``rows`` times, one query each (a decode step), float32, 9 heads of 64. Columns: threads,
    length, classes (different results among the equal rows).
    """
    before = torch.get_num_threads()
    table = []
    try:
        for count in threads:
            torch.set_num_threads(count)
            for length in lengths:
                generator = torch.Generator().manual_seed(length)
                q, k, v = (
                    torch.randn(1, 9, n, 64, generator=generator).expand(rows, 9, n, 64).contiguous()
                    for n in (1, length, length)
                )
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
                table.append(
                    {"threads": count, "length": length, "classes": len({row.numpy().tobytes() for row in out})}
                )
    finally:
        torch.set_num_threads(before)
    return named(pd.DataFrame(table), "threads")


def summarise_checks(log: pd.DataFrame) -> pd.DataFrame:
    """The well-formedness table of a log, where the session ran input checks."""
    return summarise(log[log["kind"].eq("check")])

"""From records to verdicts: what the sampled calls of one site allow to be said about each axis.

``variant`` and ``invariant`` are said only with controls that could have failed:

- negative: the identical call gives identical bits. Where it does not, no other axis means anything.
- positive: the comparison sees one flipped bit, and a row's result does change when the row's own values do.
- occurred: the batch really was another (rows fewer or more, order changed, batchmates' bits changed, padding added),
and where
  a witness was given (the number of splits, the kernel chosen), that changed too.

A difference that a narrower axis explains is not counted a second time (``axes.EXPLAINED_BY``).
"""

import pandas as pd

from ..common import exact_interval
from .axes import AXES, EXPLAINED_BY


def verdicts(records: pd.DataFrame, axes: tuple[str, ...] = AXES) -> pd.DataFrame:
    """One row an axis: verdict, reason, calls, rows_checked, rows_differ, low, high (95% interval of the share that
    differs).

    records: what ``CallSiteProbe.records()`` or a log holds for one site.
    """
    by_axis = {axis: records[records["axis"] == axis] for axis in AXES}
    raw = {axis: _differ(by_axis[axis]) for axis in AXES}
    rows = []
    for axis in axes:
        part = by_axis[axis]
        # Where position matters of itself, a row that also moved says nothing about another axis.
        position_matters = raw["position"] and not any(raw[cause] for cause in EXPLAINED_BY["position"])
        moved_counts = axis == "position" or not position_matters
        checked = int(part["rows_checked"].sum() if moved_counts else part["rows_unmoved"].sum())
        differ = int(part["rows_differ"].sum() if moved_counts else part["differ_unmoved"].sum())
        verdict, reason = _judge(axis, part, by_axis["rerun"], raw, checked, differ)
        low, high = exact_interval(differ, checked)
        calls = int((part["rows_checked"] > 0).sum())
        rows.append(
            {
                "axis": axis,
                "verdict": verdict,
                "reason": reason,
                "calls": calls,
                "rows_checked": checked,
                "rows_differ": differ,
                "low": low,
                "high": high,
            }
        )
    return pd.DataFrame(rows)


def _differ(part: pd.DataFrame) -> int:
    return int(part["rows_differ"].sum()) if len(part) else 0


def _judge(
    axis: str, part: pd.DataFrame, rerun: pd.DataFrame, raw: dict[str, int], checked: int, differ: int
) -> tuple[str, str]:
    if not checked:
        notes = [note for note in part["note"] if note]
        lost = (
            " (every row it could check had also moved, and position matters here)"
            if len(part) and part["rows_checked"].sum()
            else ""
        )
        return "inconclusive", notes[0] if notes else f"no row was checked{lost}"
    if not rerun["rows_checked"].sum():
        return "inconclusive", "the negative control is missing: no identical call was repeated"
    flips = rerun["flip_seen"].dropna().astype(bool)
    if not len(flips) or not flips.all():
        return "inconclusive", "the positive control failed: the comparison missed a flipped bit" if len(
            flips
        ) else "the positive control is missing"
    if axis == "rerun":
        return (
            ("variant", "the identical call gave other bits")
            if differ
            else ("invariant", "the identical call gave the same bits")
        )
    if raw["rerun"]:
        return "inconclusive", "the negative control failed: even the identical call gives other bits"
    if not part["occurred"].sum():
        return "inconclusive", "nothing occurred: no replay's batch was really another"
    if differ:
        causes = [cause for cause in EXPLAINED_BY[axis] if raw[cause]]
        if causes:
            return "inconclusive", f"rows differ, but {causes[0]} already explains it"
        return "variant", f"{differ} of {checked} rows differ"
    if not rerun["rows_sensitive"].sum():
        return "inconclusive", "the positive control failed: no row's result changed with the row's own values"
    if part["witness"].notna().any() and not part["witness"].fillna(False).astype(bool).any():
        return "inconclusive", "the witness never changed: the condition under test did not occur"
    return "invariant", f"none of {checked} rows differ"

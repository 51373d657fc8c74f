"""Serving what the attribution needs, as one table of counts per cell and prompt, from which everything else is
computed.

A cell belongs to one or more parts: ``budget`` (the coalitions of the design), ``load`` (none and all at each
concurrency), ``amplifiers`` (none, one small mechanism and all under other dtypes), ``planted`` (perturbations of known
size and nothing else). Cells that several parts want are served once.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable

import pandas as pd

from ..common import BadInput, write_atomically
from ..common.provenance import gpu_columns
from ..engine import MECHANISMS, Mechanisms, Settings
from .attribution_design import Design
from .cells import CELL_COLUMNS, Cell, Served, Subject, serve_cells
from .recordings import recorded_table

PARTS = ("budget", "load", "amplifiers", "planted")
TABLES = ("prompts", "choices", "steps")
RECORDED = "attribution"
# What is changed of the base settings, for a row alone and in a batch alike.
AMPLIFIERS = {
    "logits compared in bfloat16": {"logits": "bfloat16"},
    "storage in bfloat16": {"storage": "bfloat16"},
    "storage and logits in bfloat16": {"storage": "bfloat16", "logits": "bfloat16"},
    "the same, highest id wins a tie": {"storage": "bfloat16", "logits": "bfloat16", "ties": "highest"},
    "activations as computed": {"activations": "as computed"},
    "activations in float8": {"activations": "float8"},
}
BASE = "as in the budget"


@dataclass(frozen=True)
class Plan:
    """What to serve. base: settings without mechanisms. carrier: the small mechanism that amplifiers are shown on.
    planted: standard deviations of logit noise. cycle: how many prompts there are: at concurrency 1 each is asked once,
    as more would be the same again. off_only: ``load`` leaves out the cells with all on, and serves every cell in full.
    """

    design: Design
    base: Settings
    concurrency: int
    concurrencies: tuple[int, ...]
    requests: int
    tokens: int
    seeds: tuple[int, ...]
    amplifiers: tuple[str, ...] = ()
    carrier: str = "split_k"
    planted: tuple[float, ...] = ()
    parts: tuple[str, ...] = PARTS
    cycle: int = 1
    off_only: bool = False

    def __post_init__(self):
        for given, known, what in ((self.amplifiers, AMPLIFIERS, "amplifier"), (self.parts, PARTS, "part")):
            unknown = [name for name in given if name not in known]
            if unknown:
                raise BadInput(f"{what} {unknown[0]!r} is unknown: give some of {', '.join(known)}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise BadInput(f"seeds = {list(self.seeds)}: give at least one, and none twice.")

    def settings(self, mechanisms, **changes) -> Settings:
        return replace(self.base, mechanisms=Mechanisms.of(mechanisms), **changes)

    def cells(self) -> dict[Cell, list[str]]:
        """Every cell with the parts that it belongs to."""
        found: dict[Cell, list[str]] = {}

        def want(
            part: str, settings: Settings, seed: int, concurrency: int = self.concurrency, requests: int = self.requests
        ) -> None:
            if part.split(":")[0] in self.parts:
                found.setdefault(Cell(settings, concurrency, requests, self.tokens, seed), []).append(part)

        for seed in self.seeds:
            for coalition in self.design.coalitions():
                want("budget", self.settings(coalition), seed)
        first = self.seeds[0]
        for concurrency in self.concurrencies:
            for names in ((),) if self.off_only else ((), self.design.mechanisms):
                requests = self.cycle if concurrency == 1 and not self.off_only else self.requests
                want("load", self.settings(names), first, concurrency, requests)
        for label, changes in self._amplified().items():
            unscaled = changes.get("activations", self.base.activations) == "as computed"
            kept = [
                self.design.but(names, "batch_scale") if unscaled else names
                for names in ((), (self.carrier,), self.design.mechanisms)
            ]
            for names in dict.fromkeys(kept):
                want(f"amplifiers:{label}", self.settings(names, **changes), first)
        for size in self.planted:
            want("planted", self.settings((), planted=size), first)
        return found

    def _amplified(self) -> dict[str, dict]:
        return {BASE: {}} | {label: AMPLIFIERS[label] for label in self.amplifiers} if self.amplifiers else {}


def applicable(mechanisms: list[str], ffn: str, activations: str) -> tuple[str, ...]:
    """Those of ``mechanisms`` that can act: a dense FFN has no experts to order, and without a scale none is shared."""
    return tuple(
        name
        for name in MECHANISMS
        if name in mechanisms
        and not (name == "expert_order" and ffn == "dense")
        and not (name == "batch_scale" and activations == "as computed")
    )


@dataclass(frozen=True)
class Measured:
    """prompts: a row a (part, cell, prompt) as `by_prompt` gives it; choices, steps: of `Served`."""

    prompts: pd.DataFrame
    choices: pd.DataFrame
    steps: pd.DataFrame
    name: str = ""  # before the names of its tables, so that sentences on several runs cite their own

    def part(self, name: str) -> pd.DataFrame:
        """The rows of ``prompts`` that belong to a part."""
        kind = self.prompts.part.str.split(":").str[0]
        return self.prompts[kind == name].reset_index(drop=True)


def measure(
    subject: Subject,
    plan: Plan,
    processes: int = 0,
    so_far: Callable[[Measured], None] | None = None,
    progress: bool = True,
) -> Measured:
    """Serve the plan. so_far: called with what is complete after each cell, its choices and steps still empty."""
    wanted = plan.cells()
    complete: list[pd.DataFrame] = []

    def done(cell: Cell, requests: pd.DataFrame) -> None:
        complete.append(by_prompt(requests, wanted[cell]))
        if so_far:
            so_far(Measured(pd.concat(complete, ignore_index=True), pd.DataFrame(), pd.DataFrame()))

    served = serve_cells(subject, list(wanted), processes, done, progress)
    return Measured(_prompts(served, wanted), served.choices, served.steps)


def _prompts(served: Served, wanted: dict[Cell, list[str]]) -> pd.DataFrame:
    groups = {key: frame for key, frame in served.requests.groupby(list(CELL_COLUMNS), sort=False)}
    table = pd.concat(
        [by_prompt(groups[tuple(cell.columns().values())], parts) for cell, parts in wanted.items()], ignore_index=True
    )
    settings = [name for name in CELL_COLUMNS if name in served.solo and name != "planted"]
    alone = served.solo.assign(
        solo_text=[hashlib.sha256(repr(text).encode()).hexdigest()[:12] for text in served.solo.text],
        solo_ties=[sum(margin == 0 for margin in margins) for margins in served.solo.margins],
    )
    return table.merge(
        alone[[*settings, "prompt", "solo_text", "solo_ties"]],
        on=[*settings, "prompt"],
        how="left",
        validate="many_to_one",
    )


def by_prompt(requests: pd.DataFrame, parts: list[str]) -> pd.DataFrame:
    """One cell's requests as a row a (part, prompt): requests, changed, compared and margins_moved (tokens),
    largest_move (logits), exact_ties, co_resident_rows (mean), and the text alone, where joined, by its hash."""
    rows = requests.groupby([*CELL_COLUMNS, "prompt"], sort=False, as_index=False).agg(
        requests=("request", "size"),
        changed=("changed", "sum"),
        compared=("compared", "sum"),
        margins_moved=("margins_moved", "sum"),
        largest_move=("largest_move", "max"),
        exact_ties=("exact_ties", "sum"),
        co_resident_rows=("co_resident_rows", "mean"),
    )
    return pd.concat([rows.assign(part=part) for part in parts], ignore_index=True)


def kind_of(subject: Subject) -> str:
    """The FFN in the names of recorded tables: dense, moe, or moe-all where every expert is taken and none chosen."""
    return "moe-all" if subject.ffn == "moe" and subject.top_k == subject.experts else subject.ffn


def prefix_of(kind: str, tier: str) -> str:
    """How the names of recorded tables begin: what a GPU served apart from what a CPU modelled."""
    return f"{RECORDED}_{kind}" if tier == "live-gpu" else f"{RECORDED}_cpu_{kind}"


def save(subject: Subject, label: str, plan: Plan, measured: Measured, folder: str | Path) -> list[Path]:
    """Write the tables as ``<folder>/attribution_<kind>_<table>.csv`` (``attribution_cpu_...`` without a GPU) with what
    ran beside every row; "" writes none.

    A part replaces its own older rows and leaves other parts', so that parts can be run one by one.
    """
    if not folder:
        return []
    stamp, written = stamp_of(subject, label, plan) | _provenance(), []
    for name in TABLES:
        frame, path = getattr(measured, name), Path(folder) / f"{prefix_of(kind_of(subject), subject.tier)}_{name}.csv"
        if frame.empty:
            continue
        new = frame.assign(**stamp)
        old = pd.read_csv(path) if path.is_file() else new[:0]
        kept = old[~_replaced(old, new, plan)] if len(old) else old
        new = pd.concat([kept, new], ignore_index=True) if len(kept) else new
        written.append(write_atomically(path, partial(new.to_csv, index=False)))
    return written


@lru_cache(maxsize=1)
def _provenance() -> dict:
    """Asked once, at the first cell: the date on which serving began, and no new processes for each of many cells."""
    return gpu_columns()


def _replaced(old: pd.DataFrame, new: pd.DataFrame, plan: Plan) -> pd.Series:
    if "part" in old:
        return old.part.str.split(":").str[0].isin(plan.parts)
    key = lambda frame: frame[list(CELL_COLUMNS)].astype(str).agg("|".join, axis=1)  # noqa: E731
    return key(old).isin(key(new))


def recorded(kind: str, tier: str = "live-gpu") -> Measured | None:
    """What is committed for an FFN (`kind_of`) and the tier it was served on, None where a table is missing."""
    tables = {name: recorded_table(prefix_of(kind, tier), name) for name in TABLES}
    return None if any(frame.empty for frame in tables.values()) else Measured(**tables)


def stamp_of(subject: Subject, label: str, plan: Plan) -> dict:
    """Columns that say what ran; the design's among them, so that a recorded table can be analysed as it was served."""
    return {
        "ffn": subject.ffn,
        "model": subject.model,
        "label": label,
        "tier": subject.tier,
        "design": plan.design.kind,
        "orders": plan.design.orders,
        "design_seed": plan.design.seed,
        "studied": "+".join(plan.design.mechanisms),
        "carrier": plan.carrier,
    }


def design_of(budget: pd.DataFrame) -> Design | None:
    """The design of a recorded budget, or its ends where a run broke off before all orders were served; None without
    these either, and for no rows."""
    if budget.empty:
        return None
    row, served = budget.iloc[0], set(budget.mechanisms)
    names = tuple(str(row.studied).split("+"))
    for design in (Design(names, row.design, int(row.orders), int(row.design_seed)), Design(names)):
        if {"+".join(coalition) or "none" for coalition in design.coalitions()} <= served:
            return design
    return None

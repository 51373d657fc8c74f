"""Which mechanism is to blame for how many changed texts? Each is switched alone, on and off, and the changes are
shared out.

An engine has several choices that look at the batch (`engine.mechanisms`). A request counts as changed when its text
differs from the same prompt served alone under the same settings. What is served is `attribution_measuring`'s, how
changes are shared out `attribution_design`'s; the words for it are `attribution_findings`'.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import pandas as pd
from pydantic import Field, field_validator, model_validator

from ..common import Rate, resolve_device
from ..engine import Mechanisms, Settings
from ..engine import mechanisms as switches
from ..kernels.nvfp4 import policy
from . import attribution_measuring as measuring
from .attribution_design import DESIGNS, Design
from .attribution_measuring import AMPLIFIERS, Measured, Plan, applicable
from .cells import Subject, never_alone, occurred
from .served_model import Device, ServedModel
from .sources import PARAMETERS, cite, named
from .texts import many_prompts


class Parameters(ServedModel):
    """Parameters of notebook 04."""

    threshold: int
    mechanisms: list[str]
    design: Literal[DESIGNS]
    orders: int = Field(ge=1)
    storage: Literal["float32", "bfloat16"]
    logits: Literal["float32", "bfloat16"]
    activations: Literal[(*switches.ACTIVATIONS, "as computed")]
    concurrency: int = Field(ge=2)
    concurrencies: list[int]
    requests: int = Field(ge=1)
    prompts: int
    tokens: int = Field(ge=1)
    seeds: list[int]
    amplifiers: list[str]
    carrier: str
    planted: list[float]
    processes: int = Field(ge=0)
    device: Device
    record: str

    @field_validator("threshold")
    @classmethod
    def _threshold(cls, value: int) -> int:
        policy("default", value)
        return value

    @field_validator("mechanisms")
    @classmethod
    def _mechanisms(cls, value: list[str]) -> list[str]:
        Mechanisms.of(value)
        if len(set(value)) < len(value) or len(value) < 2:
            raise ValueError("name at least two mechanisms, each once.")
        return value

    @field_validator("carrier")
    @classmethod
    def _carrier(cls, value: str) -> str:
        Mechanisms.only(value)
        return value

    @field_validator("concurrencies")
    @classmethod
    def _concurrencies(cls, value: list[int]) -> list[int]:
        if not value or min(value) < 1 or len(set(value)) < len(value):
            raise ValueError("give different whole numbers from 1.")
        return value

    @field_validator("prompts")
    @classmethod
    def _prompts(cls, value: int) -> int:
        many_prompts(value)
        return value

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, value: list[int]) -> list[int]:
        if len(value) < 2 or len(set(value)) < len(value) or min(value) < 0:
            raise ValueError(
                "give at least two different whole numbers from 0: the budget's order is compared between them."
            )
        return value

    @field_validator("amplifiers")
    @classmethod
    def _amplifiers(cls, value: list[str]) -> list[str]:
        unknown = [name for name in value if name not in AMPLIFIERS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is unknown: give some of {', '.join(AMPLIFIERS)}.")
        return value

    @field_validator("planted")
    @classmethod
    def _planted(cls, value: list[float]) -> list[float]:
        if len(value) < 2 or min(value) <= 0 or sorted(set(value)) != value:
            raise ValueError("give at least two sizes above 0, rising.")
        return value

    @model_validator(mode="after")
    def _together(self) -> Self:
        if len(applicable(self.mechanisms, self.ffn, self.activations)) < 2:
            raise ValueError(
                f"of mechanisms = {self.mechanisms} fewer than two can act with ffn = {self.ffn!r} and activations = "
                f"{self.activations!r}: name others."
            )
        return self


@dataclass
class Setup:
    """The subject, what to serve of it, and the words for the model."""

    p: Parameters
    subject: Subject
    plan: Plan

    @property
    def tier(self) -> str:
        return self.subject.tier

    @cached_property
    def label(self) -> str:
        kind = (
            "dense"
            if self.p.ffn == "dense"
            else f"derived: FFN split into {self.p.experts} experts, top {self.p.top_k}"
        )
        return f"NVFP4 FFN, {kind}"


def prepare(p: Parameters) -> Setup:
    """Raises BadInput as the loader of the model does."""
    subject = Subject.of(
        p.model, p.ffn, p.experts, p.top_k, p.expert_split, resolve_device(p.device).type, many_prompts(p.prompts)
    )
    design = Design(applicable(p.mechanisms, p.ffn, p.activations), p.design, p.orders if p.design == "orders" else 0)
    base = Settings(storage=p.storage, logits=p.logits, activations=p.activations, threshold=p.threshold)
    return Setup(
        p,
        subject,
        Plan(
            design,
            base,
            p.concurrency,
            tuple(p.concurrencies),
            p.requests,
            p.tokens,
            tuple(p.seeds),
            tuple(p.amplifiers),
            p.carrier,
            tuple(p.planted),
            cycle=p.prompts,
        ),
    )


def measure(setup: Setup) -> Measured:
    """Serve the whole plan; with ``record`` set, the counts are written after every cell."""
    keep = lambda measured: save(setup, measured)  # noqa: E731
    measured = measuring.measure(setup.subject, setup.plan, setup.p.processes, keep if setup.p.record else None)
    save(setup, measured)
    return measured


def save(setup: Setup, measured: Measured) -> None:
    measuring.save(setup.subject, setup.label, setup.plan, measured, setup.p.record)


def describe_mechanisms(design: Design, threshold: int) -> str:
    """Each mechanism studied: what it looks at, what it then chooses, and its invariant twin; from the tables that the
    engine runs by."""
    rows = "rows of the matmul"
    said = {
        "row_threshold": (rows, f"GEMV up to {cite(threshold, PARAMETERS, name='threshold')}, GEMM above", "GEMV"),
        "batch_splits": (
            "all decode rows' lengths",
            f"FlashMLA's schedule over {switches.SPLIT_PARTS} programs",
            switches.OWN_LENGTH_RULE,
        ),
        "split_k": (rows, _table_words(switches.SPLIT_K_BY_ROWS, "segment of K", "segments of K"), "1 segment of K"),
        "attention_dispatch": (
            "the longest decode row",
            _table_words(switches.ATTENTION_BLOCK_BY_LONGEST, "token a block", "tokens a block"),
            f"{switches.ATTENTION_BLOCK_BY_LONGEST[0][1]} tokens a block",
        ),
        "expert_order": (
            "each expert's rows in the step",
            "a row adds its experts by load, the busiest first",
            "by their numbers",
        ),
        "norm_blocks": (
            "rows of the norm",
            _table_words(switches.NORM_BLOCK_BY_ROWS, "column a sum", "columns a sum"),
            f"{switches.NORM_BLOCK_BY_ROWS[-1][1]} columns a sum",
        ),
        "batch_scale": ("the largest activation among the matmul's rows", "one scale", "a scale a row"),
    }
    lines = [f"| {name.replace('_', ' ')} | {' | '.join(said[name])} |" for name in design.mechanisms]
    return "\n".join(["| mechanism | looks at | and chooses | off |", "|---|---|---|---|", *lines])


def _table_words(table, one: str, many: str) -> str:
    words = [
        f"{choice} {one if choice == 1 else many} {'above' if largest is None else f'up to {largest}'}"
        for largest, choice in table
    ]
    return ", ".join(words)


# --- Tables from the counts ---


def cell_table(prompts: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Sums over prompts: a row a group with requests, changed and its exact interval, prompts with a change, the share
    of tokens before a divergence whose margin moved, the largest move, exact ties, co-resident rows."""
    rows = []
    for key, part in prompts.groupby(list(by), sort=False):
        rate = Rate(int(part.changed.sum()), int(part.requests.sum()))
        rows.append(
            dict(zip(by, key)) | {
                "requests": rate.trials,
                "changed": rate.events,
                "rate": rate.value,
                "low": rate.interval[0],
                "high": rate.interval[1],
                "prompts changed": int(part[part.changed > 0].prompt.nunique()),
                "prompts": int(part.prompt.nunique()),
                "margins moved": float(part.margins_moved.sum() / max(part.compared.sum(), 1)),
                "largest move": float(part.largest_move.max()),
                "exact ties": int(part.exact_ties.sum()),
                "co-resident rows": float((part.co_resident_rows * part.requests).sum() / part.requests.sum()),
            }
        )
    return pd.DataFrame(rows)


def alone_table(measured: Measured, design: Design) -> pd.DataFrame:
    """Each mechanism on alone: what it chose, whether its trigger occurred, the bits that it moved and the texts that
    it changed."""
    table = cell_table(measured.part("budget"), "mechanisms").set_index("mechanisms")
    row = measured.part("budget").iloc[0]
    settings = {name: row[name] for name in ("storage", "logits", "ties", "activations", "threshold", "planted")}
    mine = measured.choices[(measured.choices[list(settings)] == pd.Series(settings)).all(axis=1)]
    rows = []
    for name in design.mechanisms:
        on = mine[mine.mechanisms == name]
        alone = on[(on.mechanism == name) & (on.concurrency == 0)]
        batch = on[(on.mechanism == name) & (on.concurrency > 1)]
        new = never_alone(on[on.mechanism == name])
        rows.append(
            {
                "mechanism": name,
                "alone it chose": ", ".join(sorted(set(alone.choice))),
                "in a batch it chose": ", ".join(sorted(set(batch.choice))),
                "choices not made alone in such steps": float(new["count"].sum() / max(batch["count"].sum(), 1)),
                "occurred": occurred(on, name),
                **{
                    column: table.at[name, column]
                    for column in ("margins moved", "largest move", "requests", "changed", "low", "high")
                },
            }
        )
    return named(pd.DataFrame(rows).sort_values("changed", ascending=False, kind="stable", ignore_index=True), f"{measured.name}alone")


def load_table(measured: Measured) -> pd.DataFrame:
    """None on and all on at each concurrency."""
    part = measured.part("load")
    part = part.assign(on=part.mechanisms.where(part.mechanisms == "none", "all"))
    table = cell_table(part, "on", "concurrency")
    table = table.sort_values(["on", "concurrency"], ascending=[False, True], ignore_index=True)
    return named(table, f"{measured.name}load")


def coalition_table(measured: Measured) -> pd.DataFrame:
    """Every set of mechanisms that the budget rests on."""
    return named(cell_table(measured.part("budget"), "mechanisms"), f"{measured.name}coalitions")


def amplifier_table(measured: Measured) -> pd.DataFrame:
    """None, one small mechanism and all on, by dtype; solo ties, and solo texts that differ from the base dtype's."""
    part = measured.part("amplifiers")
    if part.empty:
        return pd.DataFrame()
    part = part.assign(amplifier=part.part.str.partition(":")[2])
    table = cell_table(part, "amplifier", "mechanisms")
    base = part[part.amplifier == measuring.BASE].set_index(["mechanisms", "prompt"])
    solo = []
    for amplifier, mechanisms in zip(table.amplifier, table.mechanisms):
        mine = part[(part.amplifier == amplifier) & (part.mechanisms == mechanisms)].set_index("prompt")
        ties = int(mine.solo_ties.sum())
        known = base.loc[mechanisms].solo_text if mechanisms in base.index.get_level_values(0) else None
        other = None if known is None else int((mine.solo_text != known.reindex(mine.index)).sum())
        solo.append({"exact ties alone": ties, "texts alone unlike the base's": other})
    return named(table.join(pd.DataFrame(solo)), f"{measured.name}amplifiers")


def planted_table(measured: Measured) -> pd.DataFrame:
    """Changed texts by the size of the planted perturbation."""
    return named(cell_table(measured.part("planted"), "planted"), f"{measured.name}planted")

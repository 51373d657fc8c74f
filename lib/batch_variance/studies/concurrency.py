"""How does the text of a request depend on how many others are in flight, and can that be told from its margins alone?

An engine with the chosen mechanisms serves the same prompts at every concurrency, twice: runs A and B differ only in
arrival jitter. Its twin, with every mechanism off, is the control. A third run forces every request to its prompt's own
text, so that positions line up and what the batch does to bits can be measured (`forcing`).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pandas as pd
from pydantic import Field, field_validator, model_validator
from tqdm.auto import tqdm

from ..common import Rate, resolve_device
from ..engine import MECHANISMS, ChatTokenizer, EngineConfig, Load, Mechanisms, Model, Settings, build, hf_folder
from ..engine.experts import SPLITS
from . import forcing, parity, prediction, spans
from .cells import Cell, Loaded, Served, Subject, _loaded, _workers, serve_cells
from .parameters import StudyParameters
from .power import StoppingRule, worth_in_independent_requests
from .recordings import recorded_table, save_tables, without_columns
from .texts import many_prompts, read_prompts


class Parameters(StudyParameters):
    """Parameters of notebook 03."""

    model: str
    ffn: Literal["dense", "moe"]
    experts: int = Field(ge=2)
    top_k: int = Field(ge=1)
    expert_split: Literal[SPLITS]
    mechanisms: list[str]
    threshold: int = Field(ge=0)
    storage: Literal["bfloat16", "float32"]
    logits: Literal["bfloat16", "float32"]
    concurrencies: list[int]
    requests: int = Field(ge=1)
    alone_requests: int = Field(ge=1)
    forced_requests: int = Field(ge=1)
    twin_concurrencies: list[int]
    parity_concurrency: int = Field(ge=2)
    tokens: int = Field(ge=2)
    stop_width: float
    prompts: str
    prompt_count: int
    seed: int = Field(ge=0)
    device: str
    processes: int = Field(ge=0)
    record: str

    @field_validator("mechanisms")
    @classmethod
    def _mechanisms(cls, value: list[str]) -> list[str]:
        if value != ["all"]:
            Mechanisms.of(value)
        if not value or len(set(value)) < len(value):
            raise ValueError(f"name at least one mechanism, each once: ['all'], or some of {', '.join(MECHANISMS)}.")
        return value

    @field_validator("concurrencies")
    @classmethod
    def _concurrencies(cls, value: list[int]) -> list[int]:
        if 1 not in value or min(value) < 1 or len(set(value)) < len(value) or len(value) < 2:
            raise ValueError("give different whole numbers from 1: 1 (the solo reference) and at least one above it.")
        return sorted(value)

    @field_validator("stop_width")
    @classmethod
    def _stop_width(cls, value: float) -> float:
        StoppingRule(value)
        return value

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        resolve_device(value)
        return value

    @field_validator("prompts")
    @classmethod
    def _prompts(cls, value: str) -> str:
        if value and len(read_prompts(value)) < 2:
            raise ValueError(
                "there is one prompt only: give at least two, since a prompt is predicted from the others' noise."
            )
        return value

    @field_validator("prompt_count")
    @classmethod
    def _prompt_count(cls, value: int) -> int:
        if len(many_prompts(value)) < 2:
            raise ValueError("give at least two, since a prompt is predicted from the others' noise.")
        return value

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.ffn == "moe" and self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} does not fit {self.experts} experts: give 1 ... {self.experts}.")
        above = [level for level in self.concurrencies if level > 1]
        if self.parity_concurrency not in self.twin_concurrencies:
            raise ValueError(
                f"parity_concurrency = {self.parity_concurrency} is not among twin_concurrencies = "
                f"{self.twin_concurrencies}: name one of them."
            )
        if not set(self.twin_concurrencies) <= set(above) or len(set(self.twin_concurrencies)) < len(
            self.twin_concurrencies
        ):
            raise ValueError(f"twin_concurrencies = {self.twin_concurrencies}: name some of {above}, each once.")
        return self

    @property
    def settings(self) -> Settings:
        on = Mechanisms.all() if self.mechanisms == ["all"] else Mechanisms.of(self.mechanisms)
        return Settings(mechanisms=on, storage=self.storage, logits=self.logits, threshold=self.threshold)


@dataclass
class Setup:
    """What every part of the study uses. subject: the model in words and the prompts as token ids; loaded: it in
    memory.
    """

    p: Parameters
    tokenizer: ChatTokenizer
    texts: list[str]
    subject: Subject
    loaded: Loaded

    @property
    def tier(self) -> str:
        return self.subject.tier

    @property
    def label(self) -> str:
        on = "all mechanisms" if self.p.mechanisms == ["all"] else ", ".join(self.p.mechanisms)
        return f"{self.loaded.weights.label}; {on}; {self.p.storage} storage"

    @cached_property
    def solo(self) -> forcing.Solo:
        """Every prompt alone under the mechanisms, with all its hidden states and logits."""
        return forced_solo(self.loaded, self.p.settings, self.p.tokens)


def prepare(p: Parameters) -> Setup:
    """Load the model with an NVFP4 FFN, cut into experts for ``ffn = "moe"``. Raises BadInput as the loader does."""
    texts = read_prompts(p.prompts) if p.prompts else many_prompts(p.prompt_count)
    subject = Subject.of(p.model, p.ffn, p.experts, p.top_k, p.expert_split, resolve_device(p.device).type, texts)
    return Setup(p, ChatTokenizer(hf_folder(p.model)), texts, subject, _loaded(subject))


# --- Serving ----------------------------------------------------------------------------------------------------------


@dataclass
class Results:
    """requests: a row a request that decoded freely: concurrency, run, request, prompt, text, alone (token ids joined
    by
    blanks), first_divergence (-1: none), margins, co_resident_rows (mean over its steps). forced: `forcing.measure` of
    every concurrency."""

    requests: pd.DataFrame
    forced: forcing.Measured


def serve_free(setup: Setup) -> pd.DataFrame:
    """`Results.requests`. run is A or B at every concurrency; C (a third of the same) at ``parity_concurrency``, and
    twin
    (every mechanism off) at ``twin_concurrencies``. Runs of a concurrency differ in the seed of their arrival jitter
    only. ``alone`` is the text of
    the prompt served alone under the same settings. With a ``stop_width`` a concurrency stops early by
    `power.StoppingRule`,
    once each of its runs may.
    """
    p, rule, parts, turn = setup.p, StoppingRule(setup.p.stop_width), [], 0
    left = {level: _wanted(setup, level) for level in p.concurrencies}
    while left:
        # Without early stopping everything at once; with it whole cycles of the prompts, then a look.
        block = {
            level: min(count, _cycles(setup, 4 * level)) if p.stop_width else count for level, count in left.items()
        }
        cells = {
            _cell(setup, run, level, block[level], turn): (run, level) for level in block for run in _runs(p, level)
        }
        done = {level: _wanted(setup, level) - left[level] for level in left}
        parts.append(_free_rows(serve_cells(setup.subject, list(cells), p.processes), cells, done))
        left = {level: count - block[level] for level, count in left.items()}
        left = {level: count for level, count in left.items() if count and not _enough(pd.concat(parts), level, rule)}
        turn += 1
    return pd.concat(parts, ignore_index=True).sort_values(["run", "concurrency", "request"], ignore_index=True)


def _runs(p: Parameters, level: int) -> tuple[str, ...]:
    return (
        "A",
        "B",
        *(["C"] if level == p.parity_concurrency else []),
        *(["twin"] if level in p.twin_concurrencies else []),
    )


def _cycles(setup: Setup, requests: int) -> int:
    """So many requests, rounded up to whole cycles of the prompts."""
    count = len(setup.texts)
    return -(-requests // count) * count


def _wanted(setup: Setup, level: int) -> int:
    p = setup.p
    return p.alone_requests if level == 1 else _cycles(setup, max(p.requests, level))


def _cell(setup: Setup, run: str, level: int, requests: int, turn: int) -> Cell:
    p = setup.p
    settings = replace(p.settings, mechanisms=Mechanisms.none()) if run == "twin" else p.settings
    seed = (p.seed * 1000 + turn) * 4 + ("A", "B", "C", "twin").index(run)
    return Cell(settings, level, requests, p.tokens, seed)


def _enough(requests: pd.DataFrame, level: int, rule: StoppingRule) -> bool:
    parts = requests[requests.concurrency == level].groupby("run").first_divergence
    return all(rule.stops(int((part >= 0).sum()), len(part)) for _, part in parts)


def _free_rows(served: Served, cells: dict[Cell, tuple[str, int]], before: dict[int, int]) -> pd.DataFrame:
    alone = served.solo.set_index(["mechanisms", "prompt"]).text
    runs = {(str(cell.settings.mechanisms), cell.concurrency, cell.seed): run for cell, (run, _) in cells.items()}
    found = served.requests
    keys = list(zip(found.mechanisms, found.concurrency, found.seed))
    join = lambda values: " ".join(map(str, values))  # noqa: E731
    return pd.DataFrame(
        {
            "concurrency": found.concurrency,
            "run": [runs[key] for key in keys],
            "request": found.request + found.concurrency.map(before),
            "prompt": found.prompt,
            "text": found.text.map(join),
            "alone": [join(alone[key]) for key in zip(found.mechanisms, found.prompt)],
            "first_divergence": found.first_divergence,
            "margins": found.margins.map(join),
            "co_resident_rows": found.co_resident_rows,
        }
    )


def serve_forced(setup: Setup) -> forcing.Measured:
    """`Results.forced`: every concurrency once more, each request forced to its prompt's text alone."""
    p = setup.p
    cells = [
        Cell(
            p.settings,
            level,
            _cycles(setup, max(p.forced_requests, level)) if level > 1 else p.alone_requests,
            p.tokens,
            p.seed * 4000 + 3,
        )
        for level in p.concurrencies
    ]
    tasks = [(cell, index) for cell in cells for index in range(len(cell.shards()))]
    tasks.sort(key=lambda task: -task[0].shards()[task[1]][1].requests / task[0].concurrency)
    with _workers(setup.subject, p.processes, len(tasks)) as pool:
        _ = setup.solo  # before threads ask for it, under their thread count
        jobs = [pool.submit(_force, setup.subject, task) for task in tasks]
        found = [job.result() for job in tqdm(jobs, desc="forced", mininterval=1.0)]
    values = (
        pd.concat([part.values for part in found])
        .groupby(["kind", "concurrency", "up_to"], sort=False, as_index=False)["values"]
        .sum()
    )
    positions = pd.concat([part.positions for part in found]).sort_values(
        ["concurrency", "request", "position"], ignore_index=True
    )
    return forcing.Measured(positions, values)


def _force(subject: Subject, task: tuple[Cell, int]) -> forcing.Measured:
    """One shard of a forced cell, in whichever process."""
    cell, index = task
    first, load = cell.shards()[index]
    loaded = _loaded(subject)
    alone = forced_solo(loaded, cell.settings, cell.tokens)
    model, config = _engine(loaded, cell.settings, load)
    found = forcing.measure(
        model, _asked(subject), alone, load, config, {"concurrency": cell.concurrency, "run": "forced"}
    )
    found.positions["request"] += first
    return found


def _asked(subject: Subject) -> list[list[int]]:
    return [list(prompt) for prompt in subject.prompts]


def _engine(loaded: Loaded, settings: Settings, load: Load) -> tuple[Model, EngineConfig]:
    model, changes = build(loaded.weights, loaded.kernels, settings, loaded.segments)
    longest = max(map(len, loaded.subject.prompts)) + load.max_tokens
    return model, EngineConfig(max_requests=load.concurrency, max_length=longest, ignore_eos=True, **changes)


_alone: dict[tuple, forcing.Solo] = {}


def forced_solo(loaded: Loaded, settings: Settings, tokens: int) -> forcing.Solo:
    """Every prompt alone, kept once a process: only the last one asked for."""
    key = (loaded.subject, settings, tokens)
    if key not in _alone:
        _alone.clear()
        model, config = _engine(loaded, settings, Load(1, 1, tokens, seed=0))
        _alone[key] = forcing.solo(model, _asked(loaded.subject), tokens, config, settings.storage)
    return _alone[key]


# --- Tables -----------------------------------------------------------------------------------------------------------


def outputs(requests: pd.DataFrame, rule: StoppingRule) -> pd.DataFrame:
    """The issue's table, a row a (concurrency, run): requests, prompts with more than one output, most variants of a
    prompt, requests that differ from the prompt alone with their interval, how many independent requests these are
    worth
    for a rate over all prompts, and co-resident rows (mean over a request's steps)."""
    rows = []
    for (level, run), part in requests.groupby(["concurrency", "run"], sort=True):
        variants = part.groupby("prompt").text.nunique()
        differs = part.first_divergence >= 0
        low, high = rule.interval(int(differs.sum()), len(part))
        rows.append(
            {
                "concurrency": level,
                "run": run,
                "requests": len(part),
                "prompts": len(variants),
                "prompts with more than one output": int((variants > 1).sum()),
                "most variants": int(variants.max()),
                "differ from alone": int(differs.sum()),
                "low": low,
                "high": high,
                "worth independent": round(worth_in_independent_requests(differs, part.prompt), 1),
                "co-resident rows": round(float(part.co_resident_rows.mean()), 1),
            }
        )
    return pd.DataFrame(rows)


def pairs(requests: pd.DataFrame) -> pd.DataFrame:
    """Run A against run B request by request: requests, how many differ, with the exact interval, and the exact-match
    rate.
    """
    rows = []
    for level, part in requests[requests.run.isin(["A", "B"])].groupby("concurrency"):
        wide = part.pivot(index="request", columns="run", values="text").dropna()
        rate = Rate(int((wide.A != wide.B).sum()), len(wide))
        rows.append(
            {
                "concurrency": level,
                "requests": rate.trials,
                "differ between A and B": rate.events,
                "low": rate.interval[0],
                "high": rate.interval[1],
                "exact match": 1 - rate.value,
            }
        )
    return pd.DataFrame(rows)


def ulp_shares(values: pd.DataFrame) -> pd.DataFrame:
    """values: `forcing.Measured.values`. By kind and concurrency: share of values further than ``ulp`` row-scaled ULP
    from alone.
    """
    rows = []
    for (kind, level), part in values.groupby(["kind", "concurrency"], sort=False):
        counts = part.groupby("up_to", sort=True)["values"].sum()
        further = 1 - counts.cumsum() / counts.sum()
        rows += [
            {
                "kind": kind,
                "concurrency": level,
                "ulp": edge,
                "further": max(float(share), 0.0),
                "values": int(counts.sum()),
            }
            for edge, share in further.items()
            if np.isfinite(edge)
        ]
    return pd.DataFrame(rows)


def ulp_summary(positions: pd.DataFrame) -> pd.DataFrame:
    """By concurrency: forced positions, share whose logits moved at all, and over positions the medians of the row's
    median
    and largest row-scaled ULP and of the share of values with other bits; the largest anywhere; noise of the best two
    logits' difference (rms, in logits) and how many tokens it changed."""
    rows = []
    for level, part in positions.groupby("concurrency"):
        row = {
            "concurrency": level,
            "positions": len(part),
            "positions moved": float((part.logits_other_bits > 0).mean()),
        }
        for name in ("hidden", "logits"):
            row |= {
                f"{name}: other bits": float(part[f"{name}_other_bits"].median()),
                f"{name}: median ULP": float(part[f"{name}_median_ulp"].median()),
                f"{name}: largest ULP, median": float(part[f"{name}_largest_ulp"].median()),
                f"{name}: largest ULP": float(part[f"{name}_largest_ulp"].max()),
            }
        rows.append(
            row
            | {
                "noise of the top two (rms)": float(np.sqrt((part.noise**2).mean())),
                "tokens changed": int(part.flipped.sum()),
            }
        )
    return pd.DataFrame(rows)


def divergence_margins(places: pd.DataFrame, margins: pd.DataFrame) -> pd.DataFrame:
    """By concurrency: first divergences, distinct places, the median margin there in the batch and alone, the largest
    alone;
    the first row is all positions alone."""
    rows = [
        {
            "concurrency": "alone, all positions",
            "divergences": 0,
            "distinct places": len(margins),
            "median margin in the batch": float("nan"),
            "median margin alone": float(margins.margin.median()),
            "largest margin alone": float(margins.margin.max()),
        }
    ]
    for level, part in places.groupby("concurrency"):
        rows.append(
            {
                "concurrency": str(level),
                "divergences": len(part),
                "distinct places": len(part[["prompt", "position"]].drop_duplicates()),
                "median margin in the batch": float(part.margin.median()),
                "median margin alone": float(part.solo_margin.median()),
                "largest margin alone": float(part.solo_margin.max()),
            }
        )
    return pd.DataFrame(rows)


def margin_curves(margins: pd.DataFrame, positions: pd.DataFrame, places: pd.DataFrame) -> pd.DataFrame:
    """Empirical distributions for the figure: which, margin, share of positions up to it, count_ (how many there
    are).
    """
    largest = positions[positions.concurrency == positions.concurrency.max()]
    sets = {
        "all positions, alone": margins.margin,
        "all positions, largest concurrency": largest.margin,
        "first divergences, alone": places.solo_margin,
        "first divergences, in the batch": places.margin,
    }
    parts = []
    for name, found in sets.items():
        value = np.sort(found.to_numpy(float))
        if len(value):
            # 200 points draw the same step.
            pick = np.unique(np.linspace(0, len(value) - 1, 200).astype(int))
            parts.append(
                pd.DataFrame(
                    {"which": name, "margin": value[pick], "share": (pick + 1) / len(value), "count_": len(value)}
                )
            )
    return pd.concat(parts, ignore_index=True)


def second_span_curve(found: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Kaplan-Meier of the second span over all concurrencies: tokens, share that agree again for more than so many."""
    if found.empty:
        return pd.DataFrame(columns=["tokens", "share", "low", "high"])
    # A span of n tokens ends at token n + 1; one that the text's end cut is known to last its length.
    ends = found[~found.censored].second_span.to_numpy() + 1
    curve = spans.curve(ends, found[found.censored].second_span.to_numpy(), tokens)
    return pd.DataFrame(curve, columns=["tokens", "share", "low", "high"])


# --- Prediction and parity --------------------------------------------------------------------------------------------


def predictions(margins: pd.DataFrame, positions: pd.DataFrame, requests: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Every noise model's `prediction.matched` for runs A and B, with a column model."""
    observed = prediction.observe(requests, tokens)
    return pd.concat(
        [
            prediction.matched(prediction.predict(margins, positions, name), observed).assign(model=name)
            for name in prediction.MODELS
        ],
        ignore_index=True,
    )


def by_model(both: pd.DataFrame, summarise) -> pd.DataFrame:
    """``summarise`` of each model's rows, with the model named."""
    return pd.concat(
        [summarise(part.drop(columns="model")).assign(model=name) for name, part in both.groupby("model", sort=False)],
        ignore_index=True,
    )


PARITY_CASES = {"Y is X again": "C", "Y is the twin": "twin"}


def parity_cases(requests: pd.DataFrame, p: Parameters) -> pd.DataFrame:
    """`parity.separate` of X, the engine under study at ``parity_concurrency``, and Y: X itself in a third run, whose
    gap is 0
    by construction, and the twin, whose arithmetic differs. Columns case, over ("requests" of these prompts, or
    "prompts"
    like these), quantity, value, low, high."""
    level = requests[requests.concurrency == p.parity_concurrency]
    x = level[level.run.isin(["A", "B"])]
    parts = [
        parity.separate(x, level[level.run == run], over=over, seed=p.seed).assign(case=case, over=over)
        for case, run in PARITY_CASES.items()
        for over in ("requests", "prompts")
    ]
    return pd.concat(parts, ignore_index=True)[["case", "over", "quantity", "value", "low", "high"]]


def solo_gap(requests: pd.DataFrame) -> Rate:
    """How many prompts' texts alone differ between X and its twin: what a gap is without any batch."""
    alone = (
        requests[requests.run.isin(["A", "twin"]) & (requests.concurrency > 1)]
        .drop_duplicates(["run", "prompt"])
        .pivot(index="prompt", columns="run", values="alone")
        .dropna()
    )
    return Rate(int((alone.A != alone.twin).sum()), len(alone))


# --- All tables -------------------------------------------------------------------------------------------------------

Tables = dict[str, pd.DataFrame]


def tables(setup: Setup, results: Results) -> Tables:
    """Every table that the notebook shows, and that `record` writes: what findings and figures read, live or
    recorded.
    """
    p, requests, positions = setup.p, results.requests, results.forced.positions
    margins = setup.solo.margins()
    ab = requests[requests.run.isin(["A", "B"])]
    places = spans.at_divergence(ab, margins)
    found = spans.second_spans(ab)
    both = predictions(margins, positions, ab, p.tokens)
    independent = both[both.model == "independent"].drop(columns="model")
    batched = both[both.concurrency > 1]
    return {
        "outputs": outputs(requests, StoppingRule(p.stop_width)),
        "pairs": pairs(requests),
        "ulp": ulp_summary(positions),
        "ulp_shares": ulp_shares(results.forced.values),
        "ratios": spans.median_ratio(positions, seed=p.seed),
        "divergences": divergence_margins(places, margins),
        "margin_curves": margin_curves(margins, positions, places),
        "survival": spans.survival(ab, p.tokens),
        "spans": spans.span_summary(ab, found, p.tokens),
        "second_span": second_span_curve(found, p.tokens),
        "levels": by_model(both, prediction.by_concurrency),
        "calibration": by_model(batched, prediction.calibration),
        "errors": prediction.errors(
            margins, positions[positions.concurrency > 1], prediction.observe(ab[ab.concurrency > 1], p.tokens), p.seed
        ),
        "noise": prediction.noise_structure(positions),
        "failures": prediction.where_it_fails(independent),
        "parity": parity_cases(requests, p),
        "facts": facts(setup, requests, margins, positions, places, independent),
    }


def facts(
    setup: Setup,
    requests: pd.DataFrame,
    margins: pd.DataFrame,
    positions: pd.DataFrame,
    places: pd.DataFrame,
    predicted: pd.DataFrame,
) -> pd.DataFrame:
    """Single numbers, name and value: the tests' results and their controls."""
    p = setup.p
    ab = requests[requests.run.isin(["A", "B"])]
    random = np.random.default_rng(p.seed)
    distinct = places[["prompt", "position"]].drop_duplicates()
    # The test's own controls: as many places drawn anywhere, and those of the smallest margins, a prompt's smallest
    # first.
    anywhere = margins.iloc[random.permutation(len(margins))[: len(distinct)]]
    order = margins.assign(rank=margins.groupby("prompt").margin.rank(method="first")).sort_values(
        ["rank", "margin"], kind="stable"
    )
    smallest = order.head(len(distinct))
    gap = planted_gap(requests, p)
    found = {
        **spans.near_ties(places, margins, seed=p.seed),
        "p of random places": spans.near_ties(anywhere, margins, seed=p.seed)["p"],
        "p of smallest margins": spans.near_ties(smallest, margins, seed=p.seed)["p"],
        **{f"trend {name}": value for name, value in spans.trend(ab, seed=p.seed).items()},
        "positions moved": (positions[positions.concurrency > 1].logits_other_bits > 0).mean(),
        "requests predicted": (ab.concurrency > 1).sum(),
        "predicted alone": predicted[predicted.concurrency == 1].predicted.max(),
        "observed alone": predicted[predicted.concurrency == 1].observed.max(),
        "solo gap": solo_gap(requests).events,
        "prompts": len(setup.texts),
        "planted gap": gap.value,
        "planted gap, low": gap.low,
        "requests compared": (requests[requests.concurrency == p.parity_concurrency].run.isin(["A", "B", "C"])).sum(),
    }
    return pd.DataFrame({"name": list(found), "value": [float(value) for value in found.values()]})


def planted_gap(requests: pd.DataFrame, p: Parameters) -> pd.Series:
    """The estimate for X against its third run in which every second prompt's texts were replaced: a gap that must be
    seen.
    """
    level = requests[requests.concurrency == p.parity_concurrency]
    y = level[level.run == "C"]
    y = y.assign(text=y.text.where(y.prompt % 2 == 0, "replaced"))
    return (
        parity.separate(level[level.run.isin(["A", "B"])], y, over="prompts", seed=p.seed)
        .set_index("quantity")
        .loc[parity.GAP]
    )


# --- One pair of texts ------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """One prompt's text alone and in a batch. tokens: index, alone, batch (the token's text, empty past the context
    that they
    share for the logits), same, margin alone, margin in the batch; candidates: served, token, logit, chosen at the
    split."""

    prompt: str
    concurrency: int
    split: int
    tokens: pd.DataFrame
    candidates: pd.DataFrame

    def around(self, before: int = 4, after: int = 4) -> pd.DataFrame:
        """The tokens around the split; margins in the batch only while the context is the same."""
        shown = self.tokens[self.tokens["index"].between(self.split - before, self.split + after)]
        known = shown["margin in the batch"].where(shown["same context"])
        return shown.assign(**{"margin in the batch": known}).drop(columns="same context").reset_index(drop=True)

    @property
    def agree_after(self) -> float:
        """Share of the tokens after the first that differs which agree; 0 where there are none."""
        after = self.tokens[self.tokens["index"] > self.split].same
        return float(after.mean()) if len(after) else 0.0


def closer_look(setup: Setup) -> Pair | None:
    """Serve ``parity_concurrency`` once more, freely, and take a request that parts from the text alone about in the
    middle of
    all that do; None where none does."""
    p = setup.p
    load = Load(
        p.parity_concurrency, _cycles(setup, max(p.forced_requests, p.parity_concurrency)), p.tokens, seed=p.seed
    )
    model, config = _engine(setup.loaded, p.settings, load)
    with _workers(setup.subject, 1, 1):  # its thread count, so that bits are those of the other runs
        seen = forcing.measure(model, _asked(setup.subject), setup.solo, load, config, {}, forced=False).positions
    splits = seen[seen.flipped].groupby("request").position.min().sort_values(kind="stable")
    if splits.empty:
        return None
    request, split = splits.index[len(splits) // 2], int(splits.iloc[len(splits) // 2])
    part = seen[seen.request == request].sort_values("position")
    prompt = int(part.prompt.iloc[0])
    return Pair(
        setup.texts[prompt],
        p.parity_concurrency,
        split,
        _token_table(setup, part, prompt, split),
        _candidates(setup, part, prompt, split),
    )


def _token_table(setup: Setup, part: pd.DataFrame, prompt: int, split: int) -> pd.DataFrame:
    say = lambda token: setup.tokenizer.decode([int(token)])  # noqa: E731
    alone = setup.solo.texts[prompt]
    frame = pd.DataFrame(
        {
            "index": range(len(alone)),
            "alone": [say(t) for t in alone],
            "in the batch": [say(t) for t in part.chosen],
            "same": [a == b for a, b in zip(alone, part.chosen)],
            "margin alone": part.solo_margin.to_numpy(),
            "margin in the batch": part.margin.to_numpy(),
        }
    )
    # Past the split the contexts differ, and the batch's margins are another text's.
    return frame.assign(**{"same context": frame["index"] <= split})


def _candidates(setup: Setup, part: pd.DataFrame, prompt: int, split: int) -> pd.DataFrame:
    row = part[part.position == split].iloc[0]
    alone = setup.solo.margins().set_index(["prompt", "position"]).loc[(prompt, split)]
    tokens = {name: setup.tokenizer.decode([int(alone[name])]) for name in ("best", "second")}
    return pd.DataFrame(
        [
            {
                "served": served,
                "token": tokens[name],
                "logit": float(logits[f"{name}_logit"]),
                "chosen": int(alone[name]) == chosen,
            }
            for served, logits, chosen in (("alone", alone, int(alone.best)), ("in the batch", row, int(row.chosen)))
            for name in ("best", "second")
        ]
    )


# --- Recorded results -------------------------------------------------------------------------------------------------

RECORDED = "concurrency"
TABLES = (
    "outputs",
    "pairs",
    "ulp",
    "ulp_shares",
    "ratios",
    "divergences",
    "margin_curves",
    "survival",
    "spans",
    "second_span",
    "levels",
    "calibration",
    "errors",
    "noise",
    "failures",
    "parity",
    "facts",
)
_STAMP = ("ffn", "subject", "label", "storage_dtype", "logits_dtype", "tokens_each", "threshold")


def save(setup: Setup, found: Tables) -> list[Path]:
    """Write each table as ``<p.record>/concurrency_<ffn>_<name>.csv`` with what ran beside every row; "" writes
    none.
    """
    p = setup.p
    stamp = dict(zip(_STAMP, (p.ffn, p.model, setup.label, p.storage, p.logits, p.tokens, p.threshold)))
    return save_tables(f"{RECORDED}_{p.ffn}", found, p.record, stamp)


def recorded(ffn: str) -> Tables | None:
    """The tables recorded on a GPU for one kind of FFN, None when they are not all there."""
    found = {name: recorded_table(f"{RECORDED}_{ffn}", name) for name in TABLES}
    return None if any(found[name].empty for name in TABLES if name not in ("failures", "second_span")) else found


def unstamped(frame: pd.DataFrame) -> pd.DataFrame:
    """A recorded table without the columns that say what ran."""
    return without_columns(frame, *_STAMP)

"""How does the text of a request depend on how many others are in flight, and can that be told from its margins alone?

An engine with the chosen mechanisms serves the same prompts at every concurrency, twice: runs A and B differ only in
arrival jitter. Its twin, with every mechanism off, is the control. A third run forces every request to its prompt's own
text, so that positions line up and what the batch does to bits can be measured (`forcing`).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

import pandas as pd
from pydantic import Field, field_validator, model_validator
from tqdm.auto import tqdm

from ..common import resolve_device
from ..engine import MECHANISMS, ChatTokenizer, EngineConfig, Load, Mechanisms, Model, Settings, build, hf_folder
from . import forcing
from .cells import Cell, Loaded, Served, Subject, in_memory, serve_cells, worker_pool
from .power import StoppingRule
from .served_model import Device, ServedModel
from .sources import named
from .texts import many_prompts, read_prompts


class Parameters(ServedModel):
    """Parameters of notebook 03."""

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
    device: Device
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
    return Setup(p, ChatTokenizer(hf_folder(p.model)), texts, subject, in_memory(subject))


# --- Serving ----------------------------------------------------------------------------------------------------------


@dataclass
class Results:
    """requests: a row a request that decoded freely: concurrency, run, request, prompt, text, alone (token ids joined
    by blanks), first_divergence (-1: none), margins and runners_up (second candidates) along the text, alone_margins and
    alone_runners_up along the text alone, co_resident_rows (mean over its steps). forced: `forcing.measure` of
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
    alone = served.solo.set_index(["mechanisms", "prompt"])[["text", "margins", "runners_up"]].to_dict("index")
    runs = {(str(cell.settings.mechanisms), cell.concurrency, cell.seed): run for cell, (run, _) in cells.items()}
    found = served.requests
    keys = list(zip(found.mechanisms, found.concurrency, found.seed))
    solo = [alone[key] for key in zip(found.mechanisms, found.prompt)]
    join = lambda values: " ".join(map(str, values))  # noqa: E731
    return pd.DataFrame(
        {
            "concurrency": found.concurrency,
            "run": [runs[key] for key in keys],
            "request": found.request + found.concurrency.map(before),
            "prompt": found.prompt,
            "text": found.text.map(join),
            "alone": [join(row["text"]) for row in solo],
            "first_divergence": found.first_divergence,
            "margins": found.margins.map(join),
            "runners_up": found.runners_up.map(join),
            "alone_margins": [join(row["margins"]) for row in solo],
            "alone_runners_up": [join(row["runners_up"]) for row in solo],
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
    with worker_pool(setup.subject, p.processes, len(tasks)) as pool:
        if setup.subject.device == "cpu":
            _ = setup.solo  # once, before threads ask for it, under their thread count; processes make their own
        jobs = [pool.submit(_force, setup.subject, task) for task in tasks]
        _ = setup.solo
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
    loaded = in_memory(subject)
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
        shown = shown.assign(**{"margin in the batch": known}).drop(columns="same context").reset_index(drop=True)
        return named(shown, "around the split")

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
    with worker_pool(setup.subject, 1, 1):  # its thread count, so that bits are those of the other runs
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
    return named(frame.assign(**{"same context": frame["index"] <= split}), "pair")


def _candidates(setup: Setup, part: pd.DataFrame, prompt: int, split: int) -> pd.DataFrame:
    row = part[part.position == split].iloc[0]
    alone = setup.solo.margins().set_index(["prompt", "position"]).loc[(prompt, split)]
    tokens = {name: setup.tokenizer.decode([int(alone[name])]) for name in ("best", "second")}
    found = pd.DataFrame(
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
    return named(found, "candidates")

"""Serving many settings and loads at once: a cell is one of each, a request's text is compared with its prompt alone.

    subject = Subject.of("smollm2-135m-instruct", ffn="moe", device="cuda", prompts=many_prompts(32))
    cells = [Cell(Settings(Mechanisms.only(name)), concurrency=32, requests=1000, tokens=24) for name in MECHANISMS]
    served = serve_cells(subject, cells)
    served.requests    # a row a request: the cell's columns, prompt, text, first_divergence, margins and more
    served.solo        # a row a (settings, prompt): the text alone
    served.choices     # a row a (cell or solo, kind of step, mechanism, choice): how often a step made it

Requests of a cell are served in shards, each a closed loop of its own with its own arrival seed, so that workers can
share a cell. How many workers there are changes nothing but the time. Cells that differ in settings only share their
arrivals.
"""

import multiprocessing
import os
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Callable, Self

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from ..common import BadInput
from ..common.devices import simulated_tier
from ..engine import (
    DEFAULT_MODEL,
    ChatTokenizer,
    EngineConfig,
    Load,
    Run,
    Settings,
    Weights,
    build,
    hf_folder,
    load_weights,
    serve,
)
from ..engine.experts import split_for
from ..kernels.sets import KernelSet, kernel_set
from .texts import first_divergence

SETTING_COLUMNS = ("mechanisms", "storage", "logits", "ties", "activations", "threshold", "planted")
CELL_COLUMNS = (*SETTING_COLUMNS, "max_tokens", "concurrency", "seed")
SOLO_PROMPTS = 4  # prompts that one task serves alone, one after another


@dataclass(frozen=True)
class Subject:
    """The model that is served, in words, so that a process can load it for itself. ffn: "dense", or "moe" cut into
    experts; its weights are NVFP4. prompts: token ids. device: "cpu" or "cuda"."""

    model: str
    ffn: str
    experts: int
    top_k: int
    expert_split: str
    device: str
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        model: str = DEFAULT_MODEL,
        ffn: str = "moe",
        experts: int = 16,
        top_k: int = 12,
        expert_split: str = "clustered",
        device: str = "cpu",
        prompts: list[str] = (),
    ) -> Self:
        """From prompts as texts, which go through the model's chat template. Raises BadInput as the loader does."""
        tokenizer = ChatTokenizer(hf_folder(model))
        return cls(
            model,
            ffn,
            experts,
            top_k,
            expert_split,
            device,
            tuple(tuple(tokenizer.chat(text, system="")) for text in prompts),
        )

    @property
    def tier(self) -> str:
        return simulated_tier(torch.device(self.device))

    def load(self) -> "Loaded":
        """The weights on this process's device."""
        device, folder = torch.device(self.device), hf_folder(self.model)
        split = None
        if self.ffn == "moe":
            split = split_for(
                load_weights(folder, device), folder, self.model, self.expert_split, self.experts, self.top_k
            )
        return Loaded(self, load_weights(folder, device, nvfp4=True, split=split), kernel_set(device), {})


@dataclass(frozen=True)
class Loaded:
    """A subject in memory. segments: cut weights, shared by all settings."""

    subject: Subject
    weights: Weights
    kernels: KernelSet
    segments: dict

    def serve(self, settings: Settings, load: Load, prompts: list[int]) -> Run:
        """Serve these of the subject's prompts; a request's ``prompt`` counts within them."""
        model, changes = build(self.weights, self.kernels, settings, self.segments)
        asked = [list(self.subject.prompts[i]) for i in prompts]
        config = EngineConfig(
            max_requests=load.concurrency, max_length=max(map(len, asked)) + load.max_tokens, ignore_eos=True, **changes
        )
        return serve(model, asked, load, config)


@dataclass(frozen=True)
class Cell:
    """requests of ``tokens`` tokens at this concurrency under settings; seed: of the arrival jitter."""

    settings: Settings
    concurrency: int
    requests: int
    tokens: int
    seed: int = 0

    def shards(self) -> list[tuple[int, Load]]:
        """(number of its first request, load): closed loops that make up the cell, long enough to be full most of the
        time."""
        count = max(1, round(self.requests / max(64, 6 * self.concurrency)))
        edges = [self.requests * i // count for i in range(count + 1)]
        return [
            (
                start,
                Load(
                    min(self.concurrency, stop - start),
                    stop - start,
                    self.tokens,
                    seed=(self.seed * 1009 + self.concurrency) * 1009 + i,
                ),
            )
            for i, (start, stop) in enumerate(zip(edges, edges[1:]))
        ]

    @property
    def alone(self) -> Settings:
        """What its prompts alone are served with: planted noise comes with company only."""
        return replace(self.settings, planted=0.0)

    def columns(self) -> dict:
        """Its values of CELL_COLUMNS."""
        return setting_columns(self.settings) | {
            "max_tokens": self.tokens,
            "concurrency": self.concurrency,
            "seed": self.seed,
        }


def setting_columns(settings: Settings) -> dict:
    """SETTING_COLUMNS of a table: the settings' fields, mechanisms as their names joined by +."""
    return {
        name: str(value) if name == "mechanisms" else value
        for name in SETTING_COLUMNS
        for value in [getattr(settings, name)]
    }


@dataclass(frozen=True)
class Served:
    """Tidy tables.

    requests, a row a request: CELL_COLUMNS; request, prompt, text (tuple of token ids), margins (tuple of floats),
    runners_up (tuple of token ids, the second candidate at each position),
    first_divergence from the prompt alone under the same settings (-1: none), changed, compared (tokens before the
    divergence), margins_moved (how many of these have other bits in their margin), largest_move (of a margin),
    exact_ties (margins of zero), co_resident_rows (mean over the request's steps) and most_rows.
    solo, a row a (settings, prompt), planted noise being 0: SETTING_COLUMNS, max_tokens, prompt, text, margins,
    runners_up.
    choices, a row a (cell, kind of step, mechanism, choice) and for prompts alone under concurrency 0: how often it was
    made in steps that carried decode rows ("decode") and in the others ("prefill").
    steps, a row a cell and for prompts alone under concurrency 0: steps of its engines.
    """

    requests: pd.DataFrame
    solo: pd.DataFrame
    choices: pd.DataFrame
    steps: pd.DataFrame


def serve_cells(
    subject: Subject,
    cells: list[Cell],
    processes: int = 0,
    done: Callable[[Cell, pd.DataFrame], None] | None = None,
    progress: bool = True,
) -> Served:
    """Serve every cell, and every prompt alone once for each of the cells' settings.

    processes: workers; 0 takes what suits the device (`workers_for`). done: called with each cell and its requests as
    soon as it is complete, in the order of completion. Raises BadInput for no cells or prompts, cells given twice, and
    as `serve` does.
    """
    if not cells or not subject.prompts or len(set(cells)) < len(cells):
        raise BadInput(
            f"{len(cells)} cells over {len(subject.prompts)} prompts: give at least one of each, and no cell twice."
        )
    for cell in cells:
        if min(cell.concurrency, cell.requests, cell.tokens) < 1:
            raise BadInput(
                f"a cell of {cell.requests} requests of {cell.tokens} tokens at concurrency {cell.concurrency}: each"
                " must be at least 1."
            )
    tasks = _tasks(subject, cells)
    found: dict[tuple, list] = {}
    with (
        worker_pool(subject, processes, len(tasks)) as pool,
        tqdm(total=len(tasks), desc="serving", disable=not progress, mininterval=1.0) as bar,
    ):
        waiting: dict[Future, tuple] = {pool.submit(_run, subject, task): task for task in tasks}
        try:
            for future in as_completed(waiting):
                found[waiting[future]] = future.result()
                bar.update()
                if done:
                    _tell(subject, cells, found, waiting[future], done)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return _tables(subject, cells, found)


def workers_for(device: str, tasks: int) -> int:
    """On a CPU a thread a core: the matmuls are too small to share. On CUDA, where launching from Python is the limit,
    several processes a GPU, a core each and two left over."""
    cores = os.cpu_count() or 1
    return max(1, min(tasks, cores if device == "cpu" else cores - 2))


def occurred(choices: pd.DataFrame, mechanism: str) -> bool:
    """Whether some step in a batch made a choice of this mechanism that steps of its kind alone never make.

    choices: `Served.choices` of one setting in which the mechanism is on, prompts alone (concurrency 0) included.
    """
    return bool(len(never_alone(choices[choices.mechanism == mechanism])))


def never_alone(choices: pd.DataFrame) -> pd.DataFrame:
    """The rows of batches (concurrency above 1) whose choice no prompt alone met in a step of the same kind."""
    key = ["step", "mechanism", "choice"]
    alone = set(map(tuple, choices[choices.concurrency == 0][key].astype(str).values))
    batch = choices[choices.concurrency > 1]
    return batch.loc[np.array([tuple(row) not in alone for row in batch[key].astype(str).values], dtype=bool)]


# --- Tasks: (settings, tokens, prompts) alone, or (cell, shard) ---


def _tasks(subject: Subject, cells: list[Cell]) -> list[tuple]:
    """Longest first, so that no worker is left with a long one at the end."""
    shards = [(cell, index) for cell in cells for index in range(len(cell.shards()))]
    alone = [
        (settings, tokens, prompts)
        for settings, tokens in dict.fromkeys((cell.alone, cell.tokens) for cell in cells)
        for prompts in _solo_prompts(subject)
    ]
    steps = {task: len(task[2]) * task[1] for task in alone}
    steps |= {
        task: load.requests * load.max_tokens / load.concurrency
        for task in shards
        for load in [task[0].shards()[task[1]][1]]
    }
    return sorted(steps, key=steps.get, reverse=True)


def _run(subject: Subject, task: tuple) -> tuple[list[dict], dict, int]:
    """Rows of the requests, the steps' choices by kind of step, and the number of steps."""
    loaded = in_memory(subject)
    if isinstance(task[0], Cell):
        first, load = task[0].shards()[task[1]]
        order = [(first + i) % len(subject.prompts) for i in range(min(load.requests, len(subject.prompts)))]
        run = loaded.serve(task[0].settings, load, order)
    else:
        settings, tokens, order = task
        first, run = 0, loaded.serve(settings, Load(1, len(order), tokens, seed=0), list(order))
    beside: dict[int, list[int]] = {}
    choices: dict[tuple, int] = {}
    for step in run.steps:
        for number, _, _ in step.rows:
            beside.setdefault(number, []).append(step.co_resident_rows)
        kind = "decode" if any(phase == "decode" for _, _, phase in step.rows) else "prefill"
        for (mechanism, choice), count in step.choices.items():
            choices[kind, mechanism, choice] = choices.get((kind, mechanism, choice), 0) + count
    rows = [
        {
            "request": first + r.number,
            "prompt": order[r.prompt],
            "text": tuple(r.output),
            "margins": tuple(r.margins),
            "runners_up": tuple(r.runners_up),
            "co_resident_rows": float(np.mean(beside[r.number])),
            "most_rows": max(beside[r.number]),
        }
        for r in run.requests
    ]
    return rows, choices, len(run.steps)


_lock = Lock()
_in_memory: dict[Subject, Loaded] = {}


def in_memory(subject: Subject) -> Loaded:
    """Loaded once a process; only the last subject is kept."""
    with _lock:
        if subject not in _in_memory:
            _in_memory.clear()
            _in_memory[subject] = subject.load()
        return _in_memory[subject]


@contextmanager
def worker_pool(subject: Subject, processes: int, tasks: int):
    count = processes or workers_for(subject.device, tasks)
    if count < 1:
        raise BadInput(f"processes is {processes}: give 1 or more, or 0 for as many as suit the device.")
    before = torch.get_num_threads()
    pool: Executor
    if subject.device == "cpu":
        torch.set_num_threads(1)  # for every number of workers, so that their number cannot matter
        pool = ThreadPoolExecutor(count)
    else:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start, initargs=(context.Value("i", 0),))
    try:
        with pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _start(counter) -> None:
    """In a new process: the GPU of its number, and one thread, since the host only launches."""
    with counter.get_lock():
        number, counter.value = counter.value, counter.value + 1
    torch.set_num_threads(1)
    torch.cuda.set_device(number % torch.cuda.device_count())


# --- Tables ---


def _parts(subject: Subject, cell: Cell) -> tuple[list[tuple], list[tuple]]:
    """The tasks that serve a cell, and those that serve its prompts alone."""
    return (
        [(cell, i) for i in range(len(cell.shards()))],
        [(cell.alone, cell.tokens, prompts) for prompts in _solo_prompts(subject)],
    )


def _solo_prompts(subject: Subject) -> list[tuple[int, ...]]:
    prompts = range(len(subject.prompts))
    return [tuple(prompts[start : start + SOLO_PROMPTS]) for start in range(0, len(prompts), SOLO_PROMPTS)]


def _tell(subject: Subject, cells: list[Cell], found: dict, last: tuple, done: Callable) -> None:
    """Report the cells that the last task completed."""
    for cell in [cell for cell in cells if last[0] in (cell, cell.alone)]:
        shards, alone = _parts(subject, cell)
        if last in shards + alone and all(task in found for task in shards + alone):
            done(cell, _requests(subject, cell, found))


def _requests(subject: Subject, cell: Cell, found: dict) -> pd.DataFrame:
    shards, alone = _parts(subject, cell)
    solo = {row["prompt"]: row for task in alone for row in found[task][0]}
    return pd.DataFrame(
        [cell.columns() | row | _compared(row, solo[row["prompt"]]) for task in shards for row in found[task][0]]
    )


def _compared(row: dict, alone: dict) -> dict:
    split = first_divergence(alone["text"], row["text"])
    shared = len(row["text"]) if split < 0 else split
    moves = [abs(a - b) for a, b in zip(alone["margins"][:shared], row["margins"][:shared])]
    return {
        "first_divergence": split,
        "changed": split >= 0,
        "compared": shared,
        "margins_moved": sum(move > 0 for move in moves),
        "largest_move": max(moves, default=0.0),
        "exact_ties": sum(margin == 0 for margin in row["margins"]),
    }


def _tables(subject: Subject, cells: list[Cell], found: dict) -> Served:
    solo, choices, steps = [], [], []
    for settings, tokens in dict.fromkeys((cell.alone, cell.tokens) for cell in cells):
        tasks = [(settings, tokens, prompts) for prompts in _solo_prompts(subject)]
        named = setting_columns(settings) | {"max_tokens": tokens}
        solo += [
            named | {name: row[name] for name in ("prompt", "text", "margins", "runners_up")}
            for task in tasks
            for row in found[task][0]
        ]
        choices += _choice_rows(named | {"concurrency": 0, "seed": 0}, [found[task][1] for task in tasks])
        steps.append(named | {"concurrency": 0, "seed": 0, "steps": sum(found[task][2] for task in tasks)})
    for cell in cells:
        shards, _ = _parts(subject, cell)
        choices += _choice_rows(cell.columns(), [found[task][1] for task in shards])
        steps.append(cell.columns() | {"steps": sum(found[task][2] for task in shards)})
    requests = pd.concat([_requests(subject, cell, found) for cell in cells], ignore_index=True)
    return Served(requests, pd.DataFrame(solo), pd.DataFrame(choices), pd.DataFrame(steps))


def _choice_rows(columns: dict, counts: list[dict]) -> list[dict]:
    total: dict[tuple, int] = {}
    for part in counts:
        for key, count in part.items():
            total[key] = total.get(key, 0) + count
    # Choices are numbers or words; in a table they are words.
    named = sorted((kind, mechanism, str(choice), count) for (kind, mechanism, choice), count in total.items())
    return [columns | dict(zip(("step", "mechanism", "choice", "count"), row)) for row in named]

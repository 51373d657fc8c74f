"""Continuous batching: a step takes one token of every decoding request and fills up with prefill chunks.

Everything is deterministic: time is counted in steps, and the only randomness is the arrival jitter of the client,
drawn from its seed. So two runs differ only in which rows share a step.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch

from ..common import BadInput
from ..schedules import Plan, make_plan
from .model import MatmulRecord, Model, StepRows


@dataclass(frozen=True)
class EngineConfig:
    """max_rows: tokens a step may carry, decode rows included; max_requests: requests running at once; page: tokens a
    KV page; prefill_chunk: most prompt tokens one request adds to a step; ignore_eos: always generate the full length.

    split_rule: how decode attention cuts each row's KV range, a rule's name in ``schedules`` ("flashmla" looks at the
    whole batch, the others at the row alone) over num_sm_parts programs and blocks of split_block tokens; "" folds every
    row page by page in one piece, as prefill does. wide_block: the block instead of split_block in steps whose longest
    decode row has wide_from tokens or more; wide_from 0: in none.

    logits: the dtype in which logits are compared, "float32" or "bfloat16"; ties: which token id wins among equal logits,
    the "lowest" or the "highest"."""

    max_rows: int = 128
    max_requests: int = 64
    page: int = 16
    prefill_chunk: int = 64
    max_length: int = 512
    ignore_eos: bool = False
    split_rule: str = ""
    num_sm_parts: int = 132
    split_block: int = 64
    wide_block: int = 64
    wide_from: int = 0
    logits: str = "float32"
    ties: str = "lowest"


@dataclass
class Request:
    """One prompt on its way to a text. margins[i]: top-1 minus top-2 logit where token i was chosen; runners_up[i]: the
    other of the two tokens (of the two largest, the one not chosen)."""

    number: int
    prompt: int
    tokens: list[int]
    prompt_length: int
    max_tokens: int
    arrival: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    runners_up: list[int] = field(default_factory=list)
    finished: int | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.tokens) - 1 or len(self.tokens) == self.prompt_length


@dataclass(frozen=True)
class Step:
    """Trace of one step. rows: (request number, rows it had, "prefill" or "decode"); matmuls: one record an FFN;
    splits: pieces that each decode row's KV range was cut into, in the order of the rows, empty without a split rule;
    choices: how often an operation, by name, took which of its variants (`mechanisms` says which there are)."""

    index: int
    rows: tuple[tuple[int, int, str], ...]
    matmuls: tuple[MatmulRecord, ...]
    splits: tuple[int, ...] = ()
    choices: dict[tuple[str, object], int] = field(default_factory=dict)

    @property
    def co_resident_rows(self) -> int:
        return sum(count for _, count, _ in self.rows)


@lru_cache(maxsize=None)
def _pieces_alone(rule: str, length: int, num_sm_parts: int, block: int) -> int:
    return int(make_plan(rule, [length], num_sm_parts, block).pieces[0])


class Engine:
    """Runs requests to completion, a step at a time. cache: keys and values, [layers, pages, page, KH, D] each, that an
    engine of the same configuration has left; None for new ones."""

    def __init__(self, model: Model, config: EngineConfig = EngineConfig(),
                 cache: tuple[torch.Tensor, torch.Tensor] | None = None):
        for name in ("max_rows", "max_requests", "page", "prefill_chunk", "max_length", "num_sm_parts", "split_block", "wide_block"):
            if getattr(config, name) < 1:
                raise BadInput(f"{name} is {getattr(config, name)}: at least 1 is needed.")
        for name, known in (("logits", ("float32", "bfloat16")), ("ties", ("lowest", "highest"))):
            if getattr(config, name) not in known:
                raise BadInput(f"{name} {getattr(config, name)!r} is unknown: give {' or '.join(known)}.")
        if config.split_rule:
            make_plan(config.split_rule, [1], config.num_sm_parts, config.split_block)  # an unknown rule raises here
        self.model, self.config = model, config
        shape, weights = model.weights.shape, model.weights
        pages_each = -(-config.max_length // config.page)
        size = (shape.layers, config.max_requests * pages_each, config.page, shape.kv_heads, shape.head_dim)
        like = dict(dtype=weights.embedding.dtype, device=weights.embedding.device)
        self.k_pages, self.v_pages = cache or (torch.zeros(size, **like), torch.zeros(size, **like))
        self._free = deque(range(size[1]))
        self._planned: tuple[tuple[int, ...], Plan | None] = (), None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps: list[Step] = []
        self.now = 0

    def submit(self, request: Request) -> None:
        """Queue a request. Raises BadInput when it cannot fit the cache."""
        need = request.prompt_length + request.max_tokens
        if need > self.config.max_length or not request.prompt_length or request.max_tokens < 1:
            raise BadInput(f"a prompt of {request.prompt_length} tokens with {request.max_tokens} to generate does not fit: "
                           f"both must be at least 1 and their sum at most {self.config.max_length}.")
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Run one step; returns the requests that finished in it. With nothing to run, only time passes."""
        while self.waiting and len(self.running) < self.config.max_requests:
            self.running.append(self.waiting.popleft())
        work, decoding = self._schedule()
        finished = self._forward(work, decoding) if work else []
        self.now += 1
        return finished

    def _schedule(self) -> tuple[list[tuple[Request, int]], int]:
        """(request, tokens to compute): decoding requests first, then prefill chunks in order of arrival; and how many
        are decoding."""
        work, prefilling = [], []
        for request in self.running:
            if request.prefilling:
                prefilling.append(request)
            elif len(work) < self.config.max_rows:
                work.append((request, 1))
        decoding, room = len(work), self.config.max_rows - len(work)
        for request in prefilling[:room]:
            if room:
                chunk = min(request.prompt_length - request.computed, self.config.prefill_chunk, room)
                work.append((request, chunk))
                room -= chunk
        return work, decoding

    def _forward(self, work: list[tuple[Request, int]], decoding: int) -> list[Request]:
        for request, count in work:
            while len(request.pages) * self.config.page < request.computed + count:
                request.pages.append(self._free.popleft())
        rows, logits = self._run(work, decoding)
        splits = tuple(rows.splits.pieces.tolist()) if rows.splits else ()
        phases = ["decode"] * decoding + ["prefill"] * (len(work) - decoding)
        trace = tuple((r.number, count, phase) for (r, count), phase in zip(work, phases))
        self.steps.append(Step(self.now, trace, tuple(rows.matmuls), splits, rows.choices))
        for request, count in work:
            request.computed += count
        return self._sample([r for r, _ in work if r.computed == len(r.tokens)], logits)

    def _run(self, work: list[tuple[Request, int]], decoding: int) -> tuple[StepRows, torch.Tensor]:
        """The step's rows, as its trace needs them, and the logits of the requests that it samples for. The first
        ``decoding`` requests decode."""
        page, device = self.config.page, self.k_pages.device
        counts = [count for _, count in work]
        tables = np.zeros((len(work), max(len(r.pages) for r, _ in work)), np.int64)
        for held, (request, _) in zip(tables, work):
            held[: len(request.pages)] = request.pages
        positions = np.concatenate([np.arange(r.computed, r.computed + count) for r, count in work])
        tokens = np.concatenate([r.tokens[r.computed : r.computed + count] for r, count in work])
        tables = tables.repeat(counts, axis=0)
        slots = tables[np.arange(len(tables)), positions // page] * page + positions % page
        ends = np.cumsum(counts) - 1
        as_tensor = lambda values: torch.from_numpy(np.asarray(values, np.int64)).to(device)  # noqa: E731
        tokens, where, slots = as_tensor([tokens, positions, slots])
        rows = StepRows(
            tokens=tokens, positions=where, slots=slots, tables=as_tensor(tables), lengths=where + 1,
            sampled=as_tensor([end for end, (r, count) in zip(ends, work) if r.computed + count == len(r.tokens)]),
            decode_rows=decoding, last=int(positions.max()),
        )
        rows.splits, rows.choices = self._plan((positions[:decoding] + 1).tolist())
        return rows, self.model.forward(rows, self.k_pages, self.v_pages)

    def _block(self, longest: int) -> int:
        return self.config.wide_block if 0 < self.config.wide_from <= longest else self.config.split_block

    def _plan(self, lengths: list[int]) -> tuple[Plan | None, dict[tuple[str, object], int]]:
        """How decode rows of these lengths are cut, None without a split rule, and how many of them are folded in the
        block, and cut into the pieces, that they would be alone."""
        if not (self.config.split_rule and lengths):
            return None, {}
        block, parts, rule = self._block(max(lengths)), self.config.num_sm_parts, self.config.split_rule
        whole = tuple(-(-length // block) * block for length in lengths)
        if self._planned[0] != (block, *whole):  # a plan counts blocks: most steps have the last one's
            self._planned = (block, *whole), make_plan(rule, lengths, parts, block)
        plan = replace(self._planned[1], lengths=np.array(lengths, np.int32))
        alike = {
            "attention_dispatch": sum(block == self._block(length) for length in lengths),
            "batch_splits": sum(n == _pieces_alone(rule, w, parts, block) for w, n in zip(whole, plan.pieces.tolist())),
        }
        counts = {}
        for name, some in alike.items():
            counts |= {(name, "as alone"): some, (name, "by the batch"): len(lengths) - some}
        return plan, {choice: count for choice, count in counts.items() if count}

    def choose(self, requests: list[Request], logits: torch.Tensor, greedy: list[int]) -> list[int]:
        """Each request's next token. greedy: the largest logit's, of equals the one that the configuration says.
        logits: [requests, vocabulary]. A study that forces a text overrides this."""
        return greedy

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> list[Request]:
        if not requests:
            return []
        if self.config.logits == "bfloat16":
            logits = logits.bfloat16()
        if self.config.ties == "lowest":
            greedy = logits.argmax(dim=-1, keepdim=True)
        else:
            greedy = logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1, keepdim=True)
        top = logits.topk(2, dim=-1)
        values = top.values.float()
        # The device is asked once: tokens and margins are all exact in float64.
        found = torch.cat([greedy, top.indices, (values[:, :1] - values[:, 1:]).double()], dim=1).tolist()
        chosen = self.choose(requests, logits, [int(row[0]) for row in found])
        finished = []
        for request, token, (_, *pair, margin) in zip(requests, chosen, found):
            request.tokens.append(token)
            request.margins.append(margin)
            request.runners_up.append(int(pair[1] if pair[0] == token else pair[0]))
            ended = token in self.model.weights.shape.eos and not self.config.ignore_eos
            if ended or len(request.tokens) == request.prompt_length + request.max_tokens:
                request.finished = self.now
                self.running.remove(request)
                self._free.extend(request.pages)
                finished.append(request)
        return finished

"""A closed-loop client: C requests in flight over P distinct prompts, cycled until the wanted number is served."""

from dataclasses import dataclass
from typing import Callable

import numpy as np

from ..common import BadInput
from .engine import Engine, EngineConfig, Request, Step
from .model import Model


@dataclass(frozen=True)
class Load:
    """concurrency: requests in flight; requests: how many in all; max_tokens: tokens each; seed: of the arrival jitter;
    jitter: most steps a client waits before it sends its next request."""

    concurrency: int
    requests: int
    max_tokens: int
    seed: int
    jitter: int = 8


@dataclass
class Run:
    """What a load left behind: finished requests in order of number, and the trace."""

    load: Load
    requests: list[Request]
    steps: list[Step]


def serve(model: Model, prompts: list[list[int]], load: Load, config: EngineConfig = EngineConfig(), progress=None,
          build: Callable[[Model, EngineConfig], Engine] = Engine) -> Run:
    """Serve ``load`` on a fresh engine. Request i asks prompt i mod P; client i mod C sends it.

    prompts: token ids of the P prompts. progress: called with each finished request. build: makes the engine, for one
    that chooses its tokens in another way.
    Raises BadInput for a concurrency, number of requests or of prompts below 1, a negative jitter or seed, and a prompt
    that does not fit the cache.
    """
    for name, value in (("concurrency", load.concurrency), ("requests", load.requests), ("prompts", len(prompts))):
        if value < 1:
            raise BadInput(f"{name} is {value}: at least 1 is needed.")
    for name, value in (("jitter", load.jitter), ("seed", load.seed)):
        if value < 0:
            raise BadInput(f"{name} is {value}: 0 or more is needed.")
    engine = build(model, config)
    random = np.random.default_rng(load.seed)
    delay = lambda: int(random.integers(0, load.jitter + 1)) if load.concurrency > 1 else 0  # noqa: E731
    due = sorted((delay(), client) for client in range(min(load.concurrency, load.requests)))
    done: list[Request] = []
    sent = 0
    while len(done) < load.requests:
        while due and due[0][0] <= engine.now and sent < load.requests:
            due.pop(0)
            tokens = prompts[sent % len(prompts)]
            engine.submit(Request(sent, sent % len(prompts), list(tokens), len(tokens), load.max_tokens, engine.now))
            sent += 1
        for request in engine.step():
            done.append(request)
            due = sorted([*due, (engine.now + delay(), request.number)])
            if progress:
                progress(request)
    return Run(load, sorted(done, key=lambda r: r.number), engine.steps)

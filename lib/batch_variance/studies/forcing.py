"""What a batch does to hidden states and logits, position by position: every request is forced to its prompt's own
text.

Left to itself a request that changes one token has another context from there on, and nothing lines up any more.
Forced,
each position has the same context in every batch, so a difference is noise of the batch and of nothing else; the steps,
their rows and their kernels are still the engine's own. What a forced request would have said is kept.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
import torch

from ..engine import Engine, EngineConfig, Load, Model, Request, serve
from ..numerics import row_scaled_ulp

KINDS = ("hidden state", "logits")
# Row-scaled ULP: exactly 0, then doublings.
EDGES = np.array([0.0, *2.0 ** np.arange(-8, 21), np.inf])


class _LastHidden:
    """A model that keeps its last layer's output for the rows whose logits it returned."""

    def __init__(self, model: Model):
        self.model, self.weights = model, model.weights
        self.hidden: torch.Tensor | None = None

    def forward(self, rows, k_pages, v_pages) -> torch.Tensor:
        last = self.weights.shape.layers - 1

        def keep(layer: int, hidden: torch.Tensor) -> None:
            if layer == last:
                self.hidden = hidden[rows.sampled]

        return self.model.forward(rows, k_pages, v_pages, keep)


class ForcedEngine(Engine):
    """Decodes ``texts[prompt]`` whatever the logits say; a prompt without a text stays free. notice(requests, hidden,
    logits, chosen) sees each choice as it would have been."""

    def __init__(self, model: Model, config: EngineConfig, texts: dict[int, list[int]], notice):
        super().__init__(_LastHidden(model), config)
        self._texts, self._notice = texts, notice

    def choose(self, requests: list[Request], logits: torch.Tensor, greedy: list[int]) -> list[int]:
        self._notice(requests, self.model.hidden, logits, greedy)
        return [
            self._texts[r.prompt][len(r.output)] if r.prompt in self._texts else token
            for r, token in zip(requests, greedy)
        ]


@dataclass
class Solo:
    """Each prompt alone, at every position of its own text. hidden [prompts, T, hidden] and logits [prompts, T,
    vocabulary] in float32; best, second: the two largest logits' tokens, int64 [prompts, T]; dtypes: in which values of
    each kind are kept."""

    texts: dict[int, list[int]]
    hidden: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor
    second: torch.Tensor
    dtypes: dict[str, torch.dtype]

    @property
    def margin(self) -> torch.Tensor:
        """float32 [prompts, T], best minus second logit."""
        best, second = (self.logits.gather(-1, token.unsqueeze(-1)).squeeze(-1) for token in (self.best, self.second))
        return best - second

    def margins(self) -> pd.DataFrame:
        """prompt, position, margin, best, second (token ids) and their logits."""
        found = {name: getattr(self, name).cpu().numpy().ravel() for name in ("margin", "best", "second")}
        for name in ("best", "second"):
            found[f"{name}_logit"] = self.logits.gather(-1, getattr(self, name).unsqueeze(-1)).cpu().numpy().ravel()
        prompts, length = self.best.shape
        return pd.DataFrame(
            {"prompt": np.repeat(np.arange(prompts), length), "position": np.tile(np.arange(length), prompts), **found}
        )


def solo(model: Model, prompts: list[list[int]], tokens: int, config: EngineConfig, storage: str) -> Solo:
    """Serve every prompt alone, one after another, and keep everything. storage: dtype in which values are kept."""
    kept: dict[int, list] = {index: [] for index in range(len(prompts))}

    def notice(requests, hidden, logits, chosen) -> None:
        for row, request in enumerate(requests):
            kept[request.prompt].append((chosen[row], hidden[row].float(), logits[row].float()))

    serve(
        model,
        prompts,
        Load(1, len(prompts), tokens, seed=0),
        config,
        build=partial(ForcedEngine, texts={}, notice=notice),
    )
    texts = {prompt: [token for token, _, _ in rows] for prompt, rows in kept.items()}
    hidden, logits = (
        torch.stack([torch.stack([row[part] for row in rows]) for rows in kept.values()]) for part in (1, 2)
    )
    best = torch.tensor(list(texts.values()), device=logits.device)
    # The chosen token is the best even among equals; the second is the largest of the others.
    second = logits.scatter(-1, best.unsqueeze(-1), -torch.inf).argmax(-1)
    kept_as = "bfloat16" if "bfloat16" in (storage, config.logits) else storage
    return Solo(
        texts, hidden, logits, best, second, {KINDS[0]: getattr(torch, storage), KINDS[1]: getattr(torch, kept_as)}
    )


@dataclass
class Measured:
    """positions: a row a (request, position); values: how many values fell in which range of row-scaled ULP, by
    kind.
    """

    positions: pd.DataFrame
    values: pd.DataFrame


@dataclass
class _Comparing:
    """Compares each forced position with the same position alone."""

    reference: Solo
    rows: list[dict] = field(default_factory=list)
    counts: dict[str, np.ndarray] = field(
        default_factory=lambda: {kind: np.zeros(len(EDGES), dtype=np.int64) for kind in KINDS}
    )

    def __call__(self, requests: list[Request], hidden: torch.Tensor, logits: torch.Tensor, chosen: list[int]) -> None:
        alone, device = self.reference, logits.device
        prompt = torch.tensor([r.prompt for r in requests], device=device)
        position = torch.tensor([len(r.output) for r in requests], device=device)
        best, second = alone.best[prompt, position], alone.second[prompt, position]
        logits = logits.float()
        top = logits.topk(2, dim=-1).values
        ours = [logits.gather(-1, token.unsqueeze(-1)).squeeze(-1) for token in (best, second)]
        found = {
            "request": [r.number for r in requests],
            "prompt": prompt.tolist(),
            "position": position.tolist(),
            "margin": (top[:, 0] - top[:, 1]).tolist(),
            "solo_margin": alone.margin[prompt, position].tolist(),
            "best_logit": ours[0].tolist(),
            "second_logit": ours[1].tolist(),
            "chosen": chosen,
            "flipped": [token != own for token, own in zip(chosen, best.tolist())],
            "third": [token not in pair for token, pair in zip(chosen, zip(best.tolist(), second.tolist()))],
        }
        for kind, here, there in ((KINDS[0], hidden.float(), alone.hidden), (KINDS[1], logits, alone.logits)):
            scaled = row_scaled_ulp(there[prompt, position].to(alone.dtypes[kind]), here.to(alone.dtypes[kind]))
            name = kind.split()[0]
            found |= {
                f"{name}_median_ulp": scaled.median(-1).values.tolist(),
                f"{name}_largest_ulp": scaled.amax(-1).tolist(),
                f"{name}_other_bits": (scaled > 0).double().mean(-1).tolist(),
            }
            edges = torch.tensor(EDGES, device=device)
            # Range i holds edge i - 1 < x <= edge i; range 0 is exactly 0.
            self.counts[kind] += torch.bucketize(scaled.flatten(), edges).bincount(minlength=len(EDGES)).cpu().numpy()
        self.rows += [dict(zip(found, values)) for values in zip(*found.values())]

    def measured(self, cell: dict) -> Measured:
        positions = pd.DataFrame(self.rows).assign(**cell)
        positions["noise"] = positions.best_logit - positions.second_logit - positions.solo_margin
        values = pd.concat(
            [
                pd.DataFrame({"kind": kind, "above": [np.nan, *EDGES[:-1]], "up_to": EDGES, "values": count})
                for kind, count in self.counts.items()
            ]
        )
        return Measured(positions.sort_values(["request", "position"], ignore_index=True), values.assign(**cell))


def measure(
    model: Model,
    prompts: list[list[int]],
    reference: Solo,
    load: Load,
    config: EngineConfig,
    cell: dict,
    forced: bool = True,
) -> Measured:
    """Serve ``load``, each request forced to its prompt's text alone, and compare every position with that text's.

    positions has request, prompt, position; margin (of the two largest logits) and solo_margin; best_logit,
    second_logit:
    the logits of the candidates that were best and second alone; chosen: the largest logit's token; flipped: it is
    not the
    one chosen alone; third: it is neither candidate; noise: change of the candidates' difference; and per kind the
    row's
    median and largest row-scaled ULP and share of values with other bits. ``cell`` names the rows of both tables.
    forced=False leaves texts free: then only positions up to a request's first flip have the context that they are
    compared with.
    """
    comparing = _Comparing(reference)
    texts = reference.texts if forced else {}
    serve(model, prompts, load, config, build=partial(ForcedEngine, texts=texts, notice=comparing))
    return comparing.measured(cell)

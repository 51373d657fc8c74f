"""The threshold explorer: how many rows of a step fall to each expert, and which expert crosses the threshold."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ...common import BadInput
from ..plots import explorers as plots
from .explorer import Explorer, canvas, choice, present, slider


@dataclass(frozen=True)
class Routing:
    """What the router saw. scores: float [layers, rows, groups], the sum of |activation| over each smallest group of
    neurons, in the order of the experts; layers: their numbers; prompt: int [rows], which prompt a row belongs to, rows
    in order; label: the model in words."""

    scores: np.ndarray
    layers: list[int]
    prompt: np.ndarray
    label: str

    @property
    def expert_counts(self) -> list[int]:
        """Numbers of experts that neighbouring groups can be joined into."""
        groups = self.scores.shape[-1]
        return [count for count in range(2, min(groups, 128) + 1) if groups % count == 0]

    def step_rows(self, requests: int, tokens: int) -> np.ndarray:
        """Rows of a step of ``requests`` requests with ``tokens`` tokens each.

        Request r is prompt r modulo their number. Those beyond the prompts start elsewhere in the same text, and a
        prompt shorter than ``tokens`` starts again: the rows are real hidden states, their neighbours an assumption.
        """
        found = [np.flatnonzero(self.prompt == number) for number in dict.fromkeys(self.prompt.tolist())]
        rows = []
        for request in range(requests):
            mine = found[request % len(found)]
            start = 7 * (request // len(found))
            rows.append(mine[(start + np.arange(tokens)) % len(mine)])
        return np.concatenate(rows)

    def rows_per_expert(self, layer: int, requests: int, tokens: int, experts: int, top_k: int) -> pd.DataFrame:
        """expert, rows: every row goes to the ``top_k`` experts of largest score. Raises BadInput for a top-k that does
        not fit."""
        if not 1 <= top_k <= experts:
            raise BadInput(f"top-k is {top_k}, but there are {experts} experts: give 1 to {experts}.")
        scores = self.scores[self.layers.index(layer), self.step_rows(requests, tokens)]
        joined = scores.reshape(len(scores), experts, -1).sum(-1)
        chosen = np.argpartition(-joined, top_k - 1, axis=1)[:, :top_k]
        return pd.DataFrame({"expert": np.arange(experts), "rows": np.bincount(chosen.ravel(), minlength=experts)})


class ThresholdExplorer(Explorer):
    """Requests in the step, tokens of each, experts, top-k, layer, threshold."""

    def __init__(self, routing: Routing, threshold: int, experts: int, top_k: int):
        self._routing = routing
        counts = routing.expert_counts
        experts = experts if experts in counts else counts[len(counts) // 2]
        controls = {
            "requests": slider("requests in the step", 8, 1, 64),
            "tokens": slider("tokens of each request", 1, 1, 64),
            "experts": choice("experts", counts, experts),
            "top_k": slider("top-k (experts a row uses)", min(top_k, experts), 1, experts),
            "layer": choice("layer", routing.layers, routing.layers[len(routing.layers) // 2]),
            "threshold": slider("threshold (rows)", threshold, 0, max(128, threshold)),
        }
        controls["experts"].observe(lambda change: setattr(controls["top_k"], "max", change["new"]), "value")
        super().__init__(controls, self.draw, "Threshold explorer: which expert crosses the row threshold")

    def draw(self, requests, tokens, experts, top_k, layer, threshold) -> tuple[Figure, str]:
        top_k = min(top_k, experts)
        rows = self._routing.rows_per_expert(layer, requests, tokens, experts, top_k)
        fig = canvas(8.4, 3.1)
        ax = fig.subplots()
        fig.subplots_adjust(left=0.085, right=0.985, top=0.88, bottom=0.17)
        plots.experts_on(ax, rows, threshold)
        ax.set(xlabel="expert", ylabel="rows in the step")
        ax.set_title(f"layer {layer}: GEMV up to {threshold} rows, GEMM above", y=1.0)  # fixed, which saves a layout
        return fig, words(rows, requests, tokens, top_k, threshold)


def words(rows: pd.DataFrame, requests: int, tokens: int, top_k: int, threshold: int) -> str:
    """What the bars show, in a sentence or two."""
    above = rows.expert[rows.rows > threshold].tolist()
    named = ", ".join(map(str, above[:8])) + (" and others" if len(above) > 8 else "")
    crossing = f"{len(above)} of {len(rows)} experts cross the threshold of {threshold} rows" + (f": {named}" if above else "")
    busiest = rows.loc[rows.rows.idxmax()]
    total = requests * tokens
    return (f"{requests} request{'s' * (requests > 1)} of {tokens} token{'s' * (tokens > 1)} make {total:,} rows, each for {top_k} experts. {crossing}. "
            f"The busiest, expert {busiest.expert}, has {busiest.rows:,} rows; a dense FFN would have {total:,}"
            f" and {'cross' if total > threshold else 'stay below'}.")


def threshold_explorer(routing: Routing, p, tier: str, name: str = "threshold-explorer") -> None:
    """Display the explorer. p: notebook 01's parameters (threshold, experts, top_k); tier: of the run that routed."""
    live = ThresholdExplorer(routing, p.threshold, p.experts, p.top_k)
    experts, top_k = live.values["experts"], live.values["top_k"]
    layer = live.values["layer"]
    few = max(top_k // 3, 1)
    cases = [(requests, tokens, k) for k in dict.fromkeys((top_k, few)) for requests, tokens in ((8, 1), (32, 1), (32, 8))]
    states = pd.concat(
        [
            routing.rows_per_expert(layer, requests, tokens, experts, k).assign(state=f"{requests} requests x {tokens}, top-{k}")
            for requests, tokens, k in cases
        ],
        ignore_index=True,
    )
    over = states[states.rows > p.threshold].groupby("state").size()
    alt = f"Rows per expert of layer {layer} in {len(cases)} states; experts above {p.threshold} rows: " + "; ".join(
        f"{name}, {int(over.get(name, 0))} of {experts}" for name in dict.fromkeys(states.state)) + "."
    present(live, plots.expert_rows(states, p.threshold), name, alt, tier, f"{len(routing.prompt)} rows of {len(set(routing.prompt.tolist()))} prompts")

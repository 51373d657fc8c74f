"""The threshold explorer: how many rows of a step fall to each expert, and which expert crosses the threshold."""

import pandas as pd
from matplotlib.figure import Figure

from ...studies.row_threshold_routing import Routing
from ..plots import explorers as plots
from .explorer import Explorer, canvas, choice, knob, present


STATES = ((8, 1), (32, 1), (32, 4))  # (requests, tokens of each) that the twin shows


class ThresholdExplorer(Explorer):
    """Requests in the step, tokens of each, experts, top-k, layer, threshold."""

    def __init__(self, routing: Routing, threshold: int, experts: int, top_k: int):
        self._routing = routing
        counts = routing.expert_counts
        experts = experts if experts in counts else counts[len(counts) // 2]
        controls = {
            "requests": knob("requests in the step", 8, 1, 64),
            "tokens": knob("tokens of each request", 1, 1, 64),
            "experts": choice("experts", counts, experts),
            "top_k": knob("top-k (experts a row uses)", min(top_k, experts), 1, experts),
            "layer": choice("layer", routing.layers, routing.layers[len(routing.layers) // 2]),
            "threshold": knob("threshold (rows)", threshold, 0, max(128, threshold)),
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
    crossing = f"{len(above)} of {len(rows)} experts cross the threshold of {threshold} rows" + (
        f": {named}" if above else ""
    )
    busiest = rows.loc[rows.rows.idxmax()]
    total = requests * tokens
    return (
        f"{requests} request{'s' * (requests > 1)} of {tokens} token{'s' * (tokens > 1)} make {total:,} rows, each "
        f"for {top_k} experts. {crossing}. "
        f"The busiest, expert {busiest.expert}, has {busiest.rows:,} rows; a dense FFN would have {total:,}"
        f" and {'cross' if total > threshold else 'stay below'}."
    )


def threshold_explorer(routing: Routing, p, tier: str, name: str = "threshold-explorer") -> str:
    """Display the explorer; returns a sentence on what its twin shows.

    p: notebook 01's parameters (threshold, experts, top_k); tier: of the run that routed.
    """
    live = ThresholdExplorer(routing, p.threshold, p.experts, p.top_k)
    experts, top_k, layer = (live.values[key] for key in ("experts", "top_k", "layer"))
    cases = [(requests, tokens, k) for k in dict.fromkeys((top_k, max(top_k // 3, 1))) for requests, tokens in STATES]
    found = {
        f"{requests} requests x {tokens}, top-{k}": routing.rows_per_expert(layer, requests, tokens, experts, k)
        for requests, tokens, k in cases
    }
    over = "; ".join(f"{state}: {int((rows.rows > p.threshold).sum())}" for state, rows in found.items())
    words = (
        f"Experts of {experts} in layer {layer} with more than {p.threshold} rows, by requests x tokens of "
        f"each: {over}."
    )
    states = pd.concat([rows.assign(state=state) for state, rows in found.items()], ignore_index=True)
    count = f"{len(routing.prompt)} rows of {len(set(routing.prompt.tolist()))} prompts"
    return present(live, plots.expert_rows(states, p.threshold), name, words, tier, count)

"""What a router sees of real prompts: which experts a step's rows would fall to, for any number of experts and top-k.

Knows how rows spread over experts; whether an expert's row count changes any text is ``row_threshold``'s question.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..common import BadInput
from ..engine.model import Experts
from ..numerics import BLOCK
from .row_threshold import Setup

MOST_EXPERTS = 128


@dataclass(frozen=True)
class Routing:
    """scores: float [layers, rows, groups], the sum of |activation| over each smallest group of neurons, in the order
    of the experts; layers: their numbers; prompt: int [rows], which prompt a row belongs to, each prompt's rows in
    order; label: the model in words."""

    scores: np.ndarray
    layers: list[int]
    prompt: np.ndarray
    label: str

    @property
    def expert_counts(self) -> list[int]:
        """Numbers of experts that neighbouring groups can be joined into."""
        groups = self.scores.shape[-1]
        return [count for count in range(2, min(groups, MOST_EXPERTS) + 1) if groups % count == 0]

    def step_rows(self, requests: int, tokens: int) -> np.ndarray:
        """Indices of the rows of a step of ``requests`` requests with ``tokens`` tokens each.

        Request r is prompt r modulo their number, from token 7 r on, round and round: in a step requests stand at
        different places of their texts. The rows are real hidden states, their company an assumption.
        """
        texts = [np.flatnonzero(self.prompt == number) for number in dict.fromkeys(self.prompt.tolist())]
        rows = []
        for request in range(requests):
            text = texts[request % len(texts)]
            rows.append(text[(7 * request + np.arange(tokens)) % len(text)])
        return np.concatenate(rows)

    def rows_per_expert(self, layer: int, requests: int, tokens: int, experts: int, top_k: int) -> pd.DataFrame:
        """expert, rows: each row of the step goes to its ``top_k`` experts of largest score.

        Raises BadInput for a top-k that does not fit the experts.
        """
        if not 1 <= top_k <= experts:
            raise BadInput(f"top-k is {top_k}, but there are {experts} experts: give 1 to {experts}.")
        scores = self.scores[self.layers.index(layer), self.step_rows(requests, tokens)]
        joined = scores.reshape(len(scores), experts, -1).sum(-1)
        chosen = np.argpartition(-joined, top_k - 1, axis=1)[:, :top_k]
        return pd.DataFrame({"expert": np.arange(experts), "rows": np.bincount(chosen.ravel(), minlength=experts)})


def routing(setup: Setup) -> Routing:
    """Router scores of ``setup.ffn_inputs``, the first four prompts through every third layer.

    Groups are of 16 neurons, so any number of experts that divides them can be looked at: the model's own, or another
    cut of the same neurons. A dense FFN is cut into neighbours.
    """
    scores = []
    for layer, x in setup.ffn_inputs.items():
        ffn = setup.weights.layers[layer].ffn
        gate_up = ffn.router if isinstance(ffn, Experts) else setup.dense.layers[layer].ffn.gate_up.float()
        gate, up = setup.kernels.linear(x, gate_up).float().chunk(2, dim=-1)
        activation = (gate.sigmoid() * gate * up).abs()
        scores.append(activation.view(len(x), -1, BLOCK).sum(-1).cpu().numpy())
    prompt = np.repeat(np.arange(len(setup.prompts[:4])), [len(one) for one in setup.prompts[:4]])
    return Routing(np.stack(scores), list(setup.ffn_inputs), prompt, setup.weights.label)

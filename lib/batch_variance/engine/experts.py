"""A mixture of experts made from a dense model: each FFN's neurons cut into equally large groups.

The result is a derived model, only as good as its split: `perplexity` measures it beside the dense one on text that
ships with Python. No weight is trained or changed. Grouping neurons that fire together follows MoEfication (Zhang et
al., 2022); the router here is exact, the sum of |activation| over each group, computed from the row alone.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ..common import BadInput, data_path
from ..kernels.nvfp4 import policy
from ..kernels.sets import KernelSet
from .checkpoint import DEFAULT_MODEL, ChatTokenizer
from .model import Experts, ExpertSplit, Model, StepRows, Weights

SPLITS = ("contiguous", "clustered")
SHIPPED_SPLIT = "smollm2_experts.npz"


def split_for(weights: Weights, folder: Path, model: str, kind: str, experts: int, top_k: int) -> ExpertSplit:
    """How to cut ``model`` into experts.

    kind: "contiguous" takes neighbouring neurons, "clustered" neurons with similar activation patterns. The default
    model's 16-expert clusters are read from data/, others are computed here.
    Raises BadInput for another kind, or numbers that do not fit the FFN.
    """
    neurons = weights.shape.intermediate
    if kind not in SPLITS:
        raise BadInput(f"expert split {kind!r} is unknown: give contiguous or clustered.")
    if experts < 2 or neurons % experts or (neurons // experts) % 16:
        raise BadInput(f"experts = {experts} does not cut {neurons} neurons into equal groups of a multiple of 16.")
    if not 1 <= top_k <= experts:
        raise BadInput(f"top_k = {top_k} does not fit {experts} experts: give 1 ... {experts}.")
    if kind == "contiguous":
        group = [torch.arange(neurons) // (neurons // experts)] * weights.shape.layers
    elif model == DEFAULT_MODEL and experts == 16 and data_path(SHIPPED_SPLIT).is_file():
        group = list(torch.from_numpy(np.load(data_path(SHIPPED_SPLIT))["group"].astype(np.int64)))
    else:
        group = cluster(weights, ChatTokenizer(folder), experts)
    return ExpertSplit(group, experts, top_k)


def python_docs(tokenizer: ChatTokenizer, start: int, count: int) -> list[int]:
    """``count`` tokens of Python's own help topics, from token ``start``."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    # Ten characters a token is more than enough; encoding all of it would take seconds.
    return tokenizer.encode(text[: 10 * (start + count)])[start : start + count]


def _prompt_rows(tokens: list[int], device: torch.device, page: int = 16) -> tuple[StepRows, tuple[int, int]]:
    """One prompt as one prefill step that wants every position's logits, and the cache size it needs (pages, page)."""
    count = len(tokens)
    pages = -(-count // page)
    index = torch.arange(count, device=device)
    return StepRows(
        tokens=torch.tensor(tokens, device=device), positions=index, slots=index, lengths=index + 1, sampled=index,
        tables=torch.arange(pages, device=device).expand(count, pages), decode_rows=0,
    ), (pages, page)


def prompt_logits(model: Model, tokens: list[int], observe=None) -> torch.Tensor:
    """Logits [T, vocabulary] of a prompt run alone in one step."""
    shape, device = model.weights.shape, model.weights.embedding.device
    rows, (pages, page) = _prompt_rows(tokens, device)
    k_pages = torch.zeros(shape.layers, pages, page, shape.kv_heads, shape.head_dim, device=device, dtype=model.weights.embedding.dtype)
    return model.forward(rows, k_pages, torch.zeros_like(k_pages), observe)


def perplexity(model: Model, tokens: list[int], window: int = 256) -> float:
    """exp of the mean negative log-likelihood of each token but a window's first, in windows of ``window`` tokens."""
    losses = []
    for start in range(0, len(tokens) - 1, window):
        part = tokens[start : start + window]
        if len(part) > 1:
            logits = prompt_logits(model, part)[:-1].float()
            losses.append(F.cross_entropy(logits, torch.tensor(part[1:], device=logits.device), reduction="none"))
    return float(torch.cat(losses).mean().exp())


def cluster(weights: Weights, tokenizer: ChatTokenizer, experts: int, tokens: int = 2048, seed: int = 0) -> list[torch.Tensor]:
    """Group each layer's neurons by how alike their |activation| is over ``tokens`` tokens of Python's help topics.

    weights: a dense, unquantized model. Returns per layer int64 [neurons]. Balanced k-means on unit vectors.
    """
    activations: list[list[torch.Tensor]] = [[] for _ in weights.layers]
    model = Model(weights, _Recording(weights, activations), policy("default"))
    text = python_docs(tokenizer, 0, tokens)
    for start in range(0, len(text), 256):
        prompt_logits(model, text[start : start + 256])
    return [_balanced_groups(torch.cat(parts).abs(), experts, seed) for parts in activations]


class _Recording:
    """The emulated kernels, keeping what goes into each down projection."""

    def __init__(self, weights: Weights, kept: list[list[torch.Tensor]]):
        from ..kernels.sets import kernel_set

        self._kernels: KernelSet = kernel_set(weights.embedding.device)
        self._layer = {id(layer.ffn.down): index for index, layer in enumerate(weights.layers) if not isinstance(layer.ffn, Experts)}
        self._kept = kept

    def __getattr__(self, name):
        return getattr(self._kernels, name)

    def linear(self, x, weight):
        if id(weight) in self._layer:
            self._kept[self._layer[id(weight)]].append(x.cpu())
        return self._kernels.linear(x, weight)


def _balanced_groups(activation: torch.Tensor, groups: int, seed: int, rounds: int = 10) -> torch.Tensor:
    """activation: [T, neurons], not negative. int64 [neurons], every group equally large."""
    points = F.normalize(activation.t() - activation.t().mean(1, keepdim=True), dim=1).numpy()
    neurons, size = points.shape[0], points.shape[0] // groups
    centres = points[np.random.default_rng(seed).permutation(neurons)[:groups]]
    for _ in range(rounds):
        likeness = points @ centres.T
        group, room = np.full(neurons, -1), np.full(groups, size)
        for pair in np.argsort(-likeness, axis=None, kind="stable"):
            neuron, candidate = divmod(int(pair), groups)
            if group[neuron] < 0 and room[candidate]:
                group[neuron], room[candidate] = candidate, room[candidate] - 1
        centres = np.stack([points[group == g].mean(0) for g in range(groups)])
        centres /= np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-12)
    return torch.from_numpy(group.astype(np.int64))

"""Call sites by name: which argument carries the batch at operations and engines in use, so that nobody has to find
out twice.

A site is imported when it is probed and not before, so that naming vLLM costs nothing where vLLM is absent. Names
follow the sources read in November 2026: torch 2.13, transformers 5.24, FlashMLA as in vLLM 0.27.1, vLLM's main
branch (the Triton attention and the FlashAttention fork's ``flash_attn_varlen_func``). ``probe_at`` checks them
against what is installed.

Engines that replay CUDA graphs run no Python at the call site: start vLLM with ``--enforce-eager``.
"""

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Mapping

import torch

from ..common import BadInput
from .layouts import Flat, Prefix, Rows
from .probe import CallSiteProbe


@dataclass(frozen=True)
class Site:
    """Where a call is made and how its arguments carry the batch; ``options`` go to ``CallSiteProbe``."""

    target: str | Callable[[], Any]
    batch_args: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def package(self) -> str:
        return self.target.partition(".")[0].partition(":")[0] if isinstance(self.target, str) else "transformers"


def _transformers_attention(kind: str) -> Callable[[], Any]:
    def find():
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS, kind

    return find


def _longest(name: str) -> Callable:
    """Maker of a maximum length from prefix sums or lengths."""

    def make(arguments: dict) -> int:
        value = arguments[name]
        return int((value.diff() if name.startswith("cu_") else value).max())

    return make


def _schedule_of(module: str) -> Callable[[], Any]:
    """Maker of FlashMLA's empty metadata, which the call fills in from the batch that it is given."""
    return lambda: importlib.import_module(module).get_mla_metadata()[0]


_FLASHMLA = dict.fromkeys(
    (
        "q",
        "block_table",
        "cache_seqlens",
        "indices",
        "topk_length",
        "extra_indices_in_kvcache",
        "extra_topk_length",
        "out",
    ),
    0,
)
_CACHES, _WEIGHTS = ("k_cache", "extra_k_cache"), ("attn_sink",)


def _flashmla(module: str, interface: str, **more: Any) -> Site:
    options = {"fresh": {"tile_scheduler_metadata": _schedule_of(interface)}, "whole": _CACHES, "constant": _WEIGHTS}
    return Site(f"{module}:flash_mla_with_kvcache", _FLASHMLA, {**options, **more})


SITES: dict[str, Site] = {
    # Builtins without a signature: positional arguments go by number.
    "torch.linear": Site("torch.nn.functional:linear", {"0": 0}),
    "torch.matmul": Site("torch:matmul", {"0": 0}),
    "torch.bmm": Site("torch:bmm", {"0": 0, "1": 0}),
    "torch.attention": Site(
        "torch.nn.functional:scaled_dot_product_attention", {"0": 0, "1": 0, "2": 0, "attn_mask": Rows(0, or_one=True)}
    ),
    "transformers.attention": Site(
        _transformers_attention("sdpa"),
        {"query": 0, "key": 0, "value": 0, "attention_mask": Rows(0, or_one=True)},
        {"outputs": {"1": None}},
    ),
    "flashmla.decode": _flashmla("flash_mla", "flash_mla"),
    "vllm.flashmla": _flashmla("vllm.models.deepseek_v4.nvidia.flashmla", "vllm.v1.attention.ops.flashmla"),
    # A sparse call's indices number the cache's slots, whatever its block table says: only dense calls go by pages.
    "vllm.flashmla-dense": _flashmla(
        "vllm.v1.attention.backends.mla.flashmla", "vllm.v1.attention.ops.flashmla", pages={"k_cache": "block_table"}
    ),
    "vllm.flash-attention": Site(
        "vllm.v1.attention.backends.flash_attn:flash_attn_varlen_func",
        {
            "q": Flat("cu_seqlens_q"),
            "out": Flat("cu_seqlens_q"),
            "cu_seqlens_q": Prefix(),
            "seqused_k": 0,
            "block_table": 0,
            "q_descale": 0,
            "k_descale": 0,
            "v_descale": 0,
        },
        {
            "fresh": {
                "max_seqlen_q": _longest("cu_seqlens_q"),
                "max_seqlen_k": _longest("seqused_k"),
                "scheduler_metadata": lambda: None,
            },
            "pages": {"k": "block_table", "v": "block_table"},
            "lengths": "seqused_k",
        },
    ),
    "vllm.triton-attention": Site(
        "vllm.v1.attention.backends.triton_attn:unified_attention",
        {
            "q": Flat("cu_seqlens_q"),
            "out": Flat("cu_seqlens_q"),
            "cu_seqlens_q": Prefix(),
            "seqused_k": 0,
            "block_table": 0,
            "k_descale": 0,
            "v_descale": 0,
        },
        {
            "fresh": {"max_seqlen_q": _longest("cu_seqlens_q"), "max_seqlen_k": _longest("seqused_k")},
            "pages": {"k": "block_table", "v": "block_table"},
            "lengths": "seqused_k",
        },
    ),
}


def present() -> dict[str, bool]:
    """Which of the sites' packages are installed here; nothing is imported."""
    return {name: importlib.util.find_spec(site.package) is not None for name, site in SITES.items()}


def probe_at(name: str, **options: Any) -> CallSiteProbe:
    """A probe at a named site. ``options`` are ``CallSiteProbe``'s and override the site's own.

    Raises BadInput for an unknown name, an absent package, or an installed version whose arguments have other names.
    """
    if name not in SITES:
        raise BadInput(f"call site {name!r} is unknown: give one of {', '.join(SITES)}.")
    site = SITES[name]
    if not present()[name]:
        raise BadInput(f"call site {name!r} needs {site.package}, which is not installed here.")
    target = site.target if isinstance(site.target, str) else site.target()
    return CallSiteProbe(target, site.batch_args, **{**site.options, **options})


def linear_layers(model: torch.nn.Module, contains: str = "", **options: Any) -> Iterator[tuple[str, CallSiteProbe]]:
    """A probe for each linear layer whose name contains a text, with its name; rows are the first dimension of its
    input.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and contains in name:
            yield name, CallSiteProbe(module, {"input": 0}, **options)


def engine_sites(kernels: Any, **options: Any) -> dict[str, CallSiteProbe]:
    """Probes at the kernels of this project's engine: a row is a token of the step, with its own page table and length.

    kernels: the engine's kernel set (``kernels.sets``). Attention only reads the paged caches, of which controls
    made later are given the pages that the tables name. Weights are constant.
    """
    return {
        "linear": CallSiteProbe((kernels, "linear"), {"x": 0}, **{"constant": ("weight",), **options}),
        "attend": CallSiteProbe(
            (kernels, "attend"),
            {"q": 0, "tables": 0, "lengths": 0},
            **{"pages": {"k_pages": "tables", "v_pages": "tables"}, "lengths": "lengths", **options},
        ),
        "rms_norm": CallSiteProbe((kernels, "rms_norm"), {"x": 0}, **{"constant": ("weight",), **options}),
    }

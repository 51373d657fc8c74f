"""Adapters: named sites find their arguments, on what is installed here and on the signatures that vLLM publishes."""

import importlib.util
import inspect
import sys
import types

import pytest
import torch

from batch_variance.common import BadInput
from batch_variance.engine.checkpoint import Architecture
from batch_variance.hooks import Flat
from batch_variance.hooks.adapters import SITES, engine_sites, linear_layers, present, probe_at

# Argument names as published: vLLM 0.27.1's vllm/third_party/flashmla/flash_mla_interface.py;
# vllm-project/flash-attention at 03ef28b3 (vllm_flash_attn/flash_attn_interface.py); vllm-project/vllm at 00139433
# (triton_unified_attention.py).
PUBLISHED = {
    "flash_mla_with_kvcache": "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal "
    "is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length out",
    "flash_attn_varlen_func": "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p softmax_scale causal "
    "window_size softcap alibi_slopes deterministic return_attn_probs block_table return_softmax_lse out scheduler_metadata q_descale "
    "k_descale v_descale num_splits fa_version s_aux cp_world_size cp_rank cp_tot_seqused_k",
    "unified_attention": "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap "
    "q_descale k_descale v_descale seq_threshold_3D num_par_softmax_segments softmax_segm_output softmax_segm_max softmax_segm_expsum "
    "alibi_slopes output_scale qq_bias sinks mm_prefix_range use_alibi_sqrt",
}


@pytest.mark.parametrize("name", [name for name in SITES if name.startswith(("vllm", "flashmla"))])
def test_names_at_vllm_sites_are_those_that_vllm_publishes(name):
    site = SITES[name]
    published = set(PUBLISHED[site.target.partition(":")[2]].split())
    named = {*site.batch_args, *site.options.get("fresh", {}), *site.options.get("whole", ())}
    assert named <= published, named - published
    # Whatever a batch of another size would need anew is either cut, built, or shared by all rows.
    assert {"q", "out"} <= set(site.batch_args)


def stand_in(module: str, function, **others):
    """Modules of these names, so that a site can be imported without the package."""
    made = []
    for k in range(1, module.count(".") + 2):
        part = ".".join(module.split(".")[:k])
        if part not in sys.modules:
            sys.modules[part] = types.ModuleType(part)
            sys.modules[part].__spec__ = importlib.util.spec_from_loader(part, None)
            made.append(part)
    for key, value in {function.__name__: function, **others}.items():
        setattr(sys.modules[module], key, value)
    return made


@pytest.fixture
def made():
    names = []
    yield names
    for name in names:
        sys.modules.pop(name, None)


def paged_attention(q, k, v, out, cu_seqlens_q, seqused_k, block_table, splits):
    """Row by row in float64 over the row's own pages, then rounded: bits independent of the batch but for
    ``splits``.
    """
    ends = cu_seqlens_q.tolist()
    for i, length in enumerate(seqused_k.tolist()):
        keys = k[block_table[i].long()].flatten(0, 1)[:length].double()
        values = v[block_table[i].long()].flatten(0, 1)[:length].double()
        for t in range(ends[i], ends[i + 1]):
            weights = torch.softmax(torch.einsum("hd,khd->hk", q[t].double(), keys), dim=-1)
            out[t] = torch.einsum("hk,khd->hd", weights, values).float() * (1.0 + splits * 2**-20)
    return out


@pytest.mark.parametrize("by_batch", [False, True])
def test_a_varlen_decode_call_is_cut_by_its_prefix_sums(made, by_batch):
    def flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        seqused_k=None,
        block_table=None,
        out=None,
        scheduler_metadata=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    ):
        assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(seqused_k.max())
        assert len(seqused_k) == len(block_table) == len(cu_seqlens_q) - 1 and len(q) == int(cu_seqlens_q[-1])
        return paged_attention(
            q, k, v, out, cu_seqlens_q, seqused_k, block_table, int(seqused_k.sum()) if by_batch else 4
        )

    made += stand_in("vllm.v1.attention.backends.flash_attn", flash_attn_varlen_func)
    assert present()["vllm.flash-attention"]
    torch.manual_seed(0)
    k, v = torch.randn(2, 12, 4, 2, 8)
    lengths, cu = torch.tensor([5, 12, 9], dtype=torch.int32), torch.tensor([0, 1, 3, 4], dtype=torch.int32)
    table = torch.randperm(12)[:9].view(3, 3).to(torch.int32)
    scales = torch.ones(1).expand(3, 2)
    with probe_at("vllm.flash-attention", axes=("rerun", "contents", "composition", "solo", "position")) as probe:
        out = torch.empty(4, 2, 8)
        call = sys.modules["vllm.v1.attention.backends.flash_attn"].flash_attn_varlen_func
        given = dict(
            cu_seqlens_q=cu, max_seqlen_q=2, seqused_k=lengths, max_seqlen_k=12, block_table=table, q_descale=scales
        )
        assert call(torch.randn(4, 2, 8), k, v, out=out, **given) is out
    expected = dict.fromkeys(("rerun", "contents", "composition", "solo", "position"), "invariant")
    if by_batch:
        expected |= {"composition": "variant", "solo": "inconclusive"}  # composition already explains it
    assert probe.verdict() == expected, probe.explain()["reason"].tolist()


def test_flashmla_gets_metadata_of_its_own_in_each_replay(made):
    class Meta:
        def __init__(self):
            self.splits = None

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        indices=None,
        topk_length=None,
        attn_sink=None,
        extra_k_cache=None,
        extra_indices_in_kvcache=None,
        extra_topk_length=None,
        out=None,
    ):
        if tile_scheduler_metadata.splits is None:
            tile_scheduler_metadata.splits = int(topk_length.sum()) % 5
        out = q[..., :head_dim_v] * (1.0 + 2**-20 * tile_scheduler_metadata.splits)
        return out, out[..., 0].transpose(1, 2)

    interface = "vllm.v1.attention.ops.flashmla"
    made += stand_in(interface, flash_mla_with_kvcache, get_mla_metadata=lambda: (Meta(), None))
    made += stand_in("vllm.models.deepseek_v4.nvidia.flashmla", flash_mla_with_kvcache)
    meta = Meta()
    with probe_at("vllm.flashmla", axes=("rerun", "solo")) as probe:
        site = sys.modules["vllm.models.deepseek_v4.nvidia.flashmla"]
        lengths, indices = torch.tensor([3, 4, 5]), torch.zeros(3, 1, 8, dtype=torch.int32)
        site.flash_mla_with_kvcache(
            torch.randn(3, 1, 4, 16), torch.zeros(4), None, None, 8, meta, indices=indices, topk_length=lengths
        )
    assert meta.splits == 2
    assert probe.verdict() == {"rerun": "invariant", "solo": "variant"}, probe.explain()["reason"].tolist()


def test_absent_packages_and_unknown_names_are_one_sentence(made):
    with pytest.raises(BadInput, match="is unknown: give one of"):
        probe_at("vllm.prefill")
    for name in SITES:
        if not present()[name]:
            with pytest.raises(BadInput, match="not installed here"):
                probe_at(name)
    if not present()["flashmla.decode"]:

        def flash_mla_with_kvcache(q, renamed):
            return q

        made += stand_in("flash_mla", flash_mla_with_kvcache, get_mla_metadata=lambda: (None, None))
        with pytest.raises(BadInput, match="no such argument: it takes q, renamed"):
            probe_at("flashmla.decode")


def test_torch_and_transformers_sites_on_a_model(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (3, 5))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    plain = None
    for name in ("torch.linear", "torch.attention", "transformers.attention"):
        with torch.no_grad(), probe_at(name, max_calls=2) as probe:
            logits = model(input_ids=ids, attention_mask=mask).logits
            plain = model(input_ids=ids, attention_mask=mask).logits if plain is None else plain
        assert torch.equal(logits, plain)
        frame = probe.frame()
        assert probe.sampled and not probe.refusals, (name, probe.refusals)
        assert (frame["rows_checked"] >= 3).all() and probe.verdict()["rerun"] == "invariant", (name, frame)
    probes = dict(linear_layers(model, "mlp", axes=("rerun", "solo")))
    assert set(probes) == {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}
    with torch.no_grad(), probes["model.layers.0.mlp.up_proj"] as probe:
        model(input_ids=ids, attention_mask=mask)
    assert probe.verdict()["rerun"] == "invariant" and probe.sampled == 1


def test_the_projects_own_engine():
    """Row-invariant kernels are found invariant at each site, token by token; the tokens served do not change."""
    from batch_variance.engine.client import Load, serve
    from batch_variance.engine.model import FFN, Layer, Model, Weights
    from batch_variance.kernels.nvfp4.policy import policy
    from batch_variance.kernels.sets import EmulatedKernels

    torch.manual_seed(0)
    shape = Architecture(32, 64, 1, 2, 1, 16, 50, 10000.0, 1e-5, True, (49,))
    weights = lambda *size: torch.randn(size) / 6  # noqa: E731
    layer = Layer(
        torch.ones(32), weights(64, 32), weights(32, 32), torch.ones(32), FFN(weights(128, 32), weights(32, 64))
    )
    embedding = weights(50, 32)
    model = Model(
        Weights(shape, embedding, [layer], torch.ones(32), embedding, "toy"), EmulatedKernels(), policy("default")
    )
    load, prompts = Load(3, 4, 3, 0, 0), [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    plain = [r.output for r in serve(model, prompts, load).requests]
    for name, probe in engine_sites(
        model.kernels, axes=("rerun", "contents", "composition", "solo", "position"), max_calls=4, rows=2
    ).items():
        with probe:
            assert [r.output for r in serve(model, prompts, load).requests] == plain
        assert not probe.refusals and set(probe.verdict().values()) == {"invariant"}, (
            name,
            probe.explain().to_string(),
        )


def test_sites_are_data():
    for name, site in SITES.items():
        assert site.batch_args, name
        assert "." in name and isinstance(site.package, str)
        if isinstance(site.target, str) and site.package == "torch":
            module, _, function = site.target.partition(":")
            assert callable(inspect.getattr_static(sys.modules[module], function))
        assert not any(
            isinstance(layout, Flat) and layout.by not in site.batch_args for layout in site.batch_args.values()
        )

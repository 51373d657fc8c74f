"""The invariant kernels in the interpreter (what they compute), their configurations, and their use under a torch
model."""

import subprocess
import sys

import pytest
import torch
from interpreted import interpreted

from batch_variance.common import BadInput
from batch_variance.kernels import timing, use
from batch_variance.kernels.gemm import invariant
from batch_variance.kernels.gemm.invariant import STEP, Config, configuration, segment_steps, segments
from batch_variance.kernels.moe import invariant as moe
from batch_variance.kernels.moe.reference import grouped_float64
from batch_variance.kernels.norm import rows
from batch_variance.kernels.tiles import differing_rows
from batch_variance.kernels.use import InvariantKernels


@pytest.fixture(scope="module")
def results():
    return interpreted("invariant_interpreted.py")


def test_every_result_is_written_and_close_to_float64(results):
    counts = {
        name: sum(r["name"] == name for r in results)
        for name in ("gemm", "nvfp4", "every code", "softmax", "mean", "moe")
    }
    assert counts == {"gemm": 84, "nvfp4": 15, "every code": 3, "softmax": 6, "mean": 3, "moe": 8}
    assert not [r for r in results if r.get("beyond_bound")]
    assert sum(r.get("shape") == [0, 5] for r in results) == 17


def test_softmax_passes_nan_and_infinities_on_as_torch_does(results):
    assert [r["nan"] for r in results if r["name"] == "special"] == [True]


def test_importing_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import batch_variance.kernels.use; "
        "import batch_variance.kernels.gemm.invariant, "
        "batch_variance.kernels.nvfp4.invariant, batch_variance.kernels.command, batch_variance.kernels.gemm.bench"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["parallel 16x64x128 w4 s4 tma swap", "in-turn 128x256x64 w8 s3", "in-turn 128x128x64 w8 s5 tma hold"])
def test_a_configuration_is_its_text(text):
    assert str(Config.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "parallel 16x64 w4 s4", "serial 16x64x64 w4 s4", "parallel 16x64x96 w4 s4", "parallel 16x64x64 w4 s4 fast"],
)
def test_other_text_is_refused(text):
    with pytest.raises(BadInput, match="no configuration"):
        Config.parse(text)


def test_segments_are_a_function_of_the_weight_and_cover_k():
    for n in (64, 2048, 4096, 7168, 14336):
        for k in (16, 128, 1000, 4096, 7168):
            count = segments(n, k)
            length = segment_steps(k, count) * STEP
            assert (count - 1) * length < k <= count * length or count == 1
    with pytest.raises(BadInput, match="fewer"):
        segment_steps(256, 3)
    with pytest.raises(BadInput, match="fewer"):
        segment_steps(256, 0)


def test_every_row_count_has_a_configuration():
    for m in (1, 16, 17, 33, 129, 513, 8192, 100000):
        assert configuration(m, 4096, 4096).block_m >= 16


@pytest.mark.parametrize(
    "x,w,b",
    [
        (torch.zeros(3, 4), torch.zeros(5, 6), None),
        (torch.zeros(3), torch.zeros(5, 3), None),
        (torch.zeros(3, 4), torch.zeros(5, 4).half(), None),
        (torch.zeros(3, 4).double(), torch.zeros(5, 4).double(), None),
        (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(4)),
        (torch.zeros(3, 4), torch.zeros(0, 4), None),
    ],
)
def test_misfits_are_refused(x, w, b):
    pytest.importorskip("triton")
    with pytest.raises(BadInput):
        invariant.matmul(x, w, b)


@pytest.mark.parametrize("operation", [rows.softmax, rows.log_softmax, rows.mean, rows.row_sum])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_reductions_keep_rows_apart_and_agree_with_float64(operation, dtype):
    x = torch.randn(40, 301, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = {
        "softmax": lambda t: t.softmax(-1),
        "log_softmax": lambda t: t.log_softmax(-1),
        "mean": lambda t: t.mean(-1),
        "row_sum": lambda t: t.sum(-1),
    }[operation.__name__](x.double())
    size = exact.abs() if "softmax" in operation.__name__ else x.double().abs().sum(-1)
    assert ((operation(x).double() - exact).abs() <= 4 * torch.finfo(dtype).eps * (1 + size)).all()
    if operation is rows.mean:
        assert ((operation(x).double() - exact).abs() <= torch.finfo(dtype).eps).all()
    assert differing_rows(lambda part: operation(part).view(len(part), -1), x, (1, 2, 16, 17, 65)) == (0, 101)
    assert operation(x[:0]).shape[0] == 0
    assert operation(x.view(5, 8, 301)).shape[:2] == (5, 8)
    with pytest.raises(BadInput):
        operation(x.double())


def _routed(tokens=60, top_k=3, experts=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 64, generator=generator)
    w = torch.randn(experts, 40, 64, generator=generator)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    return x, w, chosen, torch.rand(tokens, top_k, generator=generator)


def test_experts_give_a_token_the_same_bits_whoever_shares_them():
    x, w, chosen, gates = _routed()

    def run(index):
        pick = index[:, 0].long()
        found = moe.grouped_matmul(x[pick], w, chosen[pick])
        return torch.cat([found.flatten(1), moe.expert_sum(found, gates[pick], chosen[pick])], 1)

    assert differing_rows(run, torch.arange(60.0).unsqueeze(1), (1, 2, 16, 17, 65)) == (0, 101)
    exact = grouped_float64(x, w, chosen)
    assert (moe.grouped_matmul(x, w, chosen) - exact).abs().max() < 1e-4
    assert (moe.expert_sum(exact.float(), gates, chosen) - (exact * gates.unsqueeze(2)).sum(1)).abs().max() < 1e-4


def test_the_order_of_a_tokens_experts_is_theirs_and_not_the_routers():
    x, w, chosen, gates = _routed(seed=1)
    y = moe.grouped_matmul(x, w, chosen)
    turned = moe.expert_sum(y.flip(1), gates.flip(1), chosen.flip(1))
    assert torch.equal(turned, moe.expert_sum(y, gates, chosen))
    given = sum(y[:, j].float() * gates[:, j, None] for j in range(3))
    assert not torch.equal(given, turned)


@pytest.mark.parametrize("size", [16, 32])
def test_blocks_hold_every_pair_once_with_its_expert(size):
    for tokens, top_k, experts in ((1, 1, 8), (70, 3, 5), (200, 2, 2), (3, 2, 50)):
        chosen = torch.randint(0, experts, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
        order, expert, start, stop = moe._blocks(chosen, experts, size)
        held = []
        for e, a, b in zip(expert.tolist(), start.tolist(), stop.tolist()):
            assert b - a <= size
            assert all(chosen.flatten()[pair] == e for pair in order[a:b].tolist())
            held += order[a:b].tolist()
        assert sorted(held) == list(range(tokens * top_k))


def test_misrouted_experts_are_refused():
    x, w, chosen, _ = _routed()
    for wrong in (chosen + 1, chosen - 1, chosen.float(), chosen[:3]):
        with pytest.raises(BadInput, match="expert"):
            moe.grouped_matmul(x, w, wrong)


def _model(dtype):
    torch.manual_seed(0)
    parts = torch.nn
    return parts.Sequential(
        parts.Linear(576, 576),
        parts.SiLU(),
        parts.Linear(576, 192, bias=False),
        parts.RMSNorm(192),
        parts.Linear(192, 50),
        parts.LogSoftmax(-1),
    ).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_under_the_invariant_kernels_keeps_a_row_in_every_batch(dtype):
    model, x = _model(dtype), torch.randn(40, 576, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        default = model(x)
        used = InvariantKernels()

        def run(batch):
            with used:
                return model(batch)

        assert differing_rows(run, x, (1, 2, 3, 16, 33)) == (0, 55)
        assert (run(x).float() - default.float()).abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-4)
    report = used.report().set_index("operation").treatment
    assert (
        report["aten.addmm.default"] == report["aten.mm.default"] == report["aten._log_softmax.default"] == "replaced"
    )
    assert report["aten.silu.default"] == "replaced" and report["aten.mul.Tensor"] == "cannot mix rows"
    assert used.left_alone == [] and "replaced" in used.claim()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_norm_that_cuda_dispatches(dtype):
    x, w = (torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype) for shape in ((40, 96), (96,)))
    exact = torch.nn.functional.rms_norm(x.double(), (96,), w.double(), 1e-5)
    run = lambda part: use._rms_norm(part, [96], w, 1e-5)[0]  # noqa: E731
    assert ((run(x).double() - exact).abs() <= 2 * torch.finfo(dtype).eps * (1 + exact.abs())).all()
    assert differing_rows(run, x, (1, 2, 17, 33)) == (0, 53)
    assert use._rms_norm(x, [8, 12], w, 1e-5) is None and use._rms_norm(x.double(), [96], None, 1e-5) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_norms_own_epsilon_is_torchs(dtype):
    x = (0.05 * torch.randn(8, 96, generator=torch.Generator().manual_seed(4))).to(dtype)
    found = use._rms_norm(x, [96], None, None)[0].double()
    theirs = torch.nn.functional.rms_norm(x, (96,)).double()
    assert ((found - theirs).abs() <= 2 * torch.finfo(dtype).eps * (1 + theirs.abs())).all()
    wide = torch.nn.functional.rms_norm(x.double(), (96,), eps=torch.finfo(torch.bfloat16).eps)
    assert (theirs - wide).abs().max() > 0.5  # an epsilon of bfloat16's would be seen


def test_by_default_the_same_model_does_not_keep_it():
    model, x = _model(torch.float32), torch.randn(40, 576, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert differing_rows(model, x, (1, 2, 3, 16, 33))[0] > 0


def test_what_is_not_covered_is_named_and_no_claim_is_made():
    x = torch.randn(2, 5, 64)
    with torch.no_grad(), InvariantKernels() as used:
        x.cumsum(1), x.mean(1), torch.bmm(x, x.transpose(1, 2)), torch.mm(x[0].double(), x[1].double().t())
        wide = x.double()
        torch.bmm(wide, wide.transpose(1, 2))
        torch.nn.functional.scaled_dot_product_attention(*[wide[:, None]] * 3)
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    named = {"aten.cumsum.default", "aten.mean.dim", "aten.bmm.default", "aten.mm.default", attention}
    assert named == set(used.left_alone)
    with pytest.raises(BadInput, match="cumsum"):
        used.claim()
    with pytest.raises(BadInput, match="no operation ran"):
        InvariantKernels().claim()


def _heads(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "causal", "mask", "bias", "grouped"])
def test_attention_is_torchs_and_keeps_a_request_in_every_batch(dtype, kind):
    q, k, v = (_heads(9, heads, 17, 16, dtype=dtype, seed=i) for i, heads in enumerate((4, 2, 2) if kind == "grouped" else (4,) * 3))
    mask = {"mask": _heads(9, 1, 17, 17, seed=4) > -1, "bias": _heads(9, 4, 17, 17, dtype=dtype, seed=4)}.get(kind)
    if kind == "mask":
        mask |= torch.eye(17, dtype=torch.bool)
    options = dict(is_causal=kind == "causal", enable_gqa=kind == "grouped")
    call = torch.nn.functional.scaled_dot_product_attention

    def run(rows):
        with torch.no_grad(), InvariantKernels() as used:
            y = call(q[rows], k[rows], v[rows], attn_mask=None if mask is None else mask[rows], **options)
        assert used.left_alone == []
        return y

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(3, 5), slice(8, 9), [6, 2, 4]):
        assert torch.equal(bits_of(run(rows)), bits_of(whole[rows]))
    wide = None if mask is None else mask if mask.dtype == torch.bool else mask.double()
    exact = call(q.double(), k.double(), v.double(), attn_mask=wide, **options)
    theirs = call(q, k, v, attn_mask=mask, **options)
    assert (whole.double() - exact).norm() <= 1.05 * (theirs.double() - exact).norm() + 1e-7


def test_a_row_of_attention_that_sees_nothing_gives_nothing():
    q, k, v = (_heads(1, 1, 3, 16, seed=i) for i in range(3))
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    out, lse = use.attention(q, k, v, mask)
    assert not out[0, 0, 1].any() and lse[0, 0, 1] == -torch.inf and out[0, 0, [0, 2]].all()
    scores = (q[0, 0].double() @ k[0, 0].double().t() / 4).masked_fill(~mask, -torch.inf)
    assert torch.allclose(lse[0, 0, [0, 2]].double(), scores[[0, 2]].logsumexp(1), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 13, 63, 64, 65, 129])
def test_padding_on_the_right_leaves_no_trace_in_attention(length, dtype):
    q, k, v = (_heads(1, heads, length + 100, 16, dtype=dtype, seed=i) for i, heads in enumerate((4, 2, 2)))
    with torch.no_grad():
        alone = use.attention(*(t[:, :, :length] for t in (q, k, v)), causal=True)
        for pad in (1, 7, 51, 64, 100):
            tokens = length + pad
            mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            mask[:, length:] = False
            found = use.attention(*(t[:, :, :tokens] for t in (q, k, v)), mask)
            assert all(torch.equal(bits_of(x[:, :, :length]), bits_of(y)) for x, y in zip(found, alone))
            bias = torch.zeros(tokens, tokens).masked_fill(~mask, -torch.inf)
            biased = use.attention(*(t[:, :, :tokens] for t in (q, k, v)), bias)
            assert all(torch.equal(bits_of(x[:, :, :length]), bits_of(y)) for x, y in zip(biased, alone))


def test_attention_over_several_blocks_is_as_accurate_as_torchs():
    q, k, v = (_heads(2, 3, 200, 32, seed=i) for i in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    ours, lse = use.attention(q, k, v, causal=True)
    assert (ours.double() - exact).norm() <= 1.05 * (theirs.double() - exact).norm()
    hidden = torch.ones(200, 200, dtype=torch.bool).triu(1)
    scores = (q.double() @ k.double().transpose(2, 3) * 32**-0.5).masked_fill(hidden, -torch.inf)
    assert (lse.double() - scores.logsumexp(-1)).abs().max() < 2e-6


@pytest.mark.parametrize("shapes", [((4, 9, 16),) * 3, ((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 8))])
def test_attention_that_torch_decomposes_is_covered(shapes):
    q, k, v = (_heads(*shape, seed=i) for i, shape in enumerate(shapes))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[4] = False
    with torch.no_grad(), InvariantKernels() as used:
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        part = torch.nn.functional.scaled_dot_product_attention(q[:1], k[:1], v[:1], attn_mask=mask)
    assert ("aten._safe_softmax.default", "replaced") in used.calls and used.left_alone == []
    assert torch.equal(bits_of(found[:1]), bits_of(part)) and not found[..., 4, :].any()
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask)
    assert (found.double() - exact).abs().max() < 2e-6


def test_a_product_of_no_rows_does_not_stand_in_the_way_of_a_claim():
    with InvariantKernels() as used:
        assert torch.mm(torch.zeros(0, 4), torch.zeros(4, 5)).shape == (0, 5)
        assert torch.bmm(torch.zeros(0, 3, 4), torch.zeros(0, 4, 5)).shape == (0, 3, 5)
    assert used.left_alone == [] and used.claim()


def test_sums_of_whole_numbers_are_let_through_and_of_floats_named():
    counts = torch.ones(3, 4, dtype=torch.int64)
    with InvariantKernels() as used:
        counts.sum(), counts.cumsum(0), counts.bool().sum(0)
    assert used.left_alone == []
    for sums in (
        lambda: counts.sum(dtype=torch.float32),
        lambda: counts.double().sum(),
        lambda: counts.float().cumsum(0),
        lambda: counts.float().sum(0),
        lambda: counts.cfloat().sum(),
    ):
        with InvariantKernels() as used:
            sums()
        assert len(used.left_alone) == 1


def test_products_of_batched_matrices_do_not_know_how_many_there_are():
    a, b = _heads(11, 5, 24, seed=1), _heads(11, 24, 7, seed=2)
    with InvariantKernels() as used:
        whole = torch.bmm(a, b)
        parts = torch.cat([torch.bmm(a[i : i + 1], b[i : i + 1]) for i in range(11)])
    assert used.left_alone == [] and torch.equal(bits_of(whole), bits_of(parts))
    assert (whole.double() - a.double() @ b.double()).abs().max() < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_transformers_model_is_covered_whole(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention)
    model, tokens = LlamaForCausalLM(config).eval(), torch.randint(0, 97, (7, 13))
    used = InvariantKernels()
    with torch.no_grad():
        default = model(tokens).logits

        def run(part):
            with used:
                return model(part).logits

        whole = run(tokens)
        for rows in (slice(0, 1), slice(2, 5), slice(6, 7)):
            assert torch.equal(bits_of(run(tokens[rows])), bits_of(whole[rows]))
    assert (whole - default).abs().max() < 1e-4 and "replaced" in used.claim()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_real_model_through_transformers_is_covered_whole(real_folder, attention):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_folder, dtype=torch.float32, attn_implementation=attention).eval()
    tokens = torch.randint(1000, 40000, (3, 9), generator=torch.Generator().manual_seed(5))
    used = InvariantKernels()

    def run(part, **more):
        with torch.no_grad(), used:
            return model(part, **more).logits

    whole = run(tokens)
    assert torch.equal(bits_of(run(tokens[1:2])), bits_of(whole[1:2]))
    with torch.no_grad():
        assert (whole - model(tokens).logits).abs().max() < 1e-3
    if attention == "sdpa":  # ragged, padded on the right by neighbours that reach into a second block of keys
        longer = torch.cat([tokens, torch.zeros(3, 60, dtype=torch.int64)], 1)
        seen = torch.ones_like(longer)
        seen[0, 9:] = 0
        ragged = run(longer[:2], attention_mask=seen[:2])
        assert torch.equal(bits_of(ragged[0, :9]), bits_of(whole[0]))
    assert "replaced" in used.claim()
    with used:
        whole.cumsum(0)  # mixes rows, and nothing covers it
    with pytest.raises(BadInput, match="cumsum"):
        used.claim()


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def test_the_registered_operation_is_the_function():
    x, w, b = torch.randn(3, 4, 32), torch.randn(8, 32), torch.randn(8)
    assert torch.equal(torch.ops.batch_variance.linear(x, w, b), use.linear(x, w, b))
    assert torch.compile(lambda t: torch.ops.batch_variance.linear(t, w, b), backend="eager", fullgraph=True)(
        x
    ).shape == (3, 4, 8)


def test_alternating_times_are_medians_over_rounds(monkeypatch):
    times = iter([1.0, 10.0, 3.0, 30.0, 2.0, 20.0])  # one after the other, as they are asked for
    monkeypatch.setattr(timing, "graph_microseconds", lambda calls: next(times))
    assert timing.alternating_microseconds([], []) == (2.0, 20.0)

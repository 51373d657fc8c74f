"""The FlashMLA adapter without FlashMLA: cache layouts, refusals, and the schedules it would pass in, run by a
stand-in kernel."""

import json

import pytest
import torch

from batch_variance.common import BadInput
from batch_variance.hooks import flashmla
from batch_variance.hooks.flashmla import (
    FlashMLAInputs,
    batch_invariant_decode,
    batch_invariant_plan,
    load,
    random_flashmla_inputs,
    read_cache,
    run_plan,
    write_cache,
)
from batch_variance.kernels.decode import exact
from batch_variance.kernels.decode.reference import fold_flashmla, finish, partials
from batch_variance.schedules import Part, flashmla_schedule, plan_from_schedule
from batch_variance.schedules.flashmla import FlashMLASchedule


def stand_in(
    q,
    cache,
    indices,
    topk_length,
    sink,
    metadata,
    num_splits,
    extra_cache,
    extra_indices,
    extra_topk_length,
    d_v,
    scale,
    out,
):
    """What FlashMLA computes, in plain torch: follows the metadata it is given, and only that."""
    inputs = FlashMLAInputs(q, cache, indices, topk_length, sink, extra_cache, extra_indices, extra_topk_length, scale)
    lengths = inputs.lengths()
    if metadata is None:
        schedule = flashmla_schedule(lengths, inputs.parts(132))
    else:
        assert metadata.shape[1] == 8, "the kernel reads 32 bytes a part"
        parts = [Part(*row[:7]) for row in metadata.tolist()]
        splits = num_splits.tolist()
        assert len(parts) == inputs.parts(132) and splits[-1] <= len(lengths) + len(parts)
        schedule = FlashMLASchedule(
            tuple(lengths), 64, 5, 0, splits, [p for p in parts if p.begin_req_idx < len(lengths)]
        )
    plain = inputs.as_decode_inputs()
    got, lse = finish(plain, fold_flashmla(partials(plain, plan_from_schedule(schedule))))
    result = got[:, None]
    if out is not None:
        result = out.copy_(result)
    return (
        result,
        lse[:, :, None],
        torch.tensor(schedule.parts, dtype=torch.int32),
        torch.tensor(schedule.num_splits, dtype=torch.int32),
    )


def small(batch, d_qk=512, **options):
    return random_flashmla_inputs(batch, d_qk=d_qk, pages=6, device="cpu", **options)


def same(a, b):
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("d_qk, token_bytes", [(576, 656), (512, 584)])
def test_cache_layouts_round_trip(d_qk, token_bytes):
    latent = torch.randn(3, 64, d_qk, generator=torch.Generator().manual_seed(0)).bfloat16() * 7
    latent[0, 0] = 0
    cache = write_cache(latent)
    assert cache.dtype == torch.uint8 and list(cache.shape) == [3, 64, 1, token_bytes]
    back = read_cache(cache, d_qk)
    assert torch.equal(back[..., -64:], latent[..., -64:]), "the rope part is not quantised"
    gap = (back.float() - latent.float()).abs()
    assert (gap <= latent.float().abs() / 16 + 448 * 2.0**-17 * 2).all(), "e4m3 keeps 4 significant bits"
    assert torch.equal(read_cache(write_cache(back), d_qk), back), "what was read back is representable"


def test_layout_bytes_lie_where_flashmla_reads_them():
    latent = torch.zeros(1, 64, 576).bfloat16()
    latent[0, 5, 3], latent[0, 5, 575] = 448.0, 1.0
    raw = write_cache(latent).flatten()[5 * 656 : 6 * 656]
    assert raw[3] == 0x7E and raw[512:516].view(torch.float32) == 1.0 and raw[-2:].view(torch.bfloat16) == 1.0
    latent = torch.zeros(1, 64, 512).bfloat16()
    latent[0, 5, 3], latent[0, 5, 511] = 448.0, 1.0
    raw = write_cache(latent).flatten()
    assert (
        raw[5 * 576 + 3] == 0x7E
        and raw[64 * 576 + 5 * 8] == 127
        and raw[6 * 576 - 2 : 6 * 576].view(torch.bfloat16) == 1.0
    )


def test_rows_do_not_depend_on_batchmates_and_by_default_they_do():
    inputs = small(7, topk=512, ragged=True, sink=True, invalid=0.05, extra_topk=128)
    truth = exact(inputs.as_decode_inputs())[0]
    default = stand_in(*_arguments(inputs))
    assert ((default[0][:, 0].double() - truth).norm() / truth.norm()) < 6e-3
    for rule in ("fixed-count-4", "by-length-2-6"):
        out, lse = run_plan(stand_in, inputs, batch_invariant_plan(inputs, rule, num_sms=132))
        assert ((out[:, 0].double() - truth).norm() / truth.norm()) < 6e-3
        for row in range(7):
            one = inputs.rows(row, row + 1)
            alone, alone_lse = run_plan(stand_in, one, batch_invariant_plan(one, rule, num_sms=132))
            assert same(alone, out[row : row + 1]) and torch.equal(alone_lse, lse[row : row + 1])


def _arguments(inputs):
    return (
        inputs.q,
        inputs.cache,
        inputs.indices,
        inputs.topk_length,
        inputs.sink,
        None,
        None,
        inputs.extra_cache,
        inputs.extra_indices,
        inputs.extra_topk_length,
        512,
        inputs.q.shape[3] ** -0.5,
        None,
    )


def test_a_batch_too_large_for_one_call_is_served_in_several():
    inputs = small(12, topk=512)
    plan = batch_invariant_plan(inputs, "fixed-count-8", num_sms=40)
    assert len(plan.calls) == 3 and [c[:2] for c in plan.calls] == [(0, 4), (4, 8), (8, 12)]
    seen = []

    def counting(q, *rest):
        seen.append(q.shape[0])
        return rest[-1].fill_(len(seen)), torch.zeros(q.shape[0], q.shape[2], 1), rest[4], rest[5]

    out, _ = run_plan(counting, inputs, plan)
    assert seen == [4, 4, 4] and out[:, 0, 0, 0].tolist() == [1] * 4 + [2] * 4 + [3] * 4


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(topk_length=torch.ones(2, dtype=torch.int32)), "no topk_length"),
        (dict(q=torch.zeros(2, 1, 32, 576).bfloat16()), "32 heads"),
        (dict(q=torch.zeros(2, 1, 64, 576)), "bfloat16"),
        (dict(q=torch.zeros(2, 1, 64, 128).bfloat16()), "d_qk is 128"),
        (dict(q=torch.zeros(0, 1, 64, 576).bfloat16()), "shape \\[0"),
        (dict(indices=torch.zeros(2, 1, 100, dtype=torch.int32)), "multiple of 64"),
        (dict(indices=torch.zeros(3, 1, 64, dtype=torch.int32)), "shape \\[3"),
        (dict(indices=torch.zeros(2, 1, 64)), "int32"),
        (dict(cache=torch.zeros(2, 64, 1, 584, dtype=torch.uint8)), "656"),
        (dict(extra_topk_length=torch.ones(2, dtype=torch.int32)), "second cache"),
        (dict(extra_cache=torch.zeros(1, 64, 1, 656, dtype=torch.uint8)), "both"),
        (dict(sink=torch.zeros(3)), "sink"),
    ],
)
def test_shapes_that_cannot_be_served(change, message):
    inputs = small(2, d_qk=576, topk=64)
    given = {"q": inputs.q, "cache": inputs.cache, "indices": inputs.indices, **change}
    with pytest.raises(BadInput, match=message):
        FlashMLAInputs(**given)


def test_refusals():
    inputs = small(3, topk=2048)
    with pytest.raises(BadInput, match="free-4 cannot"):
        batch_invariant_plan(inputs, "free-4", 132)
    with pytest.raises(BadInput, match="32 pieces, more than the 20 SM parts"):
        batch_invariant_plan(inputs, "fixed-chunk-1", 20)
    with pytest.raises(BadInput, match="CPU"):
        batch_invariant_plan(inputs, "never-split")
    with pytest.raises(BadInput, match="9.0"):
        batch_invariant_decode(stand_in, inputs)
    with pytest.raises(BadInput, match="plan is for 3 rows"):
        run_plan(stand_in, inputs.rows(0, 2), batch_invariant_plan(inputs, "never-split", 132))


def test_loading(tmp_path, monkeypatch):
    monkeypatch.delenv("BATCH_VARIANCE_FLASHMLA", raising=False)
    monkeypatch.setattr(flashmla.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="not found"):
        load()
    with pytest.raises(BadInput, match="does not exist"):
        load(tmp_path)
    (tmp_path / flashmla.EXTENSION).write_bytes(b"no library")
    with pytest.raises(BadInput, match="could not be loaded"):
        load(tmp_path)


def test_plan_is_plain_integers():
    plan = batch_invariant_plan(small(2, topk=128), "never-split", 132)
    first, end, metadata, num_splits = plan.calls[0]
    assert (first, end, num_splits.tolist()) == (0, 2, [0, 1, 2])
    assert metadata.dtype == torch.int32 and list(metadata.shape) == [132, 8]
    assert json.dumps(metadata[0].tolist()) == "[0, 0, 0, 2, 0, 0, 0, 0]"

"""Of a paged pool, controls made later get the pages that the table names, and find with them what they would with
all.
"""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_variance.common import BadInput
from batch_variance.hooks import CallSiteProbe, snapshots
from batch_variance.hooks.adapters import SITES, engine_sites
from batch_variance.hooks.calls import Binder, signature_of
from batch_variance.hooks.layouts import misplacement
from batch_variance.hooks.paging import with_own_pages
from batch_variance.hooks.probe import HABIT
from batch_variance.hooks.snapshots import Snapshot, bits
from batch_variance.kernels.sets import NativeKernels

PAGES = {"k": "table", "v": "table"}
ROOMY = 2**32


def attention(q, k, v, table, lengths):
    """q [B, D], pools [P, 4, D], table [B, W], lengths [B] -> [B, D]; entries beyond a row's length are never read."""
    rows = []
    for i, n in enumerate(lengths.tolist()):
        named = table[i, : -(-n // 4)].long()
        keys, values = k[named].flatten(0, 1)[:n].float(), v[named].flatten(0, 1)[:n].float()
        rows.append(torch.softmax(keys @ q[i], 0) @ values if n else torch.zeros_like(q[i]))
    return torch.stack(rows)


def call_of(**arguments):
    return Binder(signature_of(attention)).bind((), {"q": None, "lengths": None, **arguments})


def pools(count, dtype=torch.float32, interleaved=False, skip=0):
    """k and v of random bits, every NaN and infinity among them, apart or cut from one tensor."""
    width = dtype.itemsize
    raw = torch.randint(0, 256, (skip + count * 2 * 4 * 8 * width,), dtype=torch.uint8)[skip:]
    both = raw[: raw.numel() // width * width].view(dtype) if not skip else raw.view(dtype)
    both = both.view(count, 2, 4, 8) if interleaved else both.view(2, count, 4, 8)
    return both.unbind(1 if interleaved else 0)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_pages_named_are_there_under_their_new_numbers(data):
    count = data.draw(st.sampled_from([1, 2, 15, 16, 17, 31, 33, 64, 65, 129]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float64]))
    k, v = pools(count, dtype, data.draw(st.booleans()), data.draw(st.sampled_from([0, 8, 72])))
    entry = st.one_of(st.integers(0, count - 1), st.sampled_from([-1, count, 2**31 - 1, -(2**31)]))
    rows, width = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 5))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    skip = data.draw(st.integers(0, 3))
    entries = data.draw(st.lists(entry, min_size=skip + rows * width, max_size=skip + rows * width))
    whole = torch.tensor(entries, dtype=kind)[skip:]
    table = whole.view(width, rows).T if data.draw(st.booleans()) else whole.view(rows, width)
    call, own = with_own_pages(call_of(k=k, v=v, table=table), PAGES, ROOMY)
    valid = (table >= 0) & (table < count)
    new = call.get("table")
    assert torch.equal(new[~valid], table[~valid])
    assert new.stride() == table.stride() and misplacement(new) == misplacement(table) and new.dtype == kind
    for name, pool in (("k", k), ("v", v)):
        kept = call.get(name)
        assert torch.equal(bits(kept)[new[valid].long()], bits(pool)[table[valid].long()])
        assert kept.stride() == pool.stride() and kept.dtype == dtype and misplacement(kept) == misplacement(pool)
        assert kept.shape[0] <= count and (not own or kept.shape[0] < count)
    assert {id(t) for t in own} == ({id(new), id(call.get("k")), id(call.get("v"))} if own else set())
    memories = {t.untyped_storage().data_ptr() for t in (k, v, table)}
    assert all(t.untyped_storage().data_ptr() not in memories for t in own)


def test_each_tables_pools_go_by_it_alone():
    def kernel(near, near_table, far, far_table): ...

    arguments = dict(near=torch.randn(20, 3), near_table=torch.tensor([[4, 7]]), far=torch.randn(30, 5))
    arguments["far_table"] = torch.tensor([29, 29, 0])
    call = Binder(signature_of(kernel)).bind((), arguments)
    new, own = with_own_pages(call, {"near": "near_table", "far": "far_table"}, ROOMY)
    assert len(own) == 4 and new.get("near").shape[0] == 2 and new.get("far").shape[0] == 2
    assert torch.equal(new.get("far")[new.get("far_table")], arguments["far"][arguments["far_table"]])
    assert torch.equal(new.get("near")[new.get("near_table")], arguments["near"][arguments["near_table"]])
    assert call.get("near") is arguments["near"]  # the engine's call is as it was

    only_one = with_own_pages(call, {"near": "near_table", "far": "far_table"}, 2 * 12 + 2 * 20 - 1)[0]
    assert only_one.get("near").shape[0] == 2 and only_one.get("far") is arguments["far"]


table_of = lambda *rows: torch.tensor(rows, dtype=torch.int32)  # noqa: E731


@pytest.mark.parametrize(
    "table, other_count, limit",
    [
        (None, 40, ROOMY),
        ([[1, 2]], 40, ROOMY),
        (table_of([1, 2]).float(), 40, ROOMY),
        (table_of([1, 2]).expand(3, 2), 40, ROOMY),
        (torch.zeros(0, 2, dtype=torch.int32), 40, ROOMY),
        (torch.arange(40, dtype=torch.int32)[None], 40, ROOMY),
        (table_of([1, 2]), 41, ROOMY),
        (table_of([1, 2]), 40, 2 * 2 * 128 - 1),
    ],
    ids=["none", "list", "float", "expanded", "empty", "all pages", "pools differ", "no room"],
)
def test_what_cannot_be_had_by_the_page_is_left_as_it_is(table, other_count, limit):
    call = call_of(k=torch.randn(40, 4, 8), v=torch.randn(other_count, 4, 8), table=table)
    new, own = with_own_pages(call, PAGES, limit)
    assert own == [] and all(new.get(name) is call.get(name) for name in ("k", "v", "table"))


def test_the_limit_is_what_the_pages_take():
    call = call_of(k=torch.randn(40, 4, 8), v=torch.randn(40, 4, 8), table=table_of([0, 39, -1, 39]))
    assert len(with_own_pages(call, PAGES, 2 * 2 * 128)[1]) == 3
    assert with_own_pages(call, PAGES, 2 * 2 * 128 - 1)[1] == []


def serve(kernel, steps, count=60, probe_at=None, **options):
    """Decode steps of a toy engine that writes its pools and its table between calls; returns the probe."""
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn(count, 4, 8, generator=generator) for _ in "kv")
    table = torch.randperm(count, generator=generator)[:15].view(3, 5).int()
    lengths = torch.tensor([1, 7, 18])
    engine = types.SimpleNamespace(kernel=kernel)
    options = {"controls": "later", "lengths": "lengths", **options}
    with CallSiteProbe((engine, "kernel"), {"q": 0, "table": 0, "lengths": 0}, **options) as probe:
        for _ in range(steps):
            engine.kernel(torch.randn(3, 8, generator=generator), k, v, table, lengths)
            k.fill_(float("nan")), v.normal_(generator=generator)
            k.normal_(generator=generator)
            table.copy_(table.roll(1, 0))
            probe.run_controls()
    return probe


def leaky(q, k, v, table, lengths):
    """The fault: a row's result depends on the longest batchmate."""
    return attention(q, k, v, table, lengths) + lengths.max() * 1e-3


AXES = ("rerun", "contents", "composition", "solo", "position", "padding")


@pytest.mark.parametrize("kernel, faulty", [(attention, False), (leaky, True)])
def test_controls_find_with_the_named_pages_what_they_find_with_the_pool(kernel, faulty):
    by_page = serve(kernel, 2 * HABIT + 1, pages=PAGES, axes=AXES)
    whole = serve(kernel, 2 * HABIT + 1, whole=("k", "v"), axes=AXES)
    assert by_page.sampled == whole.sampled == 2 * HABIT + 1 and not by_page.refusals
    assert by_page.records().equals(whole.records())
    assert by_page.verdict()["rerun"] == "invariant"
    assert by_page.verdict()["composition"] == ("variant" if faulty else "invariant")


def test_a_pool_beyond_max_bytes_is_sampled_by_its_pages():
    room = 60 * 4 * 8 * 4  # one pool's bytes; the pages of a call are a quarter of both
    refused = serve(attention, 2, whole=("k", "v"), max_bytes=room)
    assert refused.sampled == 0 and "max_bytes is 7,680" in " ".join(refused.refusals)
    found = serve(attention, 1, pages=PAGES, max_bytes=room)
    assert found.sampled == 1 and found.verdict()["solo"] == "invariant"


def test_the_pages_count_in_what_is_kept_and_are_copied_once(monkeypatch):
    sizes, copied, placed = [], [], snapshots._placed
    monkeypatch.setattr(snapshots, "_placed", lambda t, place: copied.append(tuple(t.shape)) or placed(t, place))

    def spy(q, k, v, table, lengths):
        sizes.append(k.shape[0])
        return attention(q, k, v, table, lengths)

    engine = types.SimpleNamespace(kernel=spy)
    k, v, table = torch.randn(60, 4, 8), torch.randn(60, 4, 8), torch.arange(15).view(3, 5)
    options = dict(pages=PAGES, axes=("rerun",), controls="later")
    with CallSiteProbe((engine, "kernel"), {"q": 0, "table": 0, "lengths": 0}, **options) as probe:
        engine.kernel(torch.randn(3, 8), k, v, table, torch.tensor([1, 7, 18]))
        kept = probe._backlog.nbytes
        assert copied == [(3, 8), (3,)]  # q and lengths; the pools' pages and the table were made for the probe
    assert sizes[0] == 60 and set(sizes[1:]) == {15}
    # 15 pages of 128 bytes of each pool, the table once; q and lengths before and after the call, and the result.
    assert kept == 2 * 15 * 128 + 15 * 8 + 2 * (96 + 24) + 96


@pytest.mark.parametrize("skip", [0, 2])
def test_the_pages_are_not_copied_again_before_a_replay_writes(skip):
    k, v = (torch.randn(skip + 40 * 32)[skip:].view(40, 4, 8) for _ in "kv")
    call, own = with_own_pages(call_of(k=k, v=v, table=table_of([3, 5])), PAGES, ROOMY)
    snapshot = Snapshot(call, only_read=("k", "v", "table"), own=own)
    for name in ("k", "v", "table"):
        assert snapshot.before.get(name) is snapshot.fresh_call().get(name) is call.get(name)
        apart = snapshot.call_apart()[0].get(name)
        assert apart.untyped_storage().data_ptr() != call.get(name).untyped_storage().data_ptr()


def test_a_pool_that_the_table_numbers_and_nobody_named_shows_in_the_rerun():
    probe = serve(attention, 3, pages={"k": "table"}, whole=("v",))
    assert probe.verdict()["rerun"] == "variant"
    assert {v for axis, v in probe.verdict().items() if axis != "rerun"} == {"inconclusive"}


def test_a_call_that_writes_the_pages_after_all_is_refused():
    def writing(q, k, v, table, lengths):
        result = attention(q, k, v, table, lengths)
        k[table[0, 0].long()] += 1
        return result

    probe = serve(writing, HABIT + 2, pages=PAGES)
    assert "had only read" in " ".join(probe.refusals)


def test_made_now_a_probe_passes_the_pools_as_they_are():
    seen = []

    def spy(q, k, v, table, lengths):
        seen.append((k.data_ptr(), k.shape[0]))
        return attention(q, k, v, table, lengths)

    probe = serve(spy, 1, pages=PAGES, controls="now")
    assert len(set(seen)) == 1 and len(seen) > 2 and probe.verdict()["solo"] == "invariant"


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(pages={"pool": "table"}), "pages names 'pool'"),
        (dict(pages={"k": "tables"}), "pages names 'tables'"),
        (dict(pages=PAGES, constant=("v",)), "v is named in constant and in pages"),
    ],
)
def test_bad_names_are_refused_in_a_sentence(options, said):
    with pytest.raises(BadInput, match=said):
        CallSiteProbe((types.SimpleNamespace(kernel=attention), "kernel"), {"q": 0}, **options)


def test_the_engines_attention_is_sampled_by_its_pages():
    assert engine_sites(NativeKernels())["attend"].pages == {"k_pages": "tables", "v_pages": "tables"}
    assert SITES["vllm.flash-attention"].options["pages"] == {"k": "block_table", "v": "block_table"}
    # A sparse call's indices do not go by the block table.
    assert "pages" not in SITES["vllm.flashmla"].options and "pages" not in SITES["flashmla.decode"].options

"""Prefill attention on a GPU, in raw bits: against decode row by row, in chunks, alone, shuffled and beside poison.
Skipped without CUDA."""

import pytest
import torch
from prefill_cases import prefill_case, rows_of, same_bits

from batch_variance.kernels.decode import launch as decode
from batch_variance.kernels.decode import programs_for
from batch_variance.kernels.decode.reference import exact
from batch_variance.kernels.prefill import PrefillInputs, prefill
from batch_variance.schedules import make_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ROWS = [0, 1, 14, 15, 16, 30, 31, 32, 62, 63, 64, 126, 127, 128, 510, 511, 512, 1023, 1024]
WIDE = dict(heads=32, kv_heads=8, d=128, page=64, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("rule", ["free-4", "free-1", "free-most-8", "never-split"])
@pytest.mark.parametrize("heads,kv_heads", [(32, 8), (64, 8), (8, 8), (12, 4)])
def test_each_row_has_the_bits_of_decode_at_its_length(rule, heads, kv_heads):
    inputs = prefill_case([1025, 0, 77, 1], [0, 9, 130, 63], **WIDE | dict(heads=heads, kv_heads=kv_heads))
    out = torch.full(inputs.q.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    found = prefill(inputs, rule, out=out)
    rows = inputs.as_decode()
    for programs in (1, programs_for(rows, 132)):
        both = decode(rows, make_plan(rule, rows.lengths(64), programs))
        assert same_bits(found, both)
    for row in [*ROWS, 1025, 1101, 1102]:
        one = rows.row(row)
        assert same_bits([t[row : row + 1] for t in found], decode(one, make_plan(rule, one.lengths(64), 16)))


@pytest.mark.parametrize("rule", ["free-4", "free-most-8"])
def test_a_long_prompts_rows_have_the_bits_of_decode(rule):
    inputs = prefill_case([2049], [0], **WIDE)
    found = prefill(inputs, rule)
    for row in (1022, 1023, 1024, 1025, 2046, 2047, 2048):
        one = inputs.as_decode().row(row)
        assert same_bits([t[row : row + 1] for t in found], decode(one, make_plan(rule, one.lengths(64), 16)))


@pytest.mark.parametrize("size", [1, 7, 64, 128])
def test_chunks_give_the_whole_prompts_bits(size):
    inputs = prefill_case([300], [20], **WIDE)
    whole = prefill(inputs)
    for first in range(0, 300, size):
        last = min(first + size, 300)
        assert same_bits([t[first:last] for t in whole], prefill(rows_of(inputs, 0, first, last)))


def test_alone_and_shuffled():
    counts, cached = [129, 33, 64, 1, 500], [0, 31, 1, 256, 0]
    inputs = prefill_case(counts, cached, **WIDE)
    whole = prefill(inputs)
    order = [3, 0, 4, 2, 1]
    spans = [slice(inputs.starts[i], inputs.starts[i + 1]) for i in range(5)]
    starts = [0]
    for i in order:
        starts.append(starts[-1] + counts[i])
    shuffled = PrefillInputs(
        torch.cat([inputs.q[spans[i]] for i in order]), tuple(starts), tuple(cached[i] for i in order),
        inputs.keys, inputs.values, inputs.block_table[order].contiguous(),
    )  # fmt: skip
    found = prefill(shuffled)
    for place, i in enumerate(order):
        mine = [t[starts[place] : starts[place + 1]] for t in found]
        assert same_bits([t[spans[i]] for t in whole], mine)
        assert same_bits(prefill(rows_of(inputs, i, 0, counts[i])), mine)


def test_what_lies_behind_a_row_cannot_reach_it():
    inputs = prefill_case([200], [0], **WIDE)
    before = prefill(inputs)
    page, place = inputs.block_table[0, 2].item(), 150 - 128
    for pages in (inputs.keys, inputs.values):
        pages[page, place] = torch.inf
    after = prefill(inputs)
    assert same_bits([t[:150] for t in before], [t[:150] for t in after])
    assert not after[0][150:].isfinite().all()


def test_no_less_accurate_than_the_library():
    inputs = prefill_case([1024], [0], **WIDE)
    truth = exact(inputs.as_decode())[0]
    pages = inputs.block_table[0].long()
    k, v = (t[pages].flatten(0, 1)[:1024].transpose(0, 1)[None] for t in (inputs.keys, inputs.values))
    theirs = torch.nn.functional.scaled_dot_product_attention(
        inputs.q.transpose(0, 1)[None], k, v, is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    ours, library = ((x.double() - truth).norm() for x in (prefill(inputs)[0], theirs))
    assert ours <= 1.05 * library

"""Schedules: FlashMLA's recorded ones to the integer, and the properties that any cutting must have."""

import itertools
import json
import time

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st

from batch_variance.common import BadInput, data_path
from batch_variance.schedules import (
    BATCH_WIDE,
    Segment,
    decode_lengths,
    flashmla_calls,
    flashmla_schedule,
    make_plan,
    num_sm_parts,
    one_program_a_row,
    own_length_rule,
    plan_from_schedule,
    spread,
)
from batch_variance.schedules.flashmla_calls import _fill, _parts_needed
from batch_variance.schedules.plan import _stretches
from batch_variance.schedules.command import schedule as command

GOLDEN = json.loads(data_path("golden", "flashmla_schedules_h200.json").read_text())["cases"]
RULES = ("never-split", "root-length", "fixed-count-3", "fixed-chunk-4", "free-4", "free-most-5", "by-length-2-9")
lengths_lists = st.lists(st.integers(0, 5000), min_size=1, max_size=40)


@pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda c: f"{c['d_qk']}-h{c['num_heads']}-k{c['topk']}+{c['extra_topk']}-b{c['batch']}"
)
def test_golden_schedules(case):
    lengths = decode_lengths(
        case["topk"], case["topk_length"], case["extra_topk"], case["extra_topk_length"], batch=case["batch"]
    )
    assert num_sm_parts(case["num_heads"]) == case["num_sm_parts"]
    found = flashmla_schedule(lengths, case["num_sm_parts"])
    assert found.num_splits == case["num_splits"]
    assert [list(part) for part in found.parts] == case["parts"]


def test_golden_file_is_whole():
    assert len(GOLDEN) == 108


def covered(plan):
    """How often each block of each row is done, by walking the programs."""
    seen = [np.zeros(-(-int(n) // plan.block_size), int) for n in plan.lengths]
    for row, begin, end, _ in plan.segments:
        seen[row][begin:end] += 1
    return seen


def check_plan(plan):
    assert all((seen == 1).all() for seen in covered(plan))
    assert plan.program_starts[0] == 0 and plan.program_starts[-1] == len(plan.segments)
    assert (np.diff(plan.program_starts) >= 0).all()
    filled = np.zeros(plan.num_slots, int)
    for row in range(plan.batch):
        segments = plan.segments_of(row)
        assert segments, "every row is written by some program, an empty one too"
        slots = plan.slot_starts[row + 1] - plan.slot_starts[row]
        if slots == 0:
            assert len(segments) == 1 and segments[0].slot == -1
            continue
        expected = plan.slot_starts[row]
        for _, begin, end, slot in segments:
            assert slot == expected, "partials lie in the row's order"
            places = 1 if begin == 0 or not plan.folds else -(-(end - begin) // plan.chunks[row])
            filled[slot : slot + places] += 1
            expected += places
        assert expected == plan.slot_starts[row + 1]
    assert (filled == 1).all()


@settings(max_examples=150, deadline=None)
@given(lengths_lists, st.integers(1, 150), st.sampled_from([16, 64]), st.integers(0, 6))
def test_flashmla_schedule_covers_every_block_once(lengths, parts, block_size, overhead):
    found = flashmla_schedule(lengths, parts, block_size, overhead)
    assert len(found.num_splits) == len(lengths) + 1 and found.num_splits[0] == 0
    assert len(found.parts) == parts
    plan = plan_from_schedule(found)
    check_plan(plan)
    assert list(plan.pieces) == found.splits_per_row
    for row, splits in enumerate(found.splits_per_row):
        assert len(plan.segments_of(row)) == splits
    assert found.num_splits[-1] <= len(lengths) + parts - 1


@settings(max_examples=150, deadline=None)
@given(lengths_lists, st.integers(1, 150), st.sampled_from(RULES), st.sampled_from([16, 64]))
def test_own_length_rules_cover_every_block_once(lengths, programs, rule, block_size):
    plan = make_plan(rule, lengths, programs, block_size)
    check_plan(plan)
    for row, length in enumerate(lengths):
        alone = make_plan(rule, [length], 132, block_size)
        assert plan.bounds_of(row) == alone.bounds_of(0), "a row's pieces depend on its own length only"
        assert plan.pieces[row] == alone.pieces[0]


def test_an_unchanged_row_may_be_cut_differently_by_flashmla():
    assert flashmla_schedule([4096, 64], 8).splits_per_row[0] != flashmla_schedule([4096, 40000], 8).splits_per_row[0]


def test_free_plan_folds_in_place_where_one_program_does_the_row():
    plan = make_plan("free-4", [64 * 40] * 200, 20)
    whole = sum(1 for s in plan.segments if s[3] == -1)
    assert whole >= 180 and plan.num_slots < 200
    assert one_program_a_row(plan).num_slots == 0
    check_plan(one_program_a_row(plan))
    with pytest.raises(BadInput, match="does not fold"):
        one_program_a_row(make_plan("fixed-chunk-4", [100], 2))


def test_programs_are_balanced():
    plan = make_plan("free-4", [64 * n for n in (3, 90, 17, 200, 1, 64)], 16, overhead_blocks=0)
    work = [
        sum(e - b for _, b, e, _ in plan.segments[i:j]) for i, j in zip(plan.program_starts, plan.program_starts[1:])
    ]
    assert max(work) <= 375 / 16 + 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2048), min_size=1, max_size=300), st.sampled_from(RULES), st.sampled_from([66, 132]))
def test_flashmla_calls_obey_the_format(lengths, rule, parts):
    calls = flashmla_calls(rule, lengths, parts)
    assert [c.first_row for c in calls] == [0] + [c.end_row for c in calls[:-1]] and calls[-1].end_row == len(lengths)
    chosen = own_length_rule(rule)
    for call in calls:
        batch = call.end_row - call.first_row
        blocks = [-(-n // 64) for n in lengths[call.first_row : call.end_row]]
        splits = np.diff(call.num_splits)
        assert list(splits) == [chosen.pieces(n) for n in blocks]
        assert len(call.parts) == parts and call.num_splits[-1] <= batch + parts
        found = {row: [] for row in range(batch)}
        for part in call.parts:
            if part.begin_req_idx >= batch:
                continue
            for row in range(part.begin_req_idx, part.end_req_idx + 1):
                first, last = row == part.begin_req_idx, row == part.end_req_idx
                begin = part.begin_block_idx if first else 0
                end = part.end_block_idx if last else blocks[row]
                flagged = part.is_first_req_splitted if first else part.is_last_req_splitted if last else 0
                assert flagged == (splits[row] > 1)
                found[row].append((part.begin_split_idx if first else 0, begin, end))
        for row, pieces in found.items():
            edges = chosen.bounds(blocks[row])
            assert sorted(pieces) == [(i, a, b) for i, (a, b) in enumerate(zip(edges, edges[1:]))]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.sampled_from(RULES), st.integers(0, 80))
def test_counting_parts_agrees_with_filling_them(blocks, rule, more):
    chosen = own_length_rule(rule)
    bounds = [chosen.bounds(n) for n in blocks]
    costs = [[b - a + 5 for a, b in zip(edges, edges[1:])] for edges in bounds]
    quota = max(map(max, costs)) + more
    assert _parts_needed(costs, quota) == len(_fill(bounds, quota, 5))


def test_fewest_calls():
    assert len(flashmla_calls("fixed-count-4", [2048] * 43, 132)) == 1
    assert len(flashmla_calls("fixed-count-4", [2048] * 44, 132)) == 2
    assert len(flashmla_calls("never-split", [2048] * 4096, 132)) == 1


def test_planning_4096_rows_is_fast():
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 8192, 4096)]
    for plan in (lambda: flashmla_schedule(lengths, 132), lambda: make_plan("free-8", lengths, 132)):
        best = min(_seconds(plan) for _ in range(5))
        assert best < 0.1, f"{best * 1e3:.1f} ms"  # 4 to 12 ms when the machine is idle; room for a busy one


def _seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.mark.parametrize(
    "lengths, kwargs, message",
    [
        ([], {}, "empty"),
        ([5, -1], {}, "lengths\\[1\\] is -1"),
        ([1.5], {}, "1.5"),
        ([True], {}, "True"),
        ([5], {"block_size": 0}, "block_size is 0"),
        ([5], {"num_sm_parts": 0}, "num_sm_parts is 0"),
        ([5], {"fixed_overhead_blocks": -1}, "fixed_overhead_blocks is -1"),
        (None, {}, "empty"),
    ],
)
def test_bad_schedules(lengths, kwargs, message):
    with pytest.raises(BadInput, match=message):
        flashmla_schedule(lengths, **kwargs)


@pytest.mark.parametrize(
    "args, message",
    [
        ((512, None), "batch size"),
        ((512, [513]), "513"),
        ((0, [1]), "topk is 0"),
        ((512, [1, 2], 0, [1, 2]), "second cache"),
        ((512, [1, 2], 64, [1]), "agree"),
        ((512, [-1]), "-1"),
    ],
)
def test_bad_decode_lengths(args, message):
    with pytest.raises(BadInput, match=message):
        decode_lengths(*args)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "free",
        "free-0",
        "free-most",
        "free-most-0",
        "by-length-4-4",
        "by-length",
        "fixed-count--2",
        "never-split-2",
        None,
    ],
)
def test_unknown_rules(name):
    with pytest.raises(BadInput, match="rule"):
        own_length_rule(name)


@given(st.integers(0, 2**20), st.integers(1, 64))
def test_the_least_power_of_two_that_leaves_so_many_pieces(blocks, most):
    rule = own_length_rule(f"free-most-{most}")
    chunk = int(rule.chunk(blocks))
    assert chunk & (chunk - 1) == 0 and rule.pieces(blocks) <= most
    assert chunk == 1 or -(-blocks // (chunk // 2)) > most


def test_rows_of_one_plan_have_pieces_of_their_own_length():
    plan = make_plan("free-most-8", [64 * 16, 64 * 128, 1], 9)
    assert plan.chunks.tolist() == [2, 16, 1] and plan.pieces.tolist() == [8, 8, 1]
    assert make_plan("never-split", [5, 6], 2).chunks.tolist() == [0, 0]


def test_pieces_of_each_rule():
    counts = {
        name: [own_length_rule(name).pieces(n) for n in (0, 1, 2, 8, 32)]
        for name in (
            "never-split",
            "root-length",
            "fixed-count-4",
            "fixed-chunk-4",
            "free-16",
            "free-most-4",
            "by-length-2-8",
        )
    }
    assert counts == {
        "never-split": [1, 1, 1, 1, 1],
        "root-length": [1, 1, 1, 3, 6],
        "fixed-count-4": [1, 1, 2, 4, 4],
        "fixed-chunk-4": [1, 1, 1, 2, 8],
        "free-16": [1, 1, 1, 1, 2],
        "free-most-4": [1, 1, 2, 4, 4],
        "by-length-2-8": [1, 1, 1, 2, 4],
    }


def test_flashmla_calls_refuse():
    with pytest.raises(BadInput, match="40 pieces"):
        flashmla_calls("fixed-chunk-1", [64 * 40], 32)
    with pytest.raises(BadInput, match="lengths\\[1\\] is 0"):
        flashmla_calls("never-split", [64, 0], 132)


def test_command_prints_the_schedule():
    done = CliRunner().invoke(command, ["100", "5000", "--num-sm-parts", "8"])
    assert done.exit_code == 0, done.output
    found = flashmla_schedule([100, 5000], 8)
    assert f"Quota of one part: {found.payload} blocks" in done.output
    assert f"    1     5000 {found.splits_per_row[1]:>7}" in done.output
    answer = json.loads(CliRunner().invoke(command, ["100", "5000", "--num-sm-parts", "8", "--json"]).output)
    assert answer["num_splits"] == found.num_splits
    assert [tuple(p.values()) for p in answer["parts"]] == found.parts
    free = json.loads(CliRunner().invoke(command, ["100", "5000", "--rule", "free-8", "--json"]).output)
    assert free["splits_per_row"] == [1, 10]


def test_command_refuses():
    assert CliRunner().invoke(command, []).exit_code == 2
    assert CliRunner().invoke(command, ["ten"]).exit_code == 2
    assert isinstance(CliRunner().invoke(command, ["10", "--block-size", "0"]).exception, BadInput)
    assert BATCH_WIDE == "flashmla"


@given(st.lists(st.integers(0, 700), min_size=1, max_size=12), st.integers(1, 30), st.sampled_from(["free-2", "free-most-3"]))
def test_spread_plans_give_every_piece_a_slot_of_its_own(lengths, programs, rule):
    plan = make_plan(rule, lengths, programs, 16)
    found = spread(plan)
    taken = []
    for segment in map(lambda s: Segment(*s), found.segments.tolist()):
        pieces = -(-(segment.end_block - segment.begin_block) // int(plan.chunks[segment.row]))
        if plan.pieces[segment.row] == 1:
            assert segment.slot == -1
        else:
            first = int(found.slot_starts[segment.row])
            assert segment.slot - first == segment.begin_block // int(plan.chunks[segment.row])
            taken += range(segment.slot, segment.slot + pieces)
    assert sorted(taken) == list(range(found.num_slots))
    assert np.array_equal(found.segments[:, :3], plan.segments[:, :3]) and found.bounds_of(0) == plan.bounds_of(0)
    assert spread(found) is found
    whole = make_plan("fixed-chunk-2", lengths, programs, 16)
    assert spread(whole) is whole


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 3])), min_size=1, max_size=8), st.integers(1, 9)
)
def test_stretches_of_pieces_cost_as_little_as_can_be(pieces, programs):
    blocks, fresh = (np.array(column) for column in zip(*pieces))

    def cost(first, last):
        return int((blocks + fresh)[first:last].sum() - fresh[first])

    found = _stretches(blocks, fresh, programs)
    assert found[0] == 0 and set(np.diff(found)) <= {0, 1} and found[-1] < programs
    cuts = [0, *(np.flatnonzero(np.diff(found)) + 1), len(pieces)]
    mine = max(cost(a, b) for a, b in zip(cuts, cuts[1:]))
    inner = range(1, len(pieces))
    every = (c for n in range(min(programs, len(pieces))) for c in itertools.combinations(inner, n))
    least = min(max(cost(a, b) for a, b in zip((0, *c), (*c, len(pieces)))) for c in every)
    assert mine == max(least, 1) or mine == least

"""Notebook 02's study: what it concludes, from where, and that its conclusions can fail."""

import matplotlib
import nbformat
import numpy as np
import pandas as pd
import pytest

matplotlib.use("Agg")

from batch_variance.common import BadInput, data_path
from batch_variance.common.data import repository
from batch_variance.reporting.plots import split_scheduler as plots
from batch_variance.schedules import flashmla_schedule
from batch_variance.studies import split_scheduler as study

SMALL = dict(
    lengths=[],
    distribution="uniform",
    batch=6,
    longest=200,
    heads=16,
    num_sm_parts=12,
    block_size=16,
    overhead=2,
    rule="fixed-chunk-4",
    watched_row=1,
    batch_sizes=[1, 4, 64],
    arithmetic_batches=[2, 6],
    seed=0,
    device="cpu",
)


def parameters(**changes):
    return study.Parameters.checked({**SMALL, **changes})


@pytest.fixture(scope="module")
def decoded():
    p = parameters()
    return p, *study.solo_against_batch(p)


def test_parameters_are_the_notebook_s():
    notebook = nbformat.read(repository() / "notebooks" / "02_split_scheduler.ipynb", 4)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    found = {}
    exec(cell.source, found)
    found.pop("__builtins__")
    assert set(found) == set(study.Parameters.model_fields)
    study.Parameters.checked(found)
    assert all("#" in line for line in cell.source.splitlines())
    assert all(not c.get("outputs") for c in notebook.cells)
    assert all(len(c.source.splitlines()) <= 15 for c in notebook.cells if c.cell_type == "code")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(lengths=[5, -2]), "-2 is negative"),
        (dict(batch=0), "batch = 0"),
        (dict(block_size=0), "block_size = 0"),
        (dict(block_size=48), "power of two"),
        (dict(rule="free"), "rule 'free' is unknown"),
        (dict(watched_row=6), "rows 0 to 5"),
        (dict(batch=1, watched_row=0), "one row"),
        (dict(batch_sizes=[]), "one batch size"),
        (dict(distribution="normal"), "lognormal"),
        (dict(num_sm_parts=0), "num_sm_parts = 0"),
        (dict(overhead=-1), "overhead = -1"),
        (dict(extra=1), "extra"),
    ],
)
def test_bad_parameters(change, message):
    with pytest.raises(BadInput, match=message):
        parameters(**change)


def test_golden_schedules_match_and_the_control_does_not():
    assert study.golden_matches().events == 108
    assert study.golden_matches(overhead=4).events < 108


def test_gantt_covers_the_blocks_and_parts_do_one_thing_at_a_time():
    p = parameters()
    tokens = study.batch_lengths(p)
    for rule in ("flashmla", p.rule):
        frame = study.gantt(p, tokens, rule)
        assert (frame.end_block - frame.begin_block).sum() == sum(-(-n // p.block_size) for n in tokens)
        for _, part in frame.groupby("part"):
            assert (part.start.to_numpy()[1:] == part.stop.to_numpy()[:-1]).all()


def test_split_counts_follow_the_batch_only_under_flashmla():
    p = parameters()
    counts = study.splits_against_batch(p)
    default = counts[counts.schedule == "flashmla"]
    assert default.splits.iloc[0] == flashmla_schedule([200], 12, 16, 2).splits_per_row[0]
    assert default.splits.nunique() > 1 and counts[counts.schedule == p.rule].splits.nunique() == 1
    neighbours = study.splits_against_neighbour(p)
    assert neighbours[neighbours.schedule == "flashmla"].splits.nunique() > 1
    assert neighbours[neighbours.schedule == p.rule].splits.nunique() == 1
    tree = study.trees(p)
    for _, part in tree.groupby(["schedule", "where"]):
        assert (
            part.begin_block.iloc[0] == 0 and (part.begin_block.to_numpy()[1:] == part.end_block.to_numpy()[:-1]).all()
        )


def test_lengths():
    assert study.batch_lengths(parameters(lengths=[3, 0], watched_row=0)) == [3, 0]
    assert study.batch_lengths(parameters(distribution="full"), 4) == [200] * 4
    drawn = study.batch_lengths(parameters(distribution="lognormal"), 50)
    assert min(drawn) >= 1 and max(drawn) <= 200 and len(set(drawn)) > 10


def test_bits_follow_the_split_count(decoded):
    p, rows, histogram = decoded
    found = study.verdicts(rows, p)
    assert found["identical"] and found["both_happened"] and found["coarse_is_worse"]
    assert found["coincide"].events == found["coincide"].trials == 8
    assert found["default_differs"].events > 0 and found["own_differs"].events == 0 and found["own_pieces"] > 1
    assert histogram.groupby("schedule")["values"].sum().tolist() == [8 * 16 * 512] * 2
    zero = histogram[(histogram.schedule == "flashmla") & (histogram.ulp_from == 0)]["values"].iloc[0]
    assert 8 * 16 * 512 - zero == rows[rows.schedule == "flashmla"].values_differ.sum() > 0
    assert (rows.error_solo < 6e-3).all() and np.isfinite(rows.max_row_scaled_ulp).all()


def test_verdicts_notice_a_planted_fault(decoded):
    p, rows, _ = decoded
    planted = rows.copy()
    own = planted.index[planted.schedule == p.rule][0]
    planted.loc[own, "solo_differs"] = True
    assert study.verdicts(planted, p)["own_differs"].events == 1
    planted.loc[own, "rerun_differs"] = True
    assert not study.verdicts(planted, p)["identical"]
    default = planted.index[planted.schedule == "flashmla"][0]
    planted.loc[default, "solo_differs"] = ~planted.loc[default, "solo_differs"]
    assert study.verdicts(planted, p)["coincide"].events == 7


def test_recorded_tables():
    for name in ("decode", "decode_bits", "decode_ulp"):
        frame = pd.read_csv(data_path("recorded", f"{name}.csv"))
        assert (
            set(frame.gpu) == {"NVIDIA H200"}
            and not frame[["driver", "torch", "triton", "commit", "date"]].isna().any().any()
        )
        assert not frame.commit.str.endswith("+").any()
    columns = (
        "benchmark kernel policy shape m metric unit value baseline ratio gpu driver torch triton commit date".split()
    )
    times = pd.read_csv(data_path("recorded", "decode.csv"))
    assert list(times.columns) == columns and not times.duplicated(["kernel", "policy", "shape", "m", "metric"]).any()
    assert times.policy.str.fullmatch(r"default|invariant-[a-z0-9-]+").all() and (times.value > 0).all()
    timed = times[times.metric == "time"]
    assert np.allclose(timed.ratio, timed.value / timed.baseline, rtol=2e-3)
    assert {(h, k) for h in ("h64", "h128") for k in ("topk2048",)} <= {
        tuple(s.split()[::2][:2]) for s in timed["shape"]
    }
    assert set(timed[timed.kernel == "flashmla"].m) == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}


def test_recorded_conclusions():
    for kernel in ("flashmla", "triton"):
        (varies, default), (keeps, own) = study.recorded_rate(kernel, False), study.recorded_rate(kernel, True)
        assert (
            varies.events == default.differ_split_changed == default.rows_split_changed
            and default.differ_split_same == 0
        )
        assert (
            keeps.events == own.schedules_differ == own.rerun_differs == default.rerun_differs == 0
            and keeps.trials > 1000
        )
    against = study.by_length_against_single()
    assert against["cost"] < against["single_cost"] < study.EARLIER_BEST_SINGLE_RULE
    advice = study.recommendation()
    assert (advice.cost <= advice.runner_up_cost).all() and list(advice.batches)[0] == "1 to 8"
    assert study.cost_by_range().query("policy == 'default'").cost.eq(1).all()
    shares = study.recorded_ulps().share
    assert abs(shares.sum() - 1) < 1e-9


def test_geometric_mean():
    assert study.geometric_mean([1, 4]) == pytest.approx(2)


def test_figures_are_drawn(decoded):
    p, rows, histogram = decoded
    tokens = study.batch_lengths(p)
    figures = [
        plots.gantt({"flashmla": study.gantt(p, tokens), p.rule: study.gantt(p, tokens, p.rule)}, p.watched_row),
        plots.split_counts(study.splits_against_batch(p), "batch", "rows"),
        plots.trees(study.trees(p)),
        plots.ulp_histogram(histogram),
        plots.ulp_histogram(study.recorded_ulps(), "ulp_up_to"),
        plots.errors(rows),
        plots.costs(study.costs(), ["invariant-root-length"]),
    ]
    for figure in figures:
        assert (
            all(ax.get_xlabel() for ax in figure.axes)
            and figure.axes[0].get_lines() + figure.axes[0].patches + figure.axes[0].collections
        )
        matplotlib.pyplot.close(figure)

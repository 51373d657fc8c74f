"""Notebook 00's study: what it says follows the recorded tables, whichever of them are there."""

import math
import re
import time

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest

from batch_variance.common import BadInput, exact_interval
from batch_variance.common.data import data_path, repository
from batch_variance.reporting.plots import index as plots
from batch_variance.studies import index as study
from batch_variance.studies.index import Recorded
from batch_variance.studies.sources import plain

GPU = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "2026-11-30"}


@pytest.fixture
def folder(tmp_path):
    """Small tables of every kind that the study reads, with numbers that no other table has."""

    def write(name, rows, **stamp):
        pd.DataFrame(rows).assign(**(stamp or GPU)).to_csv(tmp_path / f"{name}.csv", index=False)

    write(
        "decode_bits",
        [
            {"kernel": "flashmla", "policy": "default", "rows_checked": 10, "solo_differs": 7},
            {"kernel": "flashmla", "policy": "default", "rows_checked": 30, "solo_differs": 13},
            {"kernel": "flashmla", "policy": "invariant-free-4", "rows_checked": 50, "solo_differs": 0},
        ],
    )
    write(
        "decode_ulp",
        [
            {"kernel": "flashmla", "policy": "default", "ulp_up_to": up, "values": n}
            for up, n in (("0", 100), ("1", 30), ("more", 10))
        ],
    )
    write(
        "row_threshold_moe_variants",
        [
            {"policy": name, "concurrency": level, "run": "A", "requests": 100, "differ from alone": differ}
            for name, level, differ in (
                ("default", 1, 0),
                ("default", 8, 41),
                ("force-gemv", 8, 0),
                ("round-activations", 8, 99),
            )
        ],
    )
    write(
        "concurrency_dense_outputs",
        [
            {"concurrency": level, "run": run, "requests": 200, "differ from alone": differ}
            for level, run, differ in ((1, "A", 0), (4, "A", 11), (4, "B", 12), (4, "C", 150), (4, "twin", 0))
        ],
    )
    write(
        "gemm",
        [
            {
                "benchmark": "gemm",
                "kernel": "gemm",
                "policy": name,
                "shape": f"s{m}",
                "m": m,
                "metric": metric,
                "ratio": ratio,
            }
            for name, m, metric, ratio in (
                ("default", 1, "time", 1.0),
                ("default", 2, "time", 1.0),
                ("invariant", 1, "time", 0.5),
                ("invariant", 2, "time", 2.0),
                ("invariant-x", 1, "time", 0.01),
                ("invariant", 1, "bandwidth", 9.0),
            )
        ],
    )
    write(
        "probe_zoo",
        [
            {"kernel": "clean", "axis": "none", "instances": 5, "found": 0, "found_elsewhere": 0},
            {"kernel": "leak", "axis": "contents", "instances": 9, "found": 8, "found_elsewhere": 1},
        ],
        processor="a CPU",
        commit="abc",
        date="2026-11-30",
    )
    return tmp_path


def test_rates_are_the_tables_sums_with_exact_intervals(folder):
    found = study.rates(Recorded(folder)).set_index(["subject", "dispatch"])
    counts = found[["events", "trials"]].apply(tuple, axis=1).to_dict()
    assert counts == {
        ("bits of a row, flashmla decode", "default"): (20, 40),
        ("bits of a row, flashmla decode", "invariant"): (0, 50),
        ("text of a request, row threshold, moe", "default"): (41, 100),  # above concurrency 1
        ("text of a request, row threshold, moe", "invariant"): (0, 100),  # not round-activations: it keeps two paths
        ("text of a request, all mechanisms, dense, concurrency 4", "default"): (23, 400),  # runs A and B
        ("text of a request, all mechanisms, dense, twin", "invariant"): (0, 200),
    }
    for row in found.itertuples():
        assert (row.low, row.high) == exact_interval(row.events, row.trials) and row.tier == "recorded-gpu"


def test_each_mechanism_alone_has_its_rate(folder):
    """Of the part that shares changes out: none, one at a time and all; not the pairs, and not another part. Then of the
    one that keeps values in bfloat16."""
    counts = (("none", 0), ("split_k", 2), ("row_threshold", 5), ("split_k+row_threshold", 9), ("a+b", 1))
    rows = [
        {
            "part": part,
            "mechanisms": name,
            "prompt": prompt,
            "requests": 10,
            "changed": changed,
            "studied": "split_k+row_threshold",
        }
        for part in ("budget", "load")
        for name, changed in counts
        for prompt in range(2)
    ]
    narrow = {"part": "amplifiers:storage and logits in bfloat16", "mechanisms": "split_k", "prompt": 0, "requests": 20, "changed": 7}
    rows.append(narrow | {"studied": "split_k+row_threshold"})
    pd.DataFrame(rows).assign(tier="live-gpu", **GPU).to_csv(folder / "attribution_moe_prompts.csv", index=False)
    found = study.rates(Recorded(folder))
    mine = found[found.table == "attribution_moe_prompts"]
    assert mine[["subject", "dispatch", "events", "trials"]].values.tolist() == [
        ["text of a request, no mechanism, moe", "invariant", 0, 20],
        ["text of a request, split k alone, moe", "default", 4, 20],
        ["text of a request, row threshold alone, moe", "default", 10, 20],
        ["text of a request, all mechanisms together, moe", "default", 18, 20],
        ["text of a request, split k alone, moe, all in bfloat16", "default", 7, 20],
    ]
    assert set(mine.tier) == {"recorded-gpu"}


def test_a_cost_is_the_geometric_mean_over_all_configurations(folder):
    """Not of a policy that was measured on some of them only, and not of another metric."""
    (row,) = study.costs(Recorded(folder)).itertuples()
    assert (row.policy, row.configurations, row.least, row.most) == ("invariant", 2, 0.5, 2.0)
    assert math.isclose(row.cost, 1.0)


def test_findings_name_their_numbers_and_tiers(folder):
    found = study.findings(Recorded(folder))
    text = " ".join(found.finding)
    for words in ("20 of 40 (", "0 of 50 (", "75% move by one ULP", "8 of 9 planted faults", "costs 1.00 times"):
        assert words in text
    assert found.set_index("table").tier.to_dict()["probe_zoo"] == "cpu-native"
    assert set(found.tier) == {"recorded-gpu", "cpu-native"} and found.n.str.contains(r"\d").all()


def test_a_zero_is_not_called_never_and_a_missing_table_is_named(folder):
    found = study.unknown(Recorded(folder)).set_index("question")["why it is open"]
    high = exact_interval(0, 50)[1]
    assert (
        found["bits of a row, flashmla decode, invariant dispatch: is it never?"] == f"0 of 50 still allow {high:.2%}"
    )
    assert "no table engine is recorded" in set(found) and "no table gemm is recorded" not in set(found)
    assert found["whether other GPUs and drivers behave alike"] == "recorded on NVIDIA H200 only"


@pytest.mark.parametrize(
    "missing", [None, "decode_bits", "gemm", "probe_zoo", "decode_ulp", "concurrency_dense_outputs", "*"]
)
def test_any_table_may_be_missing(folder, missing):
    for path in folder.glob(f"{missing}.csv") if missing else ():
        path.unlink()
    found = Recorded(folder)
    rates, costs = study.rates(found), study.costs(found)
    text = plain(study.argument(found))
    assert ("default dispatch changes" in text) == (len(rates) > 0) and ("Fixing it costs" in text) == (len(costs) > 0)
    assert len(study.inventory(found)) == len(list(folder.glob("*.csv")))
    assert (missing == "*") == ("Nothing is recorded" in text)
    assert plain(study.rates_sentence(rates)) and plain(study.costs_sentence(costs)) and len(study.unknown(found)) > 3


def test_numbers_follow_the_table(folder):
    """The control: another count, another sentence."""
    before = plain(study.argument(Recorded(folder)))
    table = pd.read_csv(folder / "decode_bits.csv")
    table.loc[table.policy == "invariant-free-4", "solo_differs"] = 3
    table.to_csv(folder / "decode_bits.csv", index=False)
    after = plain(study.argument(Recorded(folder)))
    assert before != after and "3 of 350" in after


def test_figures_hold_every_row(folder):
    found = Recorded(folder)
    rates, costs = study.rates(found), study.costs(found)
    ax = plots.rates(rates).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == rates.subject.tolist()
    assert sum(len(line.lines[0].get_xdata()) for line in ax.containers) == len(rates)
    assert plots.costs(costs).axes[0].lines[0].get_xdata().tolist() == costs.cost.tolist()
    plt.close("all")


def test_the_committed_tables_are_read_fast_and_without_a_gap():
    started = time.thread_time()
    found = study.recorded(study.Parameters.checked({"recorded": ""}))
    assert found.folder == data_path("recorded")
    text = plain(study.argument(found))
    findings = study.findings(found)
    assert time.thread_time() - started < 5
    assert "nan" not in text and not findings.finding.str.contains("nan").any() and findings.n.notna().all()


def test_a_folder_that_is_none_is_refused():
    with pytest.raises(BadInput, match="nowhere.*give a folder of recorded tables"):
        study.Parameters.checked({"recorded": "/nowhere"})


def test_the_notebook_types_no_number_in():
    """Its markdown and code hold no figure of a result: digits only in paths, slices and notebook numbers."""
    notebook = nbformat.read(repository() / "notebooks" / "00_index.ipynb", as_version=4)
    for cell in notebook.cells:
        assert not re.search(r"\d+(\.\d+)? ?%|\d\.\d|\d{3,}", cell.source), cell.source
        assert cell.cell_type == "markdown" or len(cell.source.splitlines()) <= 8


def test_the_costs_leave_no_recorded_benchmark_out():
    """Every benchmark that `batch-variance bench` can record, and this repository has, stands in the table of costs; the
    profile says what bounds these, and is none itself."""
    from batch_variance.common import data_path
    from batch_variance.kernels.command import BENCHMARKS

    found = study.costs(study.recorded(study.Parameters.checked({"recorded": ""})))
    held = {name for name in BENCHMARKS if name != "profile" and data_path("recorded", f"{name}.csv").exists()}
    assert held and set(found.benchmark) == held

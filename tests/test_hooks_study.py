"""Notebook 06's study: its parameters are checked, its tables are tidy, its figures draw, and the shipped recording
is whole.
"""

import ast

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
import torch

from batch_variance.common import BadInput
from batch_variance.common.data import repository
from batch_variance.hooks import AXES, ProbeLog
from batch_variance.reporting.plots import call_site as plots
from batch_variance.studies import call_site as study
from batch_variance.studies.sources import plain


def notebook_parameters() -> dict:
    notebook = nbformat.read(repository() / "notebooks" / "06_call_site.ipynb", as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    return {line.targets[0].id: ast.literal_eval(line.value) for line in ast.parse(cell.source).body}


def parameters(**changes):
    return study.Parameters.checked({**notebook_parameters(), **changes})


def test_the_notebook_has_exactly_the_studys_parameters():
    assert set(notebook_parameters()) == set(study.Parameters.model_fields)
    assert parameters().batch == 8


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"batch": 1}, "batch"),
        ({"site": "vllm.prefill"}, "no known call site"),
        ({"log": "absent.parquet"}, "no such file"),
        ({"zoo_instances": 0}, "zoo_instances"),
    ],
)
def test_wrong_parameters_are_named(changes, sentence):
    with pytest.raises(BadInput, match=sentence):
        parameters(**changes)


def test_the_zoos_tables_and_figure():
    p = parameters(zoo_instances=2, clean_calls=5)
    zoo = study.zoo(p)
    assert zoo.groupby(["kernel", "axis"])["instances"].sum().eq(2).all() and set(zoo["axis"]) == {*AXES, "tail"}
    score = study.zoo_score(zoo).set_index("kernel")
    assert (
        (score.drop("clean")["found"] == 2).all()
        and (score["found_elsewhere"] == 0).all()
        and score.loc["clean", "found"] == 0
    )
    clean = study.clean_session(p)
    assert clean["calls"] == 5 and clean["differ"] == 0 and clean["rows"] > 5 * len(AXES)
    figure = plots.zoo_matrix(zoo)
    assert len(figure.axes[0].texts) == len(score) * (len(AXES) + 1)
    plt.close(figure)


def test_each_planted_input_fault_fails_its_own_check_and_no_other():
    forms = study.well_formed()
    assert set(forms.loc[forms["planted"].eq("none"), "verdict"]) == {"ok"}
    for fault in study.FAULTS[1:]:
        part = forms[forms["planted"].eq(fault) & forms["verdict"].eq("fails")]
        assert len(part) == 1, (fault, part)


def test_a_session_from_a_log(tmp_path):
    path = tmp_path / "session.parquet"
    log = ProbeLog(path)
    record = {
        "kind": "axis",
        "site": "a:f",
        "batch": 4,
        "rows_checked": 4,
        "rows_unmoved": 4,
        "differ_unmoved": 0,
        "rows_sensitive": 4,
        "elements": 40,
        "occurred": 1,
        "flip_seen": True,
        "note": "",
        "max_ulp": 0,
        "ulp_histogram": [0] * 65,
    }
    differing = {
        **record,
        "rows_differ": 3,
        "differ_unmoved": 3,
        "elements_differ": 5,
        "ulp_histogram": [0, 2, 3] + [0] * 62,
    }
    for call in range(2):
        log.append(
            [
                {**record, "axis": "rerun", "rows_differ": 0, "elements_differ": 0, "call": call},
                {**differing, "axis": "solo", "call": call},
            ]
        )
    log.flush()
    frame = study.session(parameters(log=str(path)), tmp_path / "unused.parquet")
    found = study.session_verdicts(frame).set_index("axis")["verdict"].to_dict()
    assert found == {"rerun": "invariant", "solo": "variant"}
    distribution = study.ulp_distribution(frame)
    assert distribution[["axis", "ulp_from", "elements"]].values.tolist() == [["solo", 1, 4], ["solo", 2, 6]]
    for figure in (
        plots.verdict_matrix(study.session_verdicts(frame)),
        plots.ulp_distribution(distribution),
        plots.ulp_distribution(distribution.iloc[:0]),
    ):
        plt.close(figure)


def test_the_size_map_keeps_operations_that_change():
    sizes = pd.DataFrame(
        {"phase": "decode", "module": ["a", "a", "b", "b"], "op": "mm", "size": [1, 2, 1, 2], "bit_class": [0, 1, 0, 0]}
    )
    table = study.size_map(sizes)
    assert table.index.tolist() == ["decode · a · mm"] and table.loc["decode · a · mm"].tolist() == [0, 1]
    for shown in (table, table.iloc[:0]):
        plt.close(plots.size_map(shown))


def test_the_recorded_zoo_is_whole():
    table = study.recorded_zoo()
    planted = table[table["session"].eq("planted")]
    assert (
        len(planted) == 8 and (planted["instances"] >= 200).all() and (planted["found"] == planted["instances"]).all()
    )
    assert (table["found elsewhere"] == 0).all() and table["instances"].iloc[-1] >= 10_000


def test_equal_rows_by_thread_count_leave_the_thread_count_as_it_was():
    before = torch.get_num_threads()
    table = study.attention_by_threads(lengths=(47, 64))
    assert torch.get_num_threads() == before
    assert len(table) == 4 and table["classes"].between(1, 8).all()
    plt.close(plots.threads(table))


def test_the_cost_of_a_probe_is_held_against_its_goal():
    cost = pd.DataFrame([
        {"site": "attend", "sampling": "re-run and solo", "every": 100, "rounds": 4, "calls": 2000, "plain_s": 0.5, "share": 0.015, "share_high": 0.016,
         "ms a sample": 1.5, "gpu": "a GPU", "date": "a day"},
    ])
    assert "1.50% of the run (1.50 ms a sample, 1.00 ms of engine a call)" in plain(study.cost_sentence(cost))
    assert "under the goal of 2%." in plain(study.cost_sentence(cost))
    assert "not everywhere under the goal of 1%." in plain(study.cost_sentence(cost, goal=0.01))
    assert "That is under the goal of 2% at the median, not surely." in plain(study.cost_sentence(cost.assign(share_high=0.021)))
    limited = cost.assign(sampling="re-run and solo, at most 2%", calls=4000, sampled=10)
    assert "one call in 400 at `attend`" in plain(study.cost_sentence(pd.concat([cost, limited])))
    later = cost.assign(**{"sampling": "re-run and solo, later", "share": 0.012, "share_high": 0.013, "ms a sample": 0.19, "ms later": 2.5})
    assert (
        "controls made later it takes 1.20% at `attend` (0.19 ms a sample, and 2.50 ms after the load), under the goal."
        in plain(study.cost_sentence(pd.concat([cost, later])))
    )
    assert plain(study.cost_sentence(later)).endswith("What the calls not sampled cost was not measured then and is in none of these.")
    assert "not measured" not in plain(study.cost_sentence(later.assign(**{"us not sampled": 0.7})))
    assert plain(study.cost_sentence(pd.DataFrame())) == "No GPU's cost of a probe is recorded."
    found = study.recorded_cost()
    assert set(found.site) == {"attend", "linear"} and not found.loc[~found.sampling.str.contains("later"), "ms later"].any()


def test_sentences_where_nothing_differs_and_where_something_does():
    nothing = study.named(pd.DataFrame(columns=["site", "axis", "ulp_from", "elements", "share"]), "ulp")
    assert study.ulp_sentence(nothing) == "No element differs over all replays."
    rows = [dict(site="s", axis="solo", ulp_from=1, elements=3, share=0.1), dict(site="s", axis="solo", ulp_from=64, elements=1, share=0.1)]
    assert plain(study.ulp_sentence(study.named(pd.DataFrame(rows), "ulp"))).startswith(
        "4 elements differ over all replays; 75% of them by 7 ULP or less. The rest"
    )
    none = study.named(pd.DataFrame(columns=["op", "introduces", "propagates"]), "vary")
    assert study.introduced_sentence(none, None) == "No operation gives a row other bits in the batch than alone."
    some = study.named(pd.DataFrame([dict(op="mm", introduces=2, propagates=5)]), "vary")
    first = {"op": "mm", "module": "layer", "phase": "prefill"}
    assert plain(study.introduced_sentence(some, first)) == (
        "2 calls of 1 kinds bring a difference in, 5 only pass one on. The first is `mm` in `layer` (prefill)."
    )
    skipped = [{"op": "div.Tensor", "module": "layer", "ran": "in the batch only"}]
    assert study.introduced_sentence(none, None, skipped).startswith("No operation that was compared gives")
    assert plain(study.introduced_sentence(some, first, skipped)).endswith("1 operations could not be compared, the first `div.Tensor` in `layer`.")

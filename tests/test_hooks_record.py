"""Recorded audits: tables by run, a re-run in place of its own rows, and sentences for what is no audit."""

import json

import pandas as pd
import pytest
import torch

from batch_variance.common import BadInput, environment
from batch_variance.hooks.dispatched import _results
from batch_variance.hooks.record import TABLES, add, recorded, tables


def report(batch, vary):
    return {
        "model": "toy",
        "dtype": "float32",
        "device": "cpu",
        "batch": batch,
        "rows_watched": 2,
        "controls": {"negative_control": True, "positive_control": True},
        "operations": [{"phase": "decode", "module": "a", "op": "mm", "solo": vary, "introduces": vary}],
        "axes": [{"axis": "solo", "operations": 9, "vary": vary}],
        "batch_sizes": [{"phase": "decode", "module": "a", "op": "mm", "size": 1, "bit_class": 0}],
        "tokens": [{"row": 0, "first_difference": -1, "logits_differ": True}],
        "provenance": environment(),
    }


def test_a_rerun_replaces_its_own_rows_only(tmp_path):
    for one in (report(4, 1), report(8, 2), json.loads(json.dumps(report(4, 3)))):
        add(one, tmp_path)
    for name in TABLES:
        table = pd.read_csv(tmp_path / f"{name}.csv")
        assert sorted(table["batch"]) == [4, 8] and {"commit", "torch", "processor", "date", "negative_control"} <= set(
            table.columns
        )
    axes = pd.read_csv(tmp_path / "audit_axes.csv").set_index("batch")["vary"]
    assert axes.to_dict() == {8: 2, 4: 3}


def test_what_is_no_audit_is_one_sentence():
    with pytest.raises(BadInput, match="no audit's JSON"):
        tables({"model": "toy"})


def test_the_shipped_recordings_hold_their_controls():
    axes = recorded("audit_axes")
    assert (
        set(axes["tier"]) <= {"recorded-gpu", "cpu-native"}
        and axes["negative_control"].all()
        and axes["positive_control"].all()
    )
    assert (axes.loc[axes["axis"].isin(["rerun", "contents"]), "vary"] == 0).all()
    operations = recorded("audit")
    # Whatever introduces a difference must show it.
    assert (operations["introduces"] <= operations["solo"]).all() and (operations["solo"] <= operations["calls"]).all()
    assert operations["introduces"].sum() > 0


def test_seeds_that_fused_attention_returns_are_no_results():
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    kept = [torch.zeros(1), torch.ones(1)]
    assert [t.item() for t in _results(attention, (*kept, torch.full((1,), 7), torch.full((1,), 8)), (), {})] == [0.0, 1.0]
    assert len(_results(torch.ops.aten.mm.default, torch.zeros(2), (), {})) == 1

"""Notebook 05's study: what it finds on this CPU, what it says without and with recorded tables, and the bench
command."""

import re

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from batch_variance.common import BadInput
from batch_variance.kernels import command
from batch_variance.kernels.gemm import bench as gemm_bench
from batch_variance.numerics.trees import segmented, sequential
from batch_variance.reporting.plots import invariant as plots
from batch_variance.studies import engine_bench
from batch_variance.studies import invariant as study
from batch_variance.studies.sources import plain

GOOD = dict(
    features=96,
    outputs=64,
    sizes=[1, 2, 4, 17, 64],
    tree_terms=48,
    tree_sizes=[1, 64],
    split_lengths=[768, 2048, 2048],
    split_rule="free-4",
    split_parts=8,
    error_rows=64,
    seed=0,
    device="cpu",
)


@pytest.fixture(scope="module")
def p():
    return study.Parameters(**GOOD)


@pytest.mark.parametrize(
    "change,word",
    [
        ({"features": 0}, "1 or more"),
        ({"sizes": [4]}, "two row counts"),
        ({"sizes": [0, 2]}, "1 or more"),
        ({"tree_terms": 4}, "8 to 512"),
        ({"tree_sizes": [3, 3]}, "two row counts"),
        ({"error_rows": -1}, "1 or more"),
        ({"split_lengths": [100, 200]}, "128 to 4096"),
        ({"split_lengths": [1024]}, "two lengths"),
        ({"split_rule": "flash"}, "unknown"),
        ({"split_parts": 0}, "1 or more"),
        ({"rows": 3}, "rows"),
    ],
)
def test_parameters_are_checked(change, word):
    with pytest.raises(BadInput, match=word):
        study.Parameters.checked({**GOOD, **change})


def test_bits_over_rows(p):
    frame = study.bit_classes(p)
    found = study.class_verdict(frame)
    assert found["holds"] and found["no_row_moved"] and found["library_varies"]
    assert found["kept"].events == found["kept"].trials >= 10
    edges = study.boundaries(frame, "library, float32")
    assert len(edges) >= found["library_classes"]["library, float32"] - 1 > 0
    lines = frame[frame.candidate == "library, float32"].set_index("m").bit_class
    assert all(m - 1 in lines.index and lines[m - 1] != lines[m] for m in edges)
    assert plots.class_map(frame).axes


def test_trees_go_with_bits(p):
    found = study.trees(p)
    against = study.trees_against_bits(p, found)
    verdict = study.tree_verdict(found, against, p)
    assert verdict["invariant"] == 1 and verdict["library"] == 2
    assert verdict["agree"].events == verdict["agree"].trials == 2
    assert verdict["stable"] and verdict["told_apart"] and verdict["both_happened"]
    assert list(study.tree_table(found).columns) == ["kernel", "rows", "tree", "depth", "widest node"]
    edges = study.tree_edges(found)
    assert edges.panel.nunique() == 2 and len(edges) == 2 * 2 * 47
    assert plots.trees(edges).axes


def test_a_wrong_claim_about_trees_would_be_seen(p):
    found = dict.fromkeys(study.trees(p), sequential(48))
    verdict = study.tree_verdict(found, study.trees_against_bits(p, found), p)
    assert verdict["agree"].events < verdict["agree"].trials and not verdict["stable"]


def test_the_split_fold_is_the_plans(p):
    found = study.split_trees(p)
    verdict = study.split_verdict(found, p)
    assert verdict["default"] == 2 and verdict["own"] == 1 and verdict["stable"] and verdict["moved"]
    # 12 blocks in pieces of 4, each added from the left, the pieces from the left: as the rule says.
    assert found["free-4", "alone"] == segmented(12, 4)
    counts = {key: study.plan_pieces(p, *key) for key in found}
    assert counts == verdict["pieces"] and counts["free-4", "alone"] == 3
    assert study.split_tree([768, 64], "never-split", 8, torch.device("cpu")) == sequential(12)
    assert plots.trees(study.tree_edges(found, "")).axes


def test_errors(p):
    frame = study.errors(p)
    verdict = study.error_verdict(frame)
    assert 0.5 < verdict["batch"] <= 1.05 and verdict["coarse"] > 1.5 and verdict["alone"] > 0.5
    x = frame.set_index(["dtype", "kernel"]).error
    assert x["float32", "invariant"] < 1e-6 < x["bfloat16", "invariant"] < 1e-2
    assert plots.errors(frame).axes


def test_in_use(p):
    frame, used = study.in_use(p)
    default, ours = frame.iloc[0], frame.iloc[1]
    assert ours.rows_differ == 0 < default.rows_differ and frame.rerun_differs.sum() == 0
    assert ours.rows_checked == default.rows_checked == 1 + 2 + 4 + 17 + 32
    assert used.left_alone == []


@pytest.fixture
def tables(tmp_path, monkeypatch):
    (tmp_path / "recorded").mkdir()
    monkeypatch.setattr(study, "data_path", lambda *parts: tmp_path.joinpath(*parts))
    study.recorded.cache_clear()
    yield tmp_path / "recorded"
    study.recorded.cache_clear()


def test_without_recorded_tables_it_says_so(tables):
    assert study.recorded_ratios("gemm") is None and study.recorded_classes() is None
    assert "No GPU has recorded" in plain(study.cost_sentence("gemm", None))


def test_recorded_tables_are_read(tables):
    where = dict(gpu="G", driver="1", torch="t", triton="r", commit="c", date="d")
    rows = [
        dict(
            benchmark="gemm",
            kernel="gemm",
            policy=policy,
            shape="N1 K1",
            m=m,
            metric="time",
            unit="us",
            value=v,
            baseline=2.0,
            ratio=v / 2,
            **where,
        )
        for policy, m, v in (("default", 1, 2.0), ("invariant", 1, 1.0), ("invariant", 16, 4.0))
    ]
    pd.DataFrame(rows).to_csv(tables / "gemm.csv", index=False)
    frame = study.recorded_ratios("gemm")
    assert frame.ratio.tolist() == [0.5, 2.0]
    assert "1.000 times" in plain(study.cost_sentence(
        "gemm", frame
    )) and "at worst 2.00 (m = 16, N1 K1)" in plain(study.cost_sentence("gemm", frame))
    assert plots.ratios(frame, "the library").axes
    kinds = [
        ("library", 1, "a"),
        ("library", 64, "b"),
        ("invariant", 1, "c"),
        ("invariant", 64, "c"),
        ("x", 1, "c"),
        ("x", 64, "c"),
        ("y", 64, "c"),
    ]
    pd.DataFrame(
        [
            dict(kernel="gemm", shape="N1 K1", candidate=n, m=m, bit_class=k, rows_moved=0, failure="", **where)
            for n, m, k in kinds
        ]
    ).to_csv(tables / "gemm_classes.csv", index=False)
    verdict = study.recorded_class_verdict(study.recorded_classes())
    assert verdict["kept"].events == verdict["kept"].trials == 1 and list(verdict["default_classes"].values()) == [2]
    assert verdict["default_varies"] and verdict["ran"] and verdict["no_row_moved"] and verdict["configurations"] == 2
    assert study.recorded_on(study.recorded_classes()).startswith("G, driver 1")


@pytest.mark.parametrize(
    "arguments,word",
    [(["nothing"], "unknown"), (["gemm", "--budget-seconds", "0"], "no time"), (["gemm"], "no usable GPU")],
)
def test_bench_refuses(arguments, word):
    if torch.cuda.is_available() and word == "no usable GPU":
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(command.bench, arguments)
    assert isinstance(result.exception, BadInput) and word in str(result.exception)


def test_the_engine_benchs_model_keeps_texts_on_invariant_kernels():
    from dataclasses import replace

    from batch_variance.engine import EngineConfig, Model
    from batch_variance.kernels.nvfp4 import policy
    from batch_variance.kernels.sets import EmulatedKernels

    shape = replace(
        engine_bench.SHAPE, hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=64
    )
    weights = engine_bench.random_weights(shape, "cpu", torch.float32)
    config = EngineConfig(max_rows=64, max_length=128, page=16, ignore_eos=True, split_rule="free-4", split_block=16)
    model = Model(weights, EmulatedKernels(), policy("default"))
    assert engine_bench.variants(model, config, engine_bench.prompts(4, 64), 4, 12, 4) == (0, 12)


@pytest.mark.parametrize(
    "name,kind",
    [
        ("nvjet_tst_128x64_64x8_1x2_h_bz_coopA_TNN", "matmul"),
        ("parallel", "matmul"),
        ("decode_kernel", "decode attention"),
        ("_attend", "prefill attention"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_the_engine_bench_tells_kernels_apart_by_name(name, kind):
    assert engine_bench.kind_of(name) == kind and kind in engine_bench.KINDS


@pytest.mark.parametrize("rows,said", [((7,), "rows [7]: give some of"), ((), "rows []: give some of")])
def test_rows_tuned_again_are_some_of_those_that_are_tuned(tmp_path, rows, said):
    with pytest.raises(BadInput, match=re.escape(said)):
        gemm_bench.run(tmp_path, 1.0, rows)


def test_rows_are_tuned_again_only_in_a_class_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(gemm_bench, "tuned", lambda name: {})
    with pytest.raises(BadInput, match="no class for N4096 K4096"):
        gemm_bench.run(tmp_path, 1.0, (256,))
    assert not list(tmp_path.iterdir())

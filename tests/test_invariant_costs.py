"""The recorded timings' study: limits, goals, classes and tilings worked out by hand on a small table."""

import pandas as pd
import pytest

from batch_variance.reporting.plots import invariant as plots
from batch_variance.studies import invariant
from batch_variance.studies import invariant_costs as costs
from batch_variance.studies.sources import plain

WHERE = dict(gpu="G", driver="1", torch="t", triton="r", commit="c", date="d")
SHAPE = dict(n=1000, k=2000)


def write(folder, times, tuned, chosen):
    rows = []
    for m, default, mine in times:
        for policy, value in (("default", default), ("invariant", mine)):
            one = dict(benchmark="gemm", kernel="gemm", policy=policy, shape="N1000 K2000", m=m, metric="time")
            rows.append({**one, "value": value, "baseline": default, "ratio": value / default, **WHERE})
    pd.DataFrame(rows).to_csv(folder / "recorded" / "gemm.csv", index=False)
    pd.DataFrame([{**SHAPE, "segments": s, "m": m, "config": c, "time_us": t} for s, m, c, t in tuned]).to_csv(
        folder / "recorded" / "gemm_tuning.csv", index=False
    )
    pd.DataFrame([{**SHAPE, "segments": s, "m": m, "config": c} for s, m, c in chosen]).to_csv(
        folder / "tuned" / "gemm.csv", index=False
    )


ONE, TWO = "parallel 16x64x128 w4 s4 swap", "in-turn 128x64x64 w4 s4"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("recorded", "tuned"):
        (tmp_path / name).mkdir()
    for module in (invariant, costs):
        monkeypatch.setattr(module, "data_path", lambda *parts: tmp_path.joinpath(*parts))
    invariant.recorded.cache_clear()
    yield tmp_path
    invariant.recorded.cache_clear()


def test_without_tables_there_is_nothing(folder):
    assert costs.against_limit("gemm") is None and costs.by_segments() is None and costs.tiling() is None


def test_weights_tuned_at_fewer_row_counts_keep_their_classes(folder):
    times = [(1, 2.0, 1.0), (32, 1.0, 1.0), (4096, 40.0, 40.0)]
    tuned = [(1, 1, ONE, 1.0), (1, 32, ONE, 1.0), (1, 4096, TWO, 40.0), (2, 1, ONE, 2.0), (2, 4096, TWO, 50.0)]
    write(folder, times, tuned, [(1, m, ONE) for m in (1, 32, 4096)])
    for name in ("recorded/gemm.csv", "recorded/gemm_tuning.csv", "tuned/gemm.csv"):  # another weight, for few rows only
        table = pd.read_csv(folder / name)
        other = table[table.m < 4096]
        other = other.assign(shape="N8 K16") if "shape" in table else other.assign(n=8, k=16)
        pd.concat([table, other]).to_csv(folder / name, index=False)
    classes = costs.by_segments()
    assert list(zip(classes["shape"], classes.segments)) == [(s, c) for s in ("N1000 K2000", "N8 K16") for c in (1, 2)]
    assert 32 not in classes and classes["geometric mean"].tolist() == [0.7071, 1.118, 0.5, 1.0]
    assert "for 2 of 2 weights" in plain(costs.segments_sentence(classes))
    assert "25% to 25% (1 pairs)" in plain(costs.segments_sentence(classes))
    assert costs.by_rows(costs.against_limit("gemm"))["geometric mean"].tolist() == [0.5, 1.0, 1.0]


def test_a_table_worked_out_by_hand(folder, monkeypatch):
    assert "set" in costs.goal_sentence(pd.DataFrame(columns=["shape", "m", "ratio"]))
    monkeypatch.setattr(costs, "GOAL_WEIGHTS", ["N1000 K2000"])
    times = [(1, 2.0, 1.0), (4096, 40.0, 50.0)]
    tuned = [(2, 1, ONE, 1.0), (2, 4096, TWO, 40.0), (2, 4096, ONE, 80.0), (1, 1, ONE, 4.0), (1, 4096, TWO, 32.0)]
    write(folder, times, tuned, [(2, 1, ONE), (2, 4096, TWO)])
    frame = costs.against_limit("gemm")
    few, many = frame.itertuples()
    assert few.limit == pytest.approx(2 * (1000 * 2000 + 1 * 3000) / 4.3e6) and few.bound == "bandwidth"
    assert many.limit == pytest.approx(2 * 4096 * 1000 * 2000 / 790e6) and many.bound == "arithmetic"
    assert many.of_limit == pytest.approx(many.limit / 50) and many.default_of_limit == pytest.approx(many.limit / 40)
    assert costs.by_rows(frame)["geometric mean"].tolist() == [0.5, 1.25]
    said = plain(costs.goal_sentence(frame))
    assert "Missed: 0.791, worst 1.250" in said and "1 of 2" in said and "1.25 at 4096 rows of N1000 K2000" in said
    assert "Reached: 0.500" in plain(costs.goal_sentence(frame[:1])) and "No point" in plain(costs.goal_sentence(frame[:1]))
    assert "bandwidth, 1 points" in plain(costs.limit_sentence(frame)) and "4.3 TB/s" in plain(costs.limit_sentence(frame))

    classes = costs.by_segments()  # two segments: 0.5 and 1.0 of the library's time; one: 2.0 and 0.8
    assert classes.segments.tolist() == [1, 2] and classes["in use"].tolist() == [False, True]
    assert classes[1].tolist() == [2.0, 0.5] and classes[4096].tolist() == [0.8, 1.0]
    assert classes["geometric mean"].tolist() == [1.2649, 0.7071]
    assert "for 1 of 1 weights" in plain(costs.segments_sentence(classes)) and "25% to 25%" in plain(costs.segments_sentence(classes))

    assert "One segment was not tried for N1000 K2000" in plain(costs.segments_sentence(classes[classes.segments == 2]))

    tiling = costs.tiling()
    assert tiling.pieces.tolist() == [16 * 2, 32 * 16]  # tiles of n times segments in parallel; tiles alone in turn
    assert tiling.filled.tolist() == pytest.approx([32 / 132, 512 / 132 / 4]) and tiling.again.tolist() == [1.0, 1.25]
    assert costs.slowest(tiling, 1)["rows"].tolist() == [4096]
    assert "12.5% apart at the median and 25% at most" in plain(costs.reason_sentence(tiling))
    assert "At 1 of the 1 points" in plain(costs.reason_sentence(tiling.assign(waves=[1.0, 1.5])))
    assert plots.times_and_limit(frame, "library").axes and plots.ratios(frame, "the library", 1.15).axes


def test_nvfp4_weights_are_counted_by_their_bytes(folder):
    pd.DataFrame(
        [dict(benchmark="nvfp4", kernel="nvfp4", policy="invariant", shape="N1000 K2000", m=1, metric="time")]
    ).assign(value=2.0, baseline=2.0, ratio=1.0).to_csv(folder / "recorded" / "nvfp4.csv", index=False)
    assert costs.against_limit("nvfp4").limit[0] == pytest.approx((0.5625 * 2e6 + 4 * 3000) / 4.3e6)


def test_decode_rules_are_ranked_and_held_against_the_goal(folder):
    assert costs.decode_by_rule() is None and "No GPU" in plain(costs.decode_sentence(None))
    invariant.recorded.cache_clear()
    rows = [("free-4", 1, 1.5), ("free-4", 256, 1.0), ("free-8", 1, 2.0), ("free-8", 256, 1.0)]
    one = dict(kernel="triton", metric="time", shape="h64 kv8 d128 1024 full")
    table = [{**one, "policy": f"invariant-{rule}", "m": m, "ratio": ratio} for rule, m, ratio in rows]
    table.append({**one, "policy": "default", "m": 1, "ratio": 1.0})
    pd.DataFrame(table).to_csv(folder / "recorded" / "decode.csv", index=False)
    found = costs.decode_by_rule()
    assert found.rule.tolist() == ["free-4", "free-8"] and found["geometric mean"].tolist() == [1.225, 1.414]
    said = plain(costs.decode_sentence(found))
    assert "Missed" in said and "worst 1.50 (batch 1, h64 kv8 d128 1024 full)" in said and "not recorded" in said
    good = found.assign(rule="free-most-8", worst=1.05, **{"geometric mean": 1.01})
    assert "Reached" in plain(costs.decode_sentence(good)) and "not recorded" not in plain(costs.decode_sentence(good))


def _write(folder, name, rows):
    columns = ["kernel", "policy", "shape", "m", "metric", "value", "baseline"]
    frame = pd.DataFrame(rows, columns=columns).assign(benchmark=name, **WHERE)
    frame.assign(ratio=frame.value / frame.baseline).to_csv(folder / "recorded" / f"{name}.csv", index=False)
    invariant.recorded.cache_clear()


def test_prefill_is_told_by_its_cost_and_by_the_rows_that_disagree(folder):
    assert costs.prefill() is None and "No GPU has recorded" in costs.prefill_sentence(None)
    ours, rows = "invariant-free-4", []
    for shape, tokens, default, mine, unlike in (("short", 10, 2.0, 8.0, 0), ("long", 90, 5.0, 50.0, 3)):
        rows += [("prefill", "default", shape, tokens, "time", default, default)]
        rows += [("prefill", ours, shape, tokens, "time", mine, default), ("prefill", ours, shape, tokens, "rate", 1.0, 4.0)]
        rows += [("prefill", ours, shape, tokens, "rows unlike decode", unlike, 64)]
    _write(folder, "prefill", rows)
    found = costs.prefill()
    assert found["over the library"].tolist() == [4.0, 10.0] and found.tokens.tolist() == [10, 90]
    said = plain(costs.prefill_sentence(found))
    assert "Of 128 prefilled rows 3 have" in said and "4.0 to 10.0 times" in said


def test_the_engines_extra_time_is_laid_to_the_kernels_that_take_it(folder):
    assert costs.engine_kinds() is None
    rows = []
    for concurrency, matmul, decode in ((1, 1.0, 1.0), (8, 1.1, 3.0)):
        for kind, value in (("matmul", matmul), ("decode attention", decode)):
            rows.append(("engine", "invariant", "a model", concurrency, f"device time, {kind}", value, 1.0))
            rows.append(("engine", "default", "a model", concurrency, f"device time, {kind}", 1.0, 1.0))
        rows.append(("engine", "invariant", "a model", concurrency, "device time", matmul + decode, 2.0))
    _write(folder, "engine", rows)
    found = costs.engine_kinds()
    assert len(found) == 4 and found.ratio.max() == 3.0
    said = plain(costs.engine_sentence(found))
    assert "At concurrency 8 most of the extra device time is decode attention: 3.000 instead of 1.000 ms" in said
    assert "2.100 ms more in all" in said


def latent_rows(*rows):
    keys = ("kernel", "policy", "m", "value", "ratio", "commit")
    shape = costs.LATENT_GOAL_AT[0]
    return pd.DataFrame([dict(zip(keys, row), shape=shape, metric="time", unit="us", baseline=1.0, date={"old": "2026-01-01", "new": "2026-01-02"}[row[-1]]) for row in rows])


def test_latent_decode_is_held_against_flashmla_of_the_same_run(folder):
    assert costs.latent() is None and "No GPU has recorded latent" in costs.latent_sentence(None)
    rows = [
        ("flashmla", "default", 128, 100.0, 1.0, "new"), ("flashmla", "default", 8, 20.0, 1.0, "new"),
        ("triton", "default", 128, 90.0, 1.0, "new"), ("triton", "invariant-never-split", 128, 95.0, 1.05, "new"),
        ("triton", "invariant-free-8", 128, 130.0, 1.4, "new"), ("triton", "invariant-free-16", 128, 110.0, 1.2, "new"),
        ("triton", "invariant-free-8", 8, 30.0, 1.4, "new"), ("triton", "invariant-free-4", 128, 1.0, 0.1, "old"),
        ("flashmla", "default", 64, 50.0, 1.0, "old"), ("triton", "invariant-free-4", 64, 1.0, 0.1, "old"),
    ]  # fmt: skip
    latent_rows(*rows).to_csv(folder / "recorded" / "decode.csv", index=False)
    invariant.recorded.cache_clear()
    found = costs.latent()
    assert list(zip(found.batch, found.rule)) == [(8, "free-8"), (128, "never-split"), (128, "free-16"), (128, "free-8")]
    assert found["over FlashMLA"].tolist() == [1.5, 0.95, 1.1, 1.3]
    said = plain(costs.latent_sentence(found))
    assert "takes 1.10 to 1.50 of FlashMLA's time over 2 points" in said and "Reached: 1.10 under free-16" in said
    assert "Missed: 1.30 under free-8" in plain(costs.latent_sentence(found[found.rule != "free-16"].pipe(costs.named, "latent")))


def test_points_for_which_no_goal_is_set_stand_apart(folder, monkeypatch):
    write(folder, [(1, 2.0, 1.0), (32, 1.0, 1.5)], [(1, 1, ONE, 1.0)], [(1, 1, ONE)])
    monkeypatch.setattr(costs, "GOAL_WEIGHTS", ["N1000 K2000"])
    said = plain(costs.goal_sentence(costs.against_limit("gemm")))
    assert "Reached: 0.500, worst 0.500" in said and "The 1 other points, of an engine's weights, have 1.500." in said

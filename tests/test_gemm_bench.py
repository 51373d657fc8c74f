"""The tuner of the invariant GEMM: which weights and rows it takes, and what it writes. No kernel runs."""

import re

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from batch_variance.common import BadInput
from batch_variance.kernels import command
from batch_variance.kernels.gemm import bench
from batch_variance.kernels.gemm.invariant import DEFAULTS, Config, by_rows, segment_steps

K, N = SHAPE = 640, 48  # five steps of 128 products: no 4 segments
ROWS = (1, 16, 32, 64)
FASTEST = "parallel 16x32x128 w4 s6 tma", "parallel 64x32x128 w4 s6 tma", "parallel 64x128x128 w8 s4 tma swap"
WHERE = dict(gpu="G", driver="1", torch="2", triton="3", commit="c", date="d")


class Shape(bench._Shape):
    """Small whole numbers on a CPU, whose sums are exact, so that every product is in one class."""

    def __init__(self, K, N):
        self.K, self.N = K, N
        self.x, self.more = (torch.randint(-4, 5, (rows, K)).float() for rows in (64, 64))
        self.weights = [torch.randint(-4, 5, (N, K)).float()]
        self.exact = self.x @ self.weights[0].T
        self.bound = torch.zeros(1)

    def time(self, call, m):
        return call(torch.empty(0), None)


@pytest.fixture
def stood_in(monkeypatch):
    """Matmuls that are right and cost what their configuration's name and segments say."""

    def matmul(x, weight, config=None, count=None):
        if weight is None:
            return 1.0 + 0.1 * count + (str(config) not in FASTEST)
        if str(config) == "parallel 16x64x128 w4 s5 swap":
            return x @ weight.T + 1  # wrong, and in another class
        return x @ weight.T

    monkeypatch.setattr(bench, "_Shape", Shape)
    monkeypatch.setattr(bench, "matmul", matmul)
    monkeypatch.setattr(bench, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(bench, "library_times", lambda shape, rows: {m: 2.0 for m in rows})
    monkeypatch.setattr(bench, "alternating_microseconds", lambda first, second: (2.0, 1.0))
    monkeypatch.setattr(bench, "gpu_columns", lambda: WHERE)
    monkeypatch.setattr("batch_variance.kernels.recorded.gpu_columns", lambda: WHERE)
    monkeypatch.setattr(bench, "FAR_SIZES", (1, 17, 128))


def test_a_weight_of_ones_own_is_tuned_and_all_else_kept(stood_in, tmp_path, monkeypatch):
    recorded, table = tmp_path / "recorded", tmp_path / "tuned" / "gemm.csv"
    table.parent.mkdir()
    kept = "4096,4096,1,1,parallel 16x64x128 w4 s5 tma swap"
    table.write_text(f"n,k,segments,m,config\n{kept}\n")
    monkeypatch.setattr(bench, "tuned", lambda name: {})
    bench.run(recorded, 60.0, ROWS, (SHAPE,))
    lines = table.read_text().splitlines()
    assert lines[1] == kept
    assert lines[2:] == [f"48,640,1,{m},{name}" for m, name in zip(ROWS, (FASTEST[0], FASTEST[0], *FASTEST[1:2] * 2))]
    tuning = pd.read_csv(recorded / "gemm_tuning.csv", keep_default_na=False)
    assert set(tuning.segments) == {1, 2, 3} and set(tuning.m) == set(ROWS)
    wrong = tuning[tuning.wrong > 0]
    assert set(wrong.config) == {"parallel 16x64x128 w4 s5 swap"} and set(wrong.time_us) == {""}
    times = pd.read_csv(recorded / "gemm.csv").query("metric == 'time' and policy == 'invariant'")
    assert times["shape"].tolist() == ["N48 K640"] * 4 and times.m.tolist() == list(ROWS)
    classes = pd.read_csv(recorded / "gemm_classes.csv").query("candidate == 'invariant'")
    assert classes.m.tolist() == [1, 17, 128] and classes.bit_class.nunique() == 1

    # Another row count later: the class stays, and so do the other rows.
    known = {(N, K): (2, tuple((m, Config.parse(FASTEST[0])) for m in (1, 16)))}
    monkeypatch.setattr(bench, "tuned", lambda name: known)
    bench.run(recorded, 60.0, (64,), (SHAPE,))
    rows = [f"48,640,2,{m},{name}" for m, name in zip((1, 16, 64), (FASTEST[0], FASTEST[0], FASTEST[1]))]
    assert table.read_text().splitlines()[1:] == [kept, *rows]
    assert len(pd.read_csv(recorded / "gemm_tuning.csv")) == len(tuning)


def test_classes_alone_leave_the_table(stood_in, tmp_path, monkeypatch):
    known = {(N, K): (2, ((1, Config.parse(FASTEST[0])), (64, Config.parse(FASTEST[1]))))}
    monkeypatch.setattr(bench, "tuned", lambda name: known)
    bench.record_classes(tmp_path, (SHAPE,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemm.csv", "gemm_classes.csv"]
    found = pd.read_csv(tmp_path / "gemm.csv")
    assert found.metric.tolist() == ["bit classes"] * 2 and found.value.tolist() == [1, 1]
    assert set(pd.read_csv(tmp_path / "gemm_classes.csv").candidate) == {"library", "invariant", *FASTEST[:2]}
    with pytest.raises(BadInput, match="does not hold N5 K6: tune first"):
        bench.record_classes(tmp_path, ((6, 5),))


def test_segments_that_are_tried_can_be_cut():
    for K in range(16, 3000, 16):
        for N in (64, 4096, 14336):
            counts = bench.counts_tried(K, N)
            assert counts[0] == 1
            for count in counts:
                assert (count - 1) * segment_steps(K, count) * 128 < K


def test_a_table_that_ends_early_is_not_taken_for_many_rows():
    few, many = Config.parse("parallel 16x64x64 w4 s3"), Config.parse("in-turn 128x256x64 w8 s3")
    early, late = ((1, few), (256, few)), ((1, few), (4096, many))
    assert [by_rows(early, DEFAULTS, m) for m in (1, 2, 256)] == [few] * 3
    assert by_rows(early, DEFAULTS, 257) == by_rows((), DEFAULTS, 257) == DEFAULTS[3][1]
    assert by_rows(early, DEFAULTS, 8192) == DEFAULTS[-1][1]
    assert [by_rows(late, DEFAULTS, m) for m in (1, 2, 8192)] == [few, many, many]


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["gemm", "--weight", "4096"], "--weight '4096' is no weight"),
        (["gemm", "--weight", "0x4096"], "--weight '0x4096' is no weight"),
        (["nvfp4", "--weight", "64x64"], "only gemm tunes"),
        (["decode", "--rows", "16"], "only gemm tunes"),
        (["decode", "--classes-only"], "--classes-only with decode: gemm and nvfp4"),
        (["gemm", "--classes-only", "--rows", "16"], "--classes-only with gemm and --rows"),
    ],
)
def test_the_command_refuses(arguments, said):
    result = CliRunner().invoke(command.bench, arguments)
    assert isinstance(result.exception, BadInput) and re.search(re.escape(said), str(result.exception))


def test_the_command_hands_weights_and_rows_on(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(command, "resolve_device", lambda name: None)
    monkeypatch.setattr(bench, "run", lambda *args, **options: calls.append((args, options)))
    monkeypatch.setattr(bench, "record_classes", lambda *args, **options: calls.append((args, options)))
    arguments = ["gemm", "--out", str(tmp_path), "--weight", "96x64", "--weight", "8x256"]
    for more in (["--rows", "1", "--rows", "32"], ["--classes-only"]):
        assert CliRunner().invoke(command.bench, arguments + more).exit_code == 0
    shapes = ((64, 96), (256, 8))
    assert calls == [
        ((tmp_path, 200.0), dict(shapes=shapes, rows=(1, 32))),
        ((tmp_path,), dict(shapes=shapes)),
    ]

"""The profile: what the tool is asked and prints, what is recorded of it, and what is read out of it, by hand-made
tables with known answers."""

import re
import subprocess

import pandas as pd
import pytest
from click.testing import CliRunner

from batch_variance.common import BadInput
from batch_variance.kernels import command
from batch_variance.kernels.profile import bench, counters, tool
from batch_variance.kernels.profile.cases import Case, all_cases, best_rule
from batch_variance.kernels.recorded import COLUMNS, Benchmark

DRAM, TENSOR = "dram__throughput.avg.pct_of_peak_sustained_elapsed", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
NAMES = [counters.TIME, DRAM, "launch__grid_size", STALL.format("barrier"), "sm__ignored.avg"]
UNITS = ["ns", "%", "", "inst", "x"]


def printed(*launches: tuple) -> str:
    """What the tool prints of launches (kernel's name, values of NAMES), as `--csv --page raw` has it."""
    head = ["ID", "Process ID", "Process Name", "Kernel Name", "Block Size", *NAMES]
    rows = [head, ["", "", "", "", "", *UNITS]]
    rows += [[str(i), "7", "python", name, "(128, 1, 1)", *values] for i, (name, *values) in enumerate(launches)]
    table = "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)
    return f"==PROF== Connected to process 7 (/usr/bin/python3)\n{table}\n==PROF== Disconnected from process 7\n"


def mark(number: int) -> tuple:
    return ("profile_marker", "1,000", "0.1", str(number + 1), "0", "1")


TWO_CASES = printed(
    ("unmarked", "9", "9", "9", "9", "9"),
    mark(0),
    ("void at::native::(anonymous namespace)::vectorized<4, float>(int)", "2,500", "10.5", "64", "n/a", "1"),
    ("nvjet_tst_128x64(Params)", "12,500.5", "70", "132", "3.5", "1"),
    mark(2),
    ("in_turn", "20000", "40", "132", "1", "1"),
)


def test_the_tools_table_is_told_apart_by_markers():
    found = tool.parse(TWO_CASES)
    assert found.case.unique().tolist() == [0, 2] and "sm__ignored.avg" not in set(found.metric)
    first = found[(found.case == 0) & (found.launch == 0)].set_index("metric")
    assert first["name"].unique().tolist() == ["vectorized"] and first.value["time"] == 2.5 and first.unit["time"] == "us"
    assert first.value["launch__grid_size"] == 64 and STALL.format("barrier") not in first.index  # "n/a" is no value
    second = found[(found.case == 0) & (found.launch == 1)].set_index("metric").value
    assert second["time"] == pytest.approx(12.5005) and second[DRAM] == 70 and second[STALL.format("barrier")] == 3.5
    assert found[found.case == 2]["name"].unique().tolist() == ["in_turn"] and found[found.case == 2].launch.max() == 0


def test_a_log_without_a_table_says_why():
    with pytest.raises(BadInput, match="ERR_NVGPUCTRPERM"):
        tool.parse("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n")
    with pytest.raises(BadInput, match="nothing"):
        tool.parse("")


@pytest.mark.parametrize(
    "text,name",
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>, true>(Flash_fwd_params)", "flash_fwd_kernel"),
        ("void at::native::<unnamed>::fill<int>(int)", "fill"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"),
        ("parallel", "parallel"),
    ],
)
def test_a_kernels_bare_name(text, name):
    assert tool.kernel_name(text) == name


def test_counters_that_the_machine_lacks_are_left_out_and_named():
    every, missing = counters.wanted(None)
    assert not missing and counters.TIME in every and DRAM in every
    some = {"gpu__time_duration", "gpu__dram_throughput", "sm__inst_issued"}
    found, missing = counters.wanted(some)
    assert found == [counters.TIME, "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
                     "sm__inst_issued.avg.pct_of_peak_sustained_elapsed"]  # fmt: skip
    assert "L2" in missing and "DRAM" not in missing
    assert counters.value_of("DRAM", {found[1]: 12}) == 12.0 and counters.value_of("L2", {found[1]: 12}) is None


def test_a_stall_is_a_reason_and_neither_issuing_nor_double_counted():
    assert counters.stall_of(STALL.format("long_scoreboard")) == "long scoreboard"
    assert counters.stall_of("smsp__average_warps_issue_stalled_barrier_not_issued_per_issue_active.ratio") is None
    assert counters.stall_of(DRAM) is None


def test_known_counters_reads_the_tools_list(tmp_path):
    listing = "Device NVIDIA H200 (GH100)\n----\nMetric Name   Type\n--- ---\ndram__bytes_read     Counter  byte # of bytes\n" \
              "sm__throughput       Throughput %\n"  # fmt: skip
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\ncat <<'E'\n{listing}E\n")
    ncu.chmod(0o755)
    assert tool.known_counters(str(ncu)) == {"dram__bytes_read", "sm__throughput"}


def test_a_tool_that_lists_nothing_is_said_and_trusted(tmp_path, capsys):
    ncu = tmp_path / "ncu"
    ncu.write_text("#!/bin/sh\necho no device >&2; exit 1\n")
    ncu.chmod(0o755)
    assert tool.known_counters(str(ncu)) is None and "no device" in capsys.readouterr().out
    assert tool.known_counters(str(tmp_path / "absent")) is None


def test_the_tool_is_found_in_path_or_where_installers_put_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    monkeypatch.setattr(tool, "PLACES", (str(tmp_path / "*" / "ncu"),))
    with pytest.raises(BadInput, match="ncu .* is not in PATH"):
        tool.find()
    for version in ("2024.1", "2025.3"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    assert tool.find() == str(tmp_path / "2025.3" / "ncu")


def case(policy: str, shape: str = "N1 K1") -> Case:
    return Case("gemm", policy, shape, 4, lambda programs: lambda: None)


def recorded(text: str, cases: list[Case]) -> Benchmark:
    found = Benchmark("profile")
    bench.record(found, cases, tool.parse(text), 132)
    return found


THREE = [case("default"), case("other"), case("invariant")]


def test_a_case_is_recorded_by_its_sum_and_by_its_launches():
    table = pd.DataFrame(recorded(TWO_CASES, THREE).rows)
    assert list(table.columns) == list(COLUMNS) and (table.benchmark == "profile").all()
    assert set(table.policy) == {"default", "invariant"}  # the case that was not profiled has no row
    of = lambda kernel, policy, metric: table[  # noqa: E731
        (table.kernel == kernel) & (table.policy == policy) & (table.metric == metric)
    ].iloc[0]
    total = of("gemm", "invariant", "time")
    assert total.value == 20 and total.baseline == 15.0005 and total.ratio == pytest.approx(1.3333)
    assert of("gemm", "default", "launches").value == 2 and of("gemm", "invariant", "launches").value == 1
    # The longest launch is held against the default's longest, another launch against none.
    longest = of("gemm/in_turn", "invariant", DRAM)
    assert (longest.value, longest.baseline) == (40, 70) and pd.isna(of("gemm/vectorized", "default", DRAM).baseline)
    assert of("gemm", "invariant", counters.PROCESSORS).value == 132


def test_launches_of_one_name_are_numbered():
    text = printed(mark(0), ("same", "1000", "1", "1", "1", "1"), ("same", "2000", "1", "1", "1", "1"))
    table = pd.DataFrame(recorded(text, [case("invariant")]).rows)
    assert [name for name in table.kernel.unique() if "/" in name] == ["gemm/same", "gemm/same (2)"]
    assert table[table.metric == "time"].baseline.isna().all()  # no default was profiled


def test_a_case_profiled_again_keeps_no_row_of_before(tmp_path):
    first = recorded(printed(mark(0), ("old", "1000", "1", "1", "1", "1"), mark(1), ("else", "1", "1", "1", "1", "1")),
                     [case("default"), case("default", "N2 K2")])  # fmt: skip
    bench.save(tmp_path, first)
    bench.save(tmp_path, recorded(printed(mark(0), ("new", "3000", "1", "1", "1", "1")), [case("default")]))
    table = pd.read_csv(tmp_path / "profile.csv")
    assert set(table.kernel) == {"gemm", "gemm/new", "gemm/else"}
    again = table[(table.kernel == "gemm") & (table["shape"] == "N1 K1") & (table.metric == "time")]
    assert again.value.tolist() == [3.0]
    assert [path.name for path in tmp_path.iterdir()] == ["profile.csv"]


def test_a_run_plans_asks_and_records(tmp_path, monkeypatch, capfd):
    """All but the GPU: a stand-in for the tool is given the command and leaves its table in the log."""
    ncu = tmp_path / "ncu"
    ncu.write_text(f"""#!/bin/sh
[ "$1" = --query-metrics ] && {{ echo "gpu__time_duration Counter"; exit 0; }}
while [ $# -gt 0 ]; do
  case $1 in --log-file) log=$2;; --child) cp "$2" {tmp_path}/plan.json;; --metrics) echo "asked $2";; esac
  shift
done
cat > "$log" <<'E'
{TWO_CASES}E
""")
    ncu.chmod(0o755)
    monkeypatch.setattr(tool, "find", lambda: str(ncu))
    cases = [*THREE[:2], Case("gemm", "invariant", "N1 K1", 4, lambda programs: lambda: None, tune=lambda: 264)]
    monkeypatch.setattr("batch_variance.kernels.profile.cases.all_cases", lambda folder: cases)
    monkeypatch.setattr(bench, "compile_ahead", lambda plan, workers: None)
    monkeypatch.setattr(bench.torch.cuda, "get_device_properties", lambda device: type("P", (), {"multi_processor_count": 132}))
    bench.run(tmp_path / "out", 100.0)
    said = capfd.readouterr().out
    assert "asked gpu__time_duration.sum" in said and "none here for: DRAM, L2" in said and "2 of 3 cases" in said
    assert "flashmla was not found" in said and "gemm was not found" not in said
    assert re.search(r'\["gemm", "invariant", "N1 K1", 4\], 264', (tmp_path / "plan.json").read_text())
    assert len(pd.read_csv(tmp_path / "out" / "profile.csv")) > 6


def test_what_cannot_be_profiled_is_refused(tmp_path):
    with pytest.raises(BadInput, match="kernel 'norm' is not profiled: give some of gemm"):
        bench.run(tmp_path, 10.0, ("norm",))
    if not bench.torch.cuda.is_available():
        result = CliRunner().invoke(command.bench, ["profile", "--out", str(tmp_path)])
        assert isinstance(result.exception, BadInput) and "no usable GPU" in str(result.exception)


def test_the_module_runs_by_itself_and_exits_by_2(tmp_path):
    if bench.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    call = [bench.sys.executable, "-m", "batch_variance.kernels.profile", "--out", str(tmp_path)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 2 and re.fullmatch(r"error: .*no usable GPU.*\n", done.stderr)


def test_the_cases_are_pairs_and_each_has_its_own_key(tmp_path):
    cases = all_cases(tmp_path)
    keys = [one.key for one in cases]
    assert len(set(keys)) == len(keys)
    defaults = {(kernel, shape, m) for kernel, policy, shape, m in keys if policy == "default"}
    assert {(kernel, shape, m) for kernel, _, shape, m in keys} == defaults
    assert {one.kernel for one in cases} >= {"gemm", "triton", "prefill", "nvfp4"}
    assert all((one.tune is not None) == (one.kernel == "triton") for one in cases)


def test_the_rule_profiled_is_the_best_recorded(tmp_path):
    assert best_rule(tmp_path, " kv8 ") == "free-4"
    rows = [("free-2", 1.5), ("free-2", 1.0), ("free-8", 1.1), ("free-8", 1.1), ("never-split", 0.5)]
    pd.DataFrame(
        [dict(kernel="triton", metric="time", shape="h64 kv8 d128", policy=f"invariant-{rule}", ratio=r) for rule, r in rows]
    ).to_csv(tmp_path / "decode.csv", index=False)
    assert best_rule(tmp_path, " kv8 ") == "free-8" and best_rule(tmp_path, " topk2048 ") == "free-4"

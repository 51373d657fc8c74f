"""The profile: what the tool is asked and prints, what is recorded of it, and what is read out of it, by hand-made
tables with known answers."""

import json
import re
import subprocess
import time
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
from click.testing import CliRunner

from batch_variance.common import BadInput, data_path
from batch_variance.common.data import repository
from batch_variance.kernels import command
from batch_variance.kernels.profile import bench, counters, tool
from batch_variance.kernels.profile.cases import Case, all_cases, best_rule
from batch_variance.kernels.recorded import COLUMNS, Benchmark
from batch_variance.reporting.plots import invariant as plots
from batch_variance.studies import invariant, invariant_costs
from batch_variance.studies import profile as study
from batch_variance.studies.sources import plain

DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
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
    assert (
        first["name"].unique().tolist() == ["vectorized"] and first.value["time"] == 2.5 and first.unit["time"] == "us"
    )
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
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>, true>(Flash_fwd_params)",
            "flash_fwd_kernel",
        ),
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
    listing = (
        "Device NVIDIA H200 (GH100)\n----\nMetric Name   Type\n--- ---\n"
        "dram__bytes_read     Counter  byte # of bytes\nsm__throughput       Throughput %\n"
    )
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
    monkeypatch.setattr(
        bench.torch.cuda, "get_device_properties", lambda device: type("P", (), {"multi_processor_count": 132})
    )
    bench.run(tmp_path / "out", 100.0)
    said = capfd.readouterr().out
    assert "asked gpu__time_duration.sum" in said and "none here for: DRAM, L2" in said and "2 of 3 cases" in said
    assert "flashmla was not found" in said and "gemm was not found" not in said
    assert re.search(r'\["gemm", "invariant", "N1 K1", 4\], 264', (tmp_path / "plan.json").read_text())
    assert len(pd.read_csv(tmp_path / "out" / "profile.csv")) > 6
    ncu.write_text("#!/bin/sh\nwhile [ $1 != --log-file ]; do shift; done; echo '==ERROR== no counters' > $2; exit 1\n")
    with pytest.raises(BadInput, match="no counters"):
        bench.run(tmp_path / "other", 100.0)
    assert "no counters" in (tmp_path / "other" / "profile-unread.csv").read_text()


def test_a_launch_without_a_time_makes_no_case():
    text = printed(mark(0), ("odd", "n/a", "1", "1", "1", "1"), mark(2), ("good", "1000", "1", "1", "1", "1"))
    assert {row["policy"] for row in recorded(text, THREE).rows} == {"invariant"}


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
    grouped, latent = (lambda table, name=name: table["shape"].str.contains(name) for name in (" kv8 ", " topk2048 "))
    assert best_rule(tmp_path, grouped) == "free-4"
    rows = [("free-2", 1.5), ("free-2", 1.0), ("free-8", 1.1), ("free-8", 1.1), ("never-split", 0.5)]
    pd.DataFrame(
        [
            dict(kernel="triton", metric="time", shape="h64 kv8 d128", policy=f"invariant-{rule}", ratio=r)
            for rule, r in rows
        ]
    ).to_csv(tmp_path / "decode.csv", index=False)
    assert best_rule(tmp_path, grouped) == "free-8" and best_rule(tmp_path, latent) == "free-4"


# ---------------------------------------------------------------- the reading

ROLE = {role: names[0] for role, names in counters.ROLES.items()} | counters.LAUNCH
QUIET = {
    ROLE["DRAM"]: 30,
    ROLE["L2"]: 20,
    ROLE["L1"]: 25,
    ROLE["tensor pipe"]: 62,
    ROLE["issue slots"]: 12,
    ROLE["blocks"]: 132,
    ROLE["registers"]: 168,
    ROLE["shared bytes, dynamic"]: 65536,
    ROLE["shared bytes, static"]: 1024,
    "launch__occupancy_limit_registers": 3,
    "launch__occupancy_limit_shared_mem": 1,
    "launch__occupancy_limit_warps": 8,
    ROLE["cycles active"]: 930,
    ROLE["cycles elapsed"]: 1000,
    ROLE["warps active"]: 12.5,
    ROLE["instructions"]: 1000,
    ROLE["local loads"]: 0,
    ROLE["local stores"]: 0,
    ROLE["bank conflicts"]: 5,
    ROLE["shared wavefronts"]: 100,
    STALL.format("gmma"): 3,
    STALL.format("barrier"): 1,
    STALL.format("selected"): 1,
    STALL.format("not_selected"): 5,
}


def test_a_reading_worked_out_by_hand():
    one = study.reading(QUIET, 132)
    assert (one["nearest"], one["nearest_share"]) == ("tensor pipe", 0.62) and one["DRAM"] == 0.30
    assert (one["resident"], one["limiter"], one["waves"], one["used"], one["lost"]) == (
        1,
        "shared memory",
        1.0,
        132,
        0,
    )
    assert one["busy"] == 0.93 and one["warps"] == 8 and one["spills"] == 0 and one["conflicts"] == 0.05
    assert one["shared_kb"] == 65 and one["registers"] == 168
    # Two reasons are no stalls, yet they are of the warps' time: 3 of 10.
    assert (one["stall"], one["stall_share"]) == ("gmma", 0.3) and one["bound"] == "latency"
    assert study.sentence(one, 132) == (
        "tensor pipe 62%, DRAM 30%, L1 25%; 132 blocks, one wave on 132 of 132 multiprocessors; a "
        "multiprocessor busy 93% of the time; 8.0 of 64 warps (1 block fits, by shared memory); 30% of their time they "
        "wait for warp-group products (gmma)"
    )


@pytest.mark.parametrize(
    "changed,bound,said",
    [
        ({ROLE["DRAM"]: 75}, "DRAM", "DRAM 75%, tensor pipe 62%"),
        ({ROLE["DRAM"]: 74.9}, "latency", "DRAM 75%, tensor pipe"),
        ({ROLE["L2"]: 80, ROLE["tensor pipe"]: 79}, "L2", "L2 80%, tensor pipe 79%"),
        ({ROLE["tensor pipe"]: 91}, "tensor pipe", "tensor pipe 91%"),
        ({ROLE["multiprocessor"]: 80}, "another pipe", "another pipe 80%, tensor pipe 62%"),
        ({ROLE["multiprocessor"]: 64}, "latency", "tensor pipe 62%, DRAM 30%"),  # the tensor pipe by another count
        ({ROLE["issue slots"]: 88}, "issue slots", "issue slots 88%, tensor"),
        ({ROLE["local loads"]: 15, ROLE["local stores"]: 5}, "spills", "2.0% of instructions for spilled registers"),
        ({ROLE["local loads"]: 19}, "latency", "1.9% of instructions for spilled registers"),
        ({ROLE["blocks"]: 98}, "few blocks", "98 blocks, one wave on 98 of 132 multiprocessors"),
        ({ROLE["blocks"]: 99}, "latency", "99 blocks, one wave on 99 of 132"),
        ({ROLE["blocks"]: 198}, "last wave", "198 blocks, 1.50 waves, the last 50% full"),
        ({ROLE["blocks"]: 264}, "latency", "264 blocks, 2.00 waves, the last 100% full"),
        ({ROLE["blocks"]: 1330}, "latency", "1330 blocks, 10.08 waves, the last 8% full"),
        ({ROLE["cycles active"]: 700}, "idle multiprocessors", "a multiprocessor busy 70% of the time"),
        # A unit at its peak comes before anything that keeps units from it; spills before the shape of the launch.
        ({ROLE["DRAM"]: 90, ROLE["blocks"]: 10}, "DRAM", "10 blocks, one wave on 10 of 132"),
        ({ROLE["local loads"]: 30, ROLE["blocks"]: 10}, "spills", "3.0% of instructions"),
        ({ROLE["bank conflicts"]: 40}, "latency", "bank conflicts in 40% of shared memory's wavefronts"),
    ],
)
def test_the_bound_follows_the_rules(changed, bound, said):
    one = study.reading(QUIET | changed, 132)
    assert one["bound"] == bound and said in study.sentence(one, 132)


def test_a_tie_of_limiters_names_both():
    one = study.reading(QUIET | {"launch__occupancy_limit_registers": 1}, 132)
    assert one["limiter"] == "registers and shared memory"


@pytest.mark.parametrize("gone", sorted(QUIET))
def test_any_counter_may_be_missing(gone):
    less = {name: value for name, value in QUIET.items() if name != gone}
    assert "nan" not in study.sentence(study.reading(less, 132), 132)


def test_without_counters_nothing_is_claimed():
    one = study.reading({}, 132)
    assert one["bound"] == "unknown" and study.sentence(one, 132) == ""


def test_warps_that_never_wait_are_said_to_wait_for_nothing():
    none = {
        STALL.format("gmma"): 0,
        STALL.format("barrier"): 0,
        STALL.format("selected"): 0,
        STALL.format("not_selected"): 0,
    }
    assert "wait" not in study.sentence(study.reading({ROLE["DRAM"]: 9, STALL.format("selected"): 2}, 132), 132)
    assert "nan" not in study.sentence(study.reading(QUIET | none, 132), 132)


def test_every_bound_and_unit_has_words():
    assert set(study.LIMITS) < set(study.WORDS) and set(study.DRAWN) <= set(study.LIMITS)
    assert set(study.LIMITS) - {study.OTHER} <= set(counters.ROLES)


# ---------------------------------------------------------------- points and goals

WHERE = dict(gpu="G", driver="1", torch="t", triton="r", commit="c", date="d")


def points_table(name: str, rows) -> pd.DataFrame:
    """Recorded rows (kernel, policy, shape, m, metric, value, baseline)."""
    keys = ("kernel", "policy", "shape", "m", "metric", "value", "baseline")
    frame = pd.DataFrame([{"benchmark": name, **dict(zip(keys, row)), "unit": "us", **WHERE} for row in rows])
    return frame.assign(ratio=frame.value / frame.baseline)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "recorded").mkdir()
    for module in (invariant, invariant_costs):
        monkeypatch.setattr(module, "data_path", lambda *parts: tmp_path.joinpath(*parts))
    invariant.recorded.cache_clear()
    yield tmp_path / "recorded"
    invariant.recorded.cache_clear()


def write_points(folder):
    gemm = [
        ("gemm", "invariant", "N1 K1", 4, "time", 20.0, 15.0),
        ("gemm", "invariant", "N1 K1", 8, "time", 11.4, 10.0),
    ]
    points_table("gemm", gemm).to_csv(folder / "gemm.csv", index=False)
    latent = study.costs.LATENT_GOAL_AT[0]
    decode = [
        ("triton", "invariant-free-2", "h64 kv8 d128 1024 full", 1, "time", 12.0, 10.0),
        ("triton", "invariant-free-2", "h64 kv8 d128 1024 full", 4, "time", 10.0, 10.0),
        ("triton", "invariant-free-4", "h64 kv8 d128 1024 full", 1, "time", 30.0, 10.0),
        ("triton", "invariant-free-4", latent, 128, "time", 300.0, 200.0),
        ("triton", "invariant-free-8", latent, 128, "time", 310.0, 200.0),
        ("triton", "invariant-never-split", latent, 128, "time", 100.0, 200.0),
        ("flashmla", "default", latent, 128, "time", 100.0, 100.0),
    ]
    points_table("decode", decode).to_csv(folder / "decode.csv", index=False)
    prefill = [("prefill", "invariant-free-4", "p", 512, "time", 30.0, 10.0)]
    points_table("prefill", prefill).to_csv(folder / "prefill.csv", index=False)
    nvfp4 = [
        ("nvfp4", "invariant", "N1 K1", m, "time", ratio, 1.0) for m, ratio in ((32, 1.02), (33, 1.02), (64, 1.06))
    ]
    points_table("nvfp4", nvfp4).to_csv(folder / "nvfp4.csv", index=False)
    engine = [
        ("engine", "invariant", "e", 8, "step", 4.0, 3.0),
        ("engine", "invariant", "e", 8, "step, CUDA graphs", 1.2, 1.0),
        ("engine", "invariant", "e", 32, "step, CUDA graphs", 1.0, 1.0),
        ("engine", "invariant", "e", 8, "device time", 1.0, 0.9),
        ("engine", "invariant", "e", 8, "device time, matmul", 0.5, 0.42),
        ("engine", "invariant", "e", 8, "device time, other", 0.5, 0.48),
        ("engine", "invariant", "e", 32, "step", 4.0, 3.0),
        ("engine", "invariant", "e", 32, "device time", 3.9, 2.9),
        ("engine", "invariant", "e", 32, "device time, matmul", 1.9, 1.8),
        ("engine", "invariant", "e", 32, "device time, other", 2.0, 1.1),
    ]
    points_table("engine", engine).to_csv(folder / "engine.csv", index=False)


def test_the_points_that_miss_their_goal(folder):
    write_points(folder)
    points = study.goals()
    missed = study.misses(points, None)
    assert len(points) == 2 + 2 + 1 + 1 + 3 + 2 + 2
    assert list(missed[["point", "us", "ratio", "goal"]].itertuples(index=False, name=None)) == [
        ("GEMM, N1 K1, 4 rows", 20.0, 1.333, 1.15),
        ("decode free-2, h64 kv8 d128 1024 full, batch 1", 12.0, 1.2, 1.08),
        # the fastest free rule over FlashMLA's time
        (f"latent decode free-4, {study.costs.LATENT_GOAL_AT[0]}, batch 128", 300.0, 3.0, 1.25),
        ("prefill free-4, p", 30.0, 3.0, 1.0),
        ("NVFP4, N1 K1, 64 rows", 1.1, 1.06, 1.05),
        ("NVFP4, N1 K1, 32 rows", 1.0, 1.02, 1.0),
        ("engine step, e, concurrency 8", 4000.0, 1.333, 1.03),
        ("engine step, e, concurrency 32", 4000.0, 1.333, 1.03),
        ("engine step as a CUDA graph, e, concurrency 8", 1200.0, 1.2, 1.03),
    ]
    assert missed.bound.tolist()[:4] == ["not profiled"] * 4 and missed["default us"][2] == 100.0
    assert missed.bound.tolist()[6:] == ["launches from the host", "other", "matmul"]
    assert missed["busiest unit"].tolist()[5:] == ["", "device 25%", "device 98%", "device 83%"]
    lines = plain(study.worst_sentences(points, None, missed)).splitlines()
    assert len(lines) == 7 and lines[0] == "- GEMM, N1 K1, 4 rows, 1.33 against a goal of 1.15: not profiled."
    assert "device has work for 25% of a step (30% under the default)" in lines[5]
    assert "of 1.000 ms more 0.100 are the device's, most of them in matmul" in lines[5]
    said = plain(study.misses_sentence(points, missed))
    assert "9 of 13 recorded points" in said and "not profiled 6" in said and "bench profile" in said


def test_nothing_recorded_and_nothing_missed_are_said(folder):
    assert study.goals() is None and study.readings() is None and study.misses(None, None) is None
    assert "No GPU" in study.misses_sentence(None, None) and "No GPU" in study.absent_sentence()
    gemm = [("gemm", "invariant", "N1 K1", 4, "time", 10.0, 10.0)]
    points_table("gemm", gemm).to_csv(folder / "gemm.csv", index=False)
    invariant.recorded.cache_clear()
    points = study.goals()
    missed = study.misses(points, None)
    assert missed.empty and study.misses_sentence(points, missed) == "All 1 recorded points that have a goal reach it."
    assert study.shares(points, None) is None and study.worst_sentences(points, None, missed) == ""


# ---------------------------------------------------------------- a made-up profile, through to the notebook


def made_up(folder, cases: list[Case], short: float = 5.0) -> None:
    """profile.csv of the cases, each of two launches: QUIET's counters, tensor pipe 80% under the default, in 10 us (20
    for others), and a short one."""
    rows = []
    for number, one in enumerate(cases):
        default = one.policy == "default"
        values = QUIET | ({ROLE["tensor pipe"]: 80} if default else {})
        for launch, (name, us) in enumerate((("short", short), ("long", 10.0 if default else 20.0))):
            where = dict(case=number, launch=launch, name=name)
            rows.append({**where, "metric": "time", "unit": "us", "value": us})
            rows += [{**where, "metric": metric, "unit": "", "value": value} for metric, value in values.items()]
    found = Benchmark("profile")
    bench.record(found, cases, pd.DataFrame(rows), 132)
    bench.save(folder, found)
    invariant.recorded.cache_clear()


def test_readings_take_the_longest_launch_and_its_share(folder):
    made_up(folder, [case("default"), case("invariant")])
    found = study.readings().set_index("policy")
    assert found.launch.tolist() == ["long", "long"] and found.us.tolist() == [10, 20]
    assert found.of_call["invariant"] == 0.8 and found.bound.tolist() == ["tensor pipe", "latency"]
    assert found.says["default"].startswith("tensor pipe 80%, DRAM 30%")
    assert not set(study.SHOWN) - set(study.readings().columns)


def test_missed_points_meet_their_profile(folder):
    write_points(folder)
    latent = [("triton", "invariant-free-4"), ("flashmla", "default"), ("triton", "default")]
    made_up(folder, [case("default"), case("invariant")] + [Case(k, p, *study.costs.LATENT_GOAL_AT, None) for k, p in latent])
    points, read = study.goals(), study.readings()
    missed = study.misses(points, read)
    assert missed.bound.tolist()[:4] == [
        "latency",
        "not profiled",
        "latency",
        "not profiled",
    ]  # no other point's profile
    seen = missed[["busiest unit", "waves", "warps", "wait for"]].iloc[0].tolist()
    assert seen == ["tensor pipe 62%", "1.00", "8.0", "gmma 30%"]
    gemm, *rest = plain(study.worst_sentences(points, read, missed)).splitlines()
    assert gemm.startswith(
        "- GEMM, N1 K1, 4 rows, 1.33 against a goal of 1.15: **latency, no unit being near its peak**: "
    )
    assert gemm.endswith("(gmma); long takes 80% of the call.") and rest[0].endswith("not profiled.")
    beside = study.shares(points, read)
    assert beside.point.unique().tolist() == [
        "GEMM, N1 K1, 4 rows",
        f"latent decode free-4, {study.costs.LATENT_GOAL_AT[0]}, batch 128",
    ]
    tensor = beside[beside.unit == "tensor pipe"]
    assert tensor.default.tolist() == [0.8, 0.8] and tensor.invariant.tolist() == [0.62, 0.62]
    assert len(study.shares(points, read, most=1)) == len(study.DRAWN)
    said = plain(study.shares_sentence(beside))
    assert "over the 2 points drawn: DRAM 30% (default 30%)" in said and "tensor pipe 62% (default 80%)" in said
    assert "busiest unit of an invariant kernel is tensor pipe, at 62%" in said


def test_the_figure_draws_what_it_is_given(folder):
    write_points(folder)
    made_up(folder, [case("default"), case("invariant")])
    fig = plots.peak_shares(study.shares(study.goals(), study.readings()))
    assert [ax.get_title("left") for ax in fig.axes] == list(study.DRAWN)
    widths = {ax.get_title("left"): [round(bar.get_width(), 6) for bar in ax.patches] for ax in fig.axes}
    assert widths["tensor pipe"] == [80, 62] and widths["DRAM"] == [30, 30]


def section(monkeypatch) -> tuple[list, list, list]:
    """Run the notebook's cells of this section: the tables, figures and sentences that they show."""
    tables, figures, said = [], [], []
    names = dict(profile=study, study=invariant, plots=plots, Markdown=str, display=said.append)
    names |= dict(table=lambda frame, *rest, **more: tables.append((frame, rest)))
    names |= dict(show=lambda fig, name, *rest: figures.append((fig, name, rest)))
    notebook = nbformat.read(repository() / "notebooks" / "05_invariant.ipynb", as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.id.startswith("bounds") and cell.cell_type == "code"]
    assert len(cells) == 3
    for source in cells:
        exec(source, names)
    return tables, figures, said


def test_the_section_without_a_profile_says_so(folder, monkeypatch):
    write_points(folder)
    tables, figures, said = section(monkeypatch)
    assert len(tables) == 1 and not figures and study.absent_sentence() in said
    (folder / "engine.csv").unlink()
    for path in folder.glob("*.csv"):
        path.unlink()
    invariant.recorded.cache_clear()
    tables, figures, said = section(monkeypatch)
    assert not tables and not figures and len(said) == 2


def test_the_section_with_a_profile_shows_it(folder, monkeypatch):
    write_points(folder)
    made_up(folder, [case("default"), case("invariant")])
    tables, figures, said = section(monkeypatch)
    assert [name for _, name, _ in figures] == ["invariant-bounds"] and len(tables) == 2 and len(said) == 3
    assert study.absent_sentence() not in said and "Recorded: " in said[1]


def test_a_recorded_profile_is_not_passed_over(monkeypatch):
    """Of this repository: once data/recorded/profile.csv is there, the section draws it, and each missed point of the
    kernels that are profiled has its reading."""
    if not data_path("recorded", "profile.csv").exists():
        pytest.skip("no profile is recorded yet")
    tables, figures, said = section(monkeypatch)
    assert len(tables) == 2 and len(figures) == 1 and study.absent_sentence() not in said
    missed = tables[0][0]
    assert (missed.bound != "not profiled").sum() > len(missed) / 2 and (missed.bound != "unknown").all()


# ---------------------------------------------------------------- the process under the tool


def test_the_child_profiles_one_call_a_case_until_its_deadline(tmp_path, monkeypatch, capsys):
    seen = []
    fake = SimpleNamespace(
        zeros=lambda *_, **__: "where",
        int32=None,
        cuda=SimpleNamespace(
            synchronize=lambda: seen.append("sync"),
            profiler=SimpleNamespace(start=lambda: seen.append("start"), stop=lambda: seen.append("stop")),
        ),
    )
    monkeypatch.setattr(bench, "torch", fake)
    monkeypatch.setattr(
        "batch_variance.kernels.profile.marker.mark", lambda number, where: seen.append(("mark", number))
    )

    def broken(programs):
        raise RuntimeError("does not fit")

    good = Case("gemm", "invariant", "N1 K1", 4, lambda programs: lambda: seen.append(("call", programs)))
    cases = [Case("gemm", "default", "N1 K1", 4, broken), good]
    monkeypatch.setattr("batch_variance.kernels.profile.cases.all_cases", lambda folder: cases)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"cases": [[cases[0].key, None], [good.key, 66]], "deadline": time.time() + 100}))
    bench.child(plan)
    assert seen == [("mark", 0), ("call", 66), ("call", 66), "sync", "start", ("mark", 1), ("call", 66), "sync", "stop"]
    assert "FAILED gemm, default, N1 K1, 4: does not fit" in capsys.readouterr().out
    seen.clear()
    plan.write_text(json.dumps({"cases": [[good.key, None]], "deadline": time.time() - 1}))
    bench.child(plan)
    assert seen == [("mark", 0)] and "no time left for gemm, invariant" in capsys.readouterr().out

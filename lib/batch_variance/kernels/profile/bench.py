"""Profiles every case by hardware counters, on CUDA, under one process of Nsight Compute, and records it.

Launches are compiled and tuned before, outside the tool. Inside it a call is made twice unseen and once profiled, with
cold caches and clocks as they are; its time is that of the kernels alone, so it is not the benchmarks' time.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch

from ...common import BadInput, data_path, write_atomically
from ...common.data import write_text
from ..recorded import Benchmark
from . import tool
from .counters import PROCESSORS, value_of, wanted

SHARE = 0.8  # of the budget, after which no further case is begun
KERNELS = ("gemm", "triton", "flashmla", "prefill", "nvfp4")


def run(folder: Path, budget_seconds: float, only: tuple[str, ...] = (), workers: int = 9) -> None:
    """Profile every case that the budget allows; writes profile.csv in the folder. only: some of KERNELS.

    workers: processes that compile beforehand; an odd number, since default and invariant cases alternate. Raises
    BadInput for another kernel, and where Nsight Compute is missing or may not read counters.
    """
    for name in only:
        if name not in KERNELS:
            raise BadInput(f"kernel {name!r} is not profiled: give some of {', '.join(KERNELS)}.")
    start, ncu = time.time(), tool.find()
    counters, missing = wanted(tool.known_counters(ncu))
    print(f"{ncu}: {len(counters)} counters; none here for: {', '.join(missing) or 'nothing'}", flush=True)

    from .cases import all_cases  # needs triton, which a machine without ncu may lack, too

    cases = [case for case in all_cases(data_path("recorded")) if not only or case.kernel in only]
    absent = set(only or KERNELS) - {case.kernel for case in cases}
    print(f"{len(cases)} cases" + "".join(f"; {name} was not found" for name in sorted(absent)), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        plan, log = Path(scratch, "plan.json"), Path(scratch, "ncu.csv")
        plan.write_text(json.dumps({"cases": [[case.key, None] for case in cases]}))
        compile_ahead(plan, workers)
        print(f"compiled ahead in {time.time() - start:.0f} s", flush=True)
        programs = [_tuned(case) for case in cases]
        print(f"tuned after {time.time() - start:.0f} s: {[count for count in programs if count]}", flush=True)
        torch.cuda.empty_cache()
        work = [[case.key, count] for case, count in zip(cases, programs)]
        plan.write_text(json.dumps({"cases": work, "deadline": start + SHARE * budget_seconds}))
        child = [sys.executable, "-m", "batch_variance.kernels.profile", "--child", str(plan)]
        try:
            code = subprocess.run(tool.command(ncu, counters, log, child), timeout=budget_seconds + 60).returncode
        except subprocess.TimeoutExpired:
            raise BadInput(f"ncu did not end within {budget_seconds + 60:.0f} s: give a larger budget.") from None
        text = log.read_text(errors="replace") if log.exists() else ""
    print(f"ncu ended with status {code} after {time.time() - start:.0f} s", flush=True)
    for line in text.splitlines():
        if line.startswith("==ERROR=="):
            print(line, flush=True)
    bench = Benchmark("profile")
    try:
        found = tool.parse(text)
        record(bench, cases, found, torch.cuda.get_device_properties("cuda").multi_processor_count)
    except Exception:
        kept = write_text(folder / "profile-unread.csv", text)
        print(f"what ncu printed could not be read; it is kept in {kept}", flush=True)
        raise
    save(folder, bench)
    print(f"{found.case.nunique()} of {len(cases)} cases profiled in {time.time() - start:.0f} s", flush=True)


def compile_ahead(plan: Path, workers: int) -> None:
    """Run every case once in processes of their own, which share the compiler's cache; failures show up later."""
    command = [sys.executable, "-m", "batch_variance.kernels.profile", "--compile", str(plan)]
    running = [subprocess.Popen([*command, str(i), str(workers)], stderr=subprocess.DEVNULL) for i in range(workers)]
    for one in running:
        one.wait()


def compile_share(plan: Path, index: int, workers: int) -> None:
    """One process's part of `compile_ahead`."""
    for case, _ in _planned(plan)[index::workers]:
        try:
            case.make(None)()
        except Exception as error:  # noqa: BLE001 - the profiled run says so again
            print(f"compile {case}: {(str(error) or repr(error)).splitlines()[0]}", flush=True)
    torch.cuda.synchronize()


def child(plan: Path) -> None:
    """What runs under the tool: each planned case up to the deadline, a marker and one call profiled."""
    from .marker import mark

    deadline = json.loads(plan.read_text())["deadline"]
    where = torch.zeros(1, dtype=torch.int32, device="cuda")
    mark(0, where)
    for number, (case, programs) in enumerate(_planned(plan)):
        if time.time() > deadline:
            print(f"no time left for {case} and what follows", flush=True)
            break
        try:
            call = case.make(programs)
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            try:
                mark(number, where)
                call()
                torch.cuda.synchronize()
            finally:
                torch.cuda.profiler.stop()
        except Exception as error:  # noqa: BLE001 - the profile goes on past any one case
            print(f"FAILED {case}: {(str(error) or repr(error)).splitlines()[0]}", flush=True)


def _planned(plan: Path) -> list:
    """(case, programs or None) in the plan's order."""
    from .cases import all_cases

    known = {case.key: case for case in all_cases(data_path("recorded"))}
    return [(known[tuple(key)], programs) for key, programs in json.loads(plan.read_text())["cases"]]


def _tuned(case) -> int | None:
    if case.tune is None:
        return None
    try:
        return case.tune()
    except Exception as error:  # noqa: BLE001 - the profiled run says so again
        print(f"tune {case}: {(str(error) or repr(error)).splitlines()[0]}", flush=True)
        return None


def record(bench: Benchmark, cases: list, found: pd.DataFrame, processors: int) -> None:
    """Add a case's rows: under its kernel's name the time of all its launches, their count and the device's
    multiprocessors; under ``kernel/launch`` the counters of each launch. The baseline of the longest launch is the
    default's longest at the same point; other launches have none. found: `tool.parse`."""
    timed = found[found.case.isin(found[found.metric == "time"].case)]
    launches = {cases[number].key: mine for number, mine in timed.groupby("case")}
    for case in cases:
        mine = launches.get(case.key)
        base = launches.get((case.kernel, "default", case.shape, case.m))
        if mine is None:
            continue
        where = case.policy, case.shape, case.m
        add = lambda *rest: bench.add(case.kernel, *where, *rest)  # noqa: E731
        total = _times(mine).sum()
        add("time", "us", total, float("nan") if base is None else _times(base).sum())
        add("launches", "count", mine.launch.nunique(), float("nan") if base is None else base.launch.nunique())
        add(PROCESSORS, "count", processors, processors)
        beside = {} if base is None else _longest(base)
        longest = _times(mine).idxmax()
        seen: dict[str, int] = {}
        for launch, part in mine.groupby("launch"):
            name = part["name"].iloc[0]
            seen[name] = seen.get(name, 0) + 1
            label = f"{case.kernel}/{name}" + (f" ({seen[name]})" if seen[name] > 1 else "")
            for one in part.itertuples():
                baseline = beside.get(one.metric, float("nan")) if launch == longest else float("nan")
                bench.add(label, *where, one.metric, one.unit, one.value, baseline)
        said = {role: value_of(role, _longest(mine)) for role in ("DRAM", "L2", "tensor pipe", "issue slots")}
        shares = ", ".join(f"{role} {value:.0f}%" for role, value in said.items() if value is not None)
        print(f"{case}: {total:.1f} us in {mine.launch.nunique()} launches; {shares}", flush=True)


def _times(mine: pd.DataFrame) -> pd.Series:
    return mine[mine.metric == "time"].set_index("launch").value


def _longest(mine: pd.DataFrame) -> dict[str, float]:
    part = mine[mine.launch == _times(mine).idxmax()]
    return dict(zip(part.metric, part.value))


def save(folder: Path, bench: Benchmark) -> Path:
    """Write profile.csv in the folder. Of a case profiled again, on the same GPU, no row of an earlier run stays: its
    launches may have other names now."""
    path, table = folder / "profile.csv", pd.DataFrame(bench.rows)
    if path.exists() and len(table):
        old, again = pd.read_csv(path), set(_cases_of(table))
        table = pd.concat([old[[one not in again for one in _cases_of(old)]], table])
    return write_atomically(path, lambda temporary: table.to_csv(temporary, index=False))


def _cases_of(table: pd.DataFrame) -> list[tuple]:
    return list(zip(table.kernel.str.partition("/")[0], table.policy, table["shape"], table.m, table.gpu))

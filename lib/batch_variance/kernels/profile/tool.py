"""Nsight Compute from outside: where it lies, which counters it knows here, how it is called, and what it printed.

Launches are told apart by markers (``marker``): the grid of one is the number of the case that follows it.
"""

import io
import re
import shutil
import subprocess
from glob import glob
from pathlib import Path

import pandas as pd

from ...common import BadInput
from .counters import LAUNCH, SECTIONS, TIME, kept

MARKER = "profile_marker"
PLACES = (
    "/usr/local/cuda/bin/ncu",
    "/usr/local/cuda-*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/NVIDIA-Nsight-Compute*/ncu",
)
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}


def find() -> str:
    """Path of ``ncu``, from PATH or the places where NVIDIA's installers put it, the newest. Raises BadInput where
    there is none."""
    found = shutil.which("ncu")
    if found is None:
        there = [path for place in PLACES for path in sorted(glob(place), reverse=True)]
        found = there[0] if there else None
    if found is None:
        raise BadInput("ncu (NVIDIA Nsight Compute) is not in PATH nor under /usr/local or /opt/nvidia: install it.")
    return found


def known_counters(ncu: str) -> set[str] | None:
    """Base names of the counters that ncu knows for this device; None, said on stdout, where it does not list them."""
    try:
        done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"ncu --query-metrics failed ({error}): counters are asked for on trust", flush=True)
        return None
    found = set(re.findall(r"^([a-z0-9]+__\w+)", done.stdout, flags=re.M))
    if not found:
        said = (done.stdout + done.stderr).strip().splitlines()
        print(f"ncu --query-metrics lists nothing ({said[-1:]}): counters are asked for on trust", flush=True)
    return found or None


def command(ncu: str, counters: list[str], log: Path, child: list[str]) -> list[str]:
    """ncu over a child process that starts and stops the profiler itself. Clocks are left as they are; caches are
    flushed before each pass."""
    sections = [word for name in SECTIONS for word in ("--section", name)]
    return [
        ncu,
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
        *("--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all"),
        *("--target-processes", "all", "--apply-rules", "no"),
        *sections,
        *("--metrics", ",".join(counters)),
        *child,
    ]


def parse(text: str) -> pd.DataFrame:
    """What ``command`` logged, long: case (its number), launch (from 0 within the case), name (of the GPU kernel),
    metric, unit, value. Times are in us under the metric "time". Launches before the first marker are left out.

    Raises BadInput where the text holds no table, as when ncu was not allowed to read counters.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = [line for line in lines if line.strip()][-3:]
        raise BadInput(f"ncu printed no table ({' / '.join(said) or 'nothing'}): it must be allowed to read counters.")
    body = "\n".join(line for line in lines[start:] if line.startswith('"'))
    table = pd.read_csv(io.StringIO(body), dtype=str, keep_default_na=False)
    units, table = table.iloc[0], table.iloc[1:]
    columns = [name for name in table.columns if kept(name)]
    rows, case, launch = [], None, 0
    for record in table.to_dict("records"):
        if MARKER in record["Kernel Name"]:
            case, launch = int(_number(record[LAUNCH["blocks"]])) - 1, 0
            continue
        if case is None:
            continue
        where = {"case": case, "launch": launch, "name": kernel_name(record["Kernel Name"])}
        for name in columns:
            value = _number(record[name])
            if value is None:
                continue
            if name == TIME:
                rows.append({**where, "metric": "time", "unit": "us", "value": value * MICROSECONDS[units[name]]})
            else:
                rows.append({**where, "metric": name, "unit": units[name] or "count", "value": value})
        launch += 1
    return pd.DataFrame(rows, columns=["case", "launch", "name", "metric", "unit", "value"])


def kernel_name(text: str) -> str:
    """The bare name of a kernel: no return type, namespaces, template arguments or parameters."""
    text = text.replace("(anonymous namespace)::", "").replace("<unnamed>::", "").removeprefix("void ")
    return re.split(r"[<(]", text, maxsplit=1)[0].strip().rpartition("::")[2]


def _number(text: str) -> float | None:
    """A printed number, with commas at thousands or instances in brackets; None for "n/a" and the like."""
    try:
        return float(text.partition(" (")[0].replace(",", ""))
    except ValueError:
        return None

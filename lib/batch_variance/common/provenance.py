"""What ran: commit, versions, device. Stamped on every report page and every recorded table."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "numpy", "pandas", "transformers", "papermill", "nbconvert")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """Short commit of the checkout, with ``+`` where tracked files were changed; ``unknown`` outside git.

    ``BATCH_VARIANCE_COMMIT`` names it where the code travels without its git folder.
    """
    given = os.environ.get("BATCH_VARIANCE_COMMIT")
    if given:
        return given
    name = _run("git", "rev-parse", "--short=12", "HEAD")
    if not name:
        return "unknown"
    return name + ("+" if _run("git", "status", "--porcelain", "--untracked-files=no") else "")


def version(package: str) -> str:
    """Installed version of a distribution, or ``absent``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def environment() -> dict:
    """Commit, date (UTC), versions, processor, thread count and GPU, as plain strings and integers."""
    found = {
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "gpu": "none",
        "driver": "none",
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        drivers = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
        found["driver"] = drivers.splitlines()[0]  # a line for each GPU, of one driver
    return found


GPU_COLUMNS = ("gpu", "driver", "torch", "triton", "commit", "date")


def gpu_columns() -> dict:
    """GPU_COLUMNS, the provenance of every row of a recorded table."""
    found = environment()
    return {
        "gpu": found["gpu"],
        "driver": found["driver"],
        "torch": torch.__version__,
        "triton": found["packages"]["triton"],
        "commit": found["commit"],
        "date": found["date"][:10],
    }

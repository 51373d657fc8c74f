"""Runs a script in a process of its own, where Triton's interpreter is on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def interpreted(script: str):
    """What the last line that ``script``, beside this file, prints says in JSON. Skips where Triton is absent."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])

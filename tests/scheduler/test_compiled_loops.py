"""Compiled loops stay within their arrays: random runs of the scheduler with indices checked.

Compiled as they are served, a loop does not look whether an index is in range.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_no_index_is_out_of_range_in_random_runs(tmp_path: Path) -> None:
    # In a folder of their own: those kept for serving are compiled without the checks.
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    for arguments in (["100", "100"], ["200", "201", "sessions"]):
        command = [sys.executable, "-m", "tests.scheduler.random_runs", *arguments]
        process = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **checked},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, process.stderr
        assert "0 violations" in process.stdout

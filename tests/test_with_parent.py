"""A process that a test run starts ends with it, also where the run is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("with_parent.py")
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, sys.argv[1], sys.executable, "-c", sys.argv[2]])
time.sleep(600)
"""
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_child_of_a_killed_parent_ends():
    words = [sys.executable, "-c", PARENT, str(SCRIPT), CHILD]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while alive(child) and time.monotonic() < end:
            time.sleep(0.05)
        assert not alive(child)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"  # one that has ended may wait to be counted by whoever took it over

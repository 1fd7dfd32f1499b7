"""Kill a function at random moments: in forks of a process that has only imported things."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path


def kill_in_a_new_process(module: str, function: str, folder: Path, kills: int = 20) -> None:
    """``kill_often`` on ``module.function`` in a process of its own, since threads do not fork."""
    here = Path(__file__).parent
    folders = [str(here), *(str(file.parent) for file in here.rglob(f"{module}.py"))]
    call = f"kills.kill_often({module}.{function}, {str(folder)!r}, {kills})"
    script = f"import sys; sys.path[:0] = {folders!r}; import kills, {module}; {call}"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=900)


def kill_often(function, folder: str, kills: int) -> None:
    """Run ``function(folder)`` and kill it within 0.3 s after it has made the file ``ready``."""
    chance, ready = random.Random(0), Path(folder) / "ready"
    for _ in range(kills):
        child = os.fork()
        if not child:
            try:
                function(Path(folder))
            finally:
                os._exit(1)
        while not ready.exists():
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it was ready"
            time.sleep(0.005)
        time.sleep(0.3 * chance.random())
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "it ended before it was killed"
        ready.unlink()

"""``python with_parent.py COMMAND ...``: the command is told to stop when its parent has gone.

A test run that is killed cleans nothing up, and would leave a server behind.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # Linux; kept when the process becomes another program

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(sys.argv[1], sys.argv[1:])

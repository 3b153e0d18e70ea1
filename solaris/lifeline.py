"""Ties a child process to its parent: when the parent ends, however it ends, the child gets SIGTERM.

In: a command. Out: the command that runs it so, under the same process id. Never: outlives a parent that got SIGKILL, on Linux;
elsewhere the kernel has no such tie, and the command simply runs.

The tie is to the thread that started the child, so start children from one that stays. This file is run as a script, in an
interpreter without our packages: it sets the tie and becomes the command.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tied(command: Sequence[str]) -> list[str]:
    """The command whose process ends with this one."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def tie(parent: int) -> None:
    """Let this process get SIGTERM when `parent`, which started it, ends; also if it has ended already."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the process can't be tied to its parent (prctl)")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    tie(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])

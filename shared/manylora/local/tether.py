"""`python -I -S tether.py PARENT_PID COMMAND...`: becomes COMMAND, which the kernel kills when the parent ends.

Run as a file, with the standard library alone: it costs a few milliseconds. Linux alone has PR_SET_PDEATHSIG.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before the tether held
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

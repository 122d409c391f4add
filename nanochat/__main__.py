"""``python -m nanochat``, and the ``nanochat`` command."""

import contextlib
import os
import signal
import sys


def start() -> int:
    """Run the command line; returns the exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt of the imports is no traceback
    from nanochat.cli import main
    from nanochat.interrupts import STATUS

    status = main()
    if status == STATUS:
        # An interrupt that has passed through exec(), as dataclasses call it in imports, makes Python end by
        # the signal although it was handled; a second one while it tears itself down would be printed.
        with contextlib.suppress(OSError, AttributeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(STATUS)
    return status


if __name__ == "__main__":
    sys.exit(start())

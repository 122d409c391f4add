"""``python -m nanochat``, and the ``nanochat`` command."""

import signal
import sys


def start() -> int:
    """Run the command line; returns the exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt of the imports is no traceback
    from nanochat.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(start())

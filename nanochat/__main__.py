"""``python -m nanochat``."""

import sys

from nanochat.cli import main

if __name__ == "__main__":
    sys.exit(main())

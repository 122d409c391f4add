"""The Triton kernels' tests run on a GPU, or in a process of their own under Triton's interpreter.

Whether kernels are interpreted is fixed when triton is imported, and the other tests' process must not be.
`test_interpreted.py` starts that process; only there, and where there is a GPU, are the files collected.
"""

from __future__ import annotations

import os

import torch

collect_ignore_glob = (
    [] if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available() else ["test_triton_*.py"]
)

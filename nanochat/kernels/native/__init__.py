"""A decoder's ops in C, for the few rows at which PyTorch's calls cost more than their work. Optional.

`build.py` compiles them when nanochat is installed; without a C compiler, PyTorch's versions do. `ops` has the
ops, `program` records many of them to run as one. docs/kernels.md has the measurements.
"""

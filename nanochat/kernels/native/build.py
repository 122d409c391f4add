"""Compiles the native kernels with the system's C compiler into one library beside their sources.

Run by the installation (`hatch_build.py`) and `make`; by hand, `python nanochat/kernels/native/build.py`. Nothing
compiles while a user waits for a start. Imports nothing of nanochat, since it runs before that is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "kernels.bin"
"""The same name everywhere: only this package loads it, by its path. Not ".so", which Python takes for a module."""
_FLAGS = ["-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"]
# -O3 takes three times as long to compile, for little but on the best instruction set.
_AVX512 = "-O3 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 -mavx2 -mfma"
_X86_SETS = {
    "amx": f"{_AVX512} -mamx-tile -mamx-bf16",
    "avx512": _AVX512,
    "avx2": "-O2 -mavx2 -mfma",
    "plain": "-O2",
}
_OTHER_SETS = {"plain": "-O3"}
_LINK = ["-O2", "-lpthread", "-lm"]


def sources_hash() -> str:
    """Of all C files here, and the options they are compiled with: a library built from others is not used."""
    options = [_LINK, _FLAGS, sorted((_X86_SETS if _is_x86() else _OTHER_SETS).items())]
    digest = hashlib.sha256(repr(options).encode())
    for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def build() -> str:
    """Compile; returns what instruction sets the library has code for, a word each.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """
    command = _compiler()
    if shutil.which(command[0]) is None:
        raise RuntimeError("there is no C compiler")
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix="build-") as temporary:
        folder = Path(temporary)
        compiling = {
            name: _start(
                [*command, *_FLAGS, *flags.split(), "-c", f"isa_{name}.c", "-o", f"{folder / name}.o"]
            )
            for name, flags in (_X86_SETS if _is_x86() else _OTHER_SETS).items()
            if name != "amx" or sys.platform == "linux"  # which other systems don't let programs use
        }
        # A compiler may be too old for the newest instructions: then the library does without them.
        failures = {name: _failure(process) for name, process in compiling.items()}
        if failures["plain"]:
            raise RuntimeError(failures["plain"])
        built = [name for name, failure in failures.items() if not failure]
        defines = [f"-DWITH_{name.upper()}" for name in built]
        defines += [f'-DSOURCES="{sources_hash()}"', f'-DCOMPILER="{_version(command)}"']
        objects = [f"{folder / name}.o" for name in built]
        library = folder / LIBRARY.name
        link = [*command, *_FLAGS, *defines, "-shared", "pool.c", *objects, "-o", str(library), *_LINK]
        if failure := _failure(_start(link)):
            raise RuntimeError(failure)
        library.replace(LIBRARY)  # at once: another process may be loading it
    return ", ".join(built)


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "clang"]


def _version(command: list[str]) -> str:
    """What a compiler says of itself, in letters that need no quotes; empty if it says nothing."""
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return re.sub(r"[^\w.+ -]", "", said.partition("\n")[0])


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=FOLDER, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _failure(process: subprocess.Popen[str]) -> str:
    """Wait for it; its last words if it failed."""
    _, errors = process.communicate()
    return "" if process.returncode == 0 else errors.strip()[-1000:] or "the C compiler failed"


def is_current() -> bool:
    """Whether the library is there, built from the sources that are there and by the compiler that would be used."""
    try:
        handle = ctypes.CDLL(str(LIBRARY))
        handle.nanochat_sources.restype = handle.nanochat_compiler.restype = ctypes.c_char_p
        if handle.nanochat_sources() != sources_hash().encode():
            return False
        version = _version(_compiler())
        return not version or bool(handle.nanochat_compiler() == version.encode())
    except (OSError, AttributeError):
        return False


if __name__ == "__main__" and not ("--if-changed" in sys.argv and is_current()):
    try:
        print(f"Native kernels for the CPU: {build()}.")
    except (RuntimeError, OSError) as error:
        print(
            f"No native kernels for the CPU ({error}): PyTorch's are used, which are slower.", file=sys.stderr
        )

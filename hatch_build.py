"""Compiles the native kernels when nanochat is installed, if there is a C compiler."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("nanochat/kernels/native")


class NativeKernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the library to the wheel, which then is for this kind of machine only; without one, changes nothing."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built, an editable one too."""
        module = runpy.run_path(str(Path(self.root) / NATIVE / "build.py"))
        try:
            # Another extra of an installed copy is no reason to compile for a minute again.
            built = "built already" if module["is_current"]() else module["build"]()
        except (RuntimeError, OSError) as error:
            self.app.display_warning(f"No native kernels for the CPU ({error}): PyTorch's are used.")
            return
        self.app.display_info(f"Native kernels for the CPU: {built}.")
        library = NATIVE / module["LIBRARY"].name
        build_data["artifacts"].append(library.as_posix())
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

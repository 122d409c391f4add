"""What installing nanochat compiles: the native kernels, and only if those at hand are of other sources."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("is_current", [True, False])
def test_kernels_are_compiled_only_if_their_sources_changed(
    is_current: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    for name in (
        "hatchling",
        "hatchling.builders",
        "hatchling.builders.hooks",
        "hatchling.builders.hooks.plugin",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["NativeKernelsHook"]()
    hook.root, hook.app = str(ROOT), SimpleNamespace(display_info=lambda text: None)
    builds: list[str] = []
    module = {
        "is_current": lambda: is_current,
        "build": lambda: builds.append("plain") or "plain",
        "LIBRARY": Path("kernels.bin"),
    }
    monkeypatch.setattr(runpy, "run_path", lambda path: module)
    data: dict[str, Any] = {"artifacts": []}
    hook.initialize("0.1", data)
    assert builds == ([] if is_current else ["plain"])
    assert data["artifacts"] == ["nanochat/kernels/native/kernels.bin"]
    assert data["infer_tag"]

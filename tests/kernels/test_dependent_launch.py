"""Kernels that start before the one before them has ended read nothing early but what they declare.

Under programmatic dependent launch a kernel may run while its predecessor still writes. What it reads before
``gdc_wait`` must have been written by something older. A wrong read shows on a GPU now and then, in few tokens;
here it is looked for in the kernels' sources. ``READ_EARLY`` in a kernel's module says what may be read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "nanochat" / "kernels"
SOURCES = {path.name: path.read_text() for path in sorted(KERNELS.glob("*.py"))}
WAITS = {"gdc_wait", "enter"}


def faults(sources: dict[str, str]) -> list[str]:
    """What is wrong with these modules' kernels and launches, each in a few words."""
    trees = {name: ast.parse(source) for name, source in sources.items()}
    kernels = {kernel.name: kernel for tree in trees.values() for kernel in _jit_functions(tree)}
    found = []
    for name, tree in trees.items():
        declared = _declared(tree)
        for kernel in _jit_functions(tree):
            if kernel.name != "enter" and _wait_at(kernel) is not None:
                found += [f"{name}: {kernel.name} {fault}" for fault in _early_faults(kernel, declared)]
        for writer in filter(None, declared.values()):
            if writer not in kernels or "gdc_launch_dependents" in ast.unparse(kernels[writer]):
                found.append(f"{name}: {writer} is none, or lets the next kernel start early")
        found += [f"{name}: {fault}" for fault in _launch_faults(tree, kernels)]
    return found


def _jit_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            yield node


def _declared(tree: ast.Module) -> dict[str, str | None]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "READ_EARLY":
            declared: dict[str, str | None] = ast.literal_eval(node.value)
            return declared
    return {}


def _called(node: ast.AST) -> set[str]:
    """The last names of all functions that are called in it."""
    return {
        ast.unparse(call.func).rpartition(".")[2] for call in ast.walk(node) if isinstance(call, ast.Call)
    }


def _wait_at(kernel: ast.FunctionDef) -> int | None:
    """The first statement in which it waits."""
    return next((index for index, node in enumerate(kernel.body) if _called(node) & WAITS), None)


def _early_faults(kernel: ast.FunctionDef, declared: dict[str, str | None]) -> Iterator[str]:
    at = _wait_at(kernel) or 0
    early, wait = kernel.body[:at], kernel.body[at]
    if not isinstance(wait, ast.Expr | ast.If) or "_ptr" in ast.unparse(wait):
        yield "waits in the midst of other things"
    for node in early:
        if any(isinstance(inner, ast.Return) for inner in ast.walk(node)):
            yield "may return before it waits"
        if any("store" in name or "atomic" in name for name in _called(node)):
            yield "writes before it waits"
    pointers = {name: {name} for argument in kernel.args.args if (name := argument.arg).endswith("_ptr")}
    for name in sorted(_given_away(early, pointers) - declared.keys()):
        yield f"takes {name} before it waits"


def _given_away(statements: Sequence[ast.stmt], pointers: dict[str, set[str]]) -> set[str]:
    """Parameters that these statements give to a function, such as a load.

    ``pointers``: by a variable's name, the parameters that it may have been made from; what is assigned is added.
    """
    given: set[str] = set()
    for node in statements:
        bodies = [getattr(node, name, []) for name in ("body", "orelse")]
        inside = {id(inner) for body in bodies for statement in body for inner in ast.walk(statement)}
        own = [inner for inner in ast.walk(node) if id(inner) not in inside]
        to_calls = [
            part for call in own if isinstance(call, ast.Call) for part in (*call.args, *call.keywords)
        ]
        given |= set().union(*(_made_from(part, pointers) for part in to_calls))
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    made_from = _made_from(node.value, pointers) - given
                    pointers[target.id] = pointers.get(target.id, set()) | made_from
        for body in bodies:
            given |= _given_away(body, pointers)
    return given


def _made_from(node: ast.AST, pointers: dict[str, set[str]]) -> set[str]:
    """The parameters in an expression, but for asking whether there is one or of what type it is."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
        return set()
    if isinstance(node, ast.Attribute) and node.attr == "dtype":
        return set()
    if isinstance(node, ast.Name):
        return pointers.get(node.id, set())
    return set().union(*(_made_from(child, pointers) for child in ast.iter_child_nodes(node)))


def _launch_faults(tree: ast.Module, kernels: dict[str, ast.FunctionDef]) -> Iterator[str]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Subscript):
            continue
        kernel = kernels.get(ast.unparse(call.func.value))
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if kernel is None:
            continue
        is_early = "launch_pdl" in given or None in given  # shared options may have it
        if is_early and _wait_at(kernel) is None:
            yield f"{kernel.name} is started early, and never waits"
        if "launch_pdl" in given and given["launch_pdl"] not in (given.get("DEPENDENT"), given.get("EARLY")):
            yield f"{kernel.name} is started early without being told"


def test_nothing_else_is_read_early() -> None:
    assert faults(SOURCES) == []


def test_every_declaration_is_needed() -> None:
    declared = {(name, pointer) for name in SOURCES for pointer in _declared(ast.parse(SOURCES[name]))}
    assert len(declared) >= 10
    for name, pointer in declared:
        source = SOURCES[name].replace(f'"{pointer}": ', '"nothing_ptr": ')
        assert any(f"takes {pointer}" in fault for fault in faults(SOURCES | {name: source})), (name, pointer)


@pytest.mark.parametrize(
    ("name", "old", "new", "fault"),
    [
        ("rope_and_store.py", "slot = tl.load(slots", "slot = tl.load(q", "takes q_ptr before it waits"),
        ("attention_decode.py", "load_blocks(table,", "load_blocks(k_ptr,", "takes k_ptr before it waits"),
        (
            "attention_decode.py",
            "table = block_tables_ptr +",
            "table = k_ptr +",
            "takes k_ptr before it waits",
        ),
        (
            "gpu_linear_split.py",
            "    if DEPENDENT:\n        cuda.gdc_wait()\n",
            "    _load_async(x.index(0), x_ptrs, is_x)\n    if DEPENDENT:\n        cuda.gdc_wait()\n",
            "takes x_ptr before it waits",
        ),
        ("gpu_linear.py", "_load_steps(weight_ptrs,", "_load_steps(x_ptr,", "takes x_ptr before it waits"),
        (
            "norm_rope.py",
            "    enter(DEPENDENT)\n",
            "    tl.load(x_ptr)\n    enter(DEPENDENT)\n",
            "takes x_ptr",
        ),
        (
            "rope_and_store.py",
            "    position = tl.load(",
            "    if token > 5:\n        return\n    position = tl.load(",
            "may return before it waits",
        ),
        (
            "rope_and_store.py",
            "    position = tl.load(",
            "    tl.store(positions_ptr, 1)\n    position = tl.load(",
            "writes before it waits",
        ),
        (
            "attention_runs.py",
            "    program = tl.program_id(0)\n",
            "    tl.extra.cuda.gdc_launch_dependents()\n    program = tl.program_id(0)\n",
            "_plan_kernel is none, or lets the next kernel start early",
        ),
        (
            "norm_rope.py",
            "    enter(DEPENDENT)\n",
            "    if tl.load(x_ptr) > 0:\n        enter(DEPENDENT)\n",
            "waits in the midst of other things",
        ),
        ("activation.py", "    enter(DEPENDENT)\n", "", "_gate_kernel is started early, and never waits"),
        ("kv_store.py", "launch_pdl=dependent", "launch_pdl=True", "started early without being told"),
        ("attention_runs.py", "        num_warps=1,\n", "        launch_pdl=True,\n", "never waits"),
    ],
)
def test_a_wrong_kernel_is_found(name: str, old: str, new: str, fault: str) -> None:
    assert old in SOURCES[name]
    assert any(fault in found for found in faults(SOURCES | {name: SOURCES[name].replace(old, new)}))

"""The rooms import one way, and only the rooms that train import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "ddptrain"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
HALL = ""  # the modules at the top (errors, tables, hosts, ...), open to everyone
FOUNDATION = {HALL, "config", "protocol"}  # open to everyone

# Room -> the rooms that it may import besides itself and the foundation. Imports inside functions count.
ALLOWED: dict[str, set[str]] = {
    HALL: set(),
    "protocol": set(),
    "config": set(),
    "storage": set(),
    "model_registry": {"results", "storage"},
    "tracking": set(),
    "results": {"storage", "tracking"},  # tracking: files that W&B has written
    "workloads": {"storage"},
    "worker": set(),
    "rank": {"tracking"},
    "clusters": {"worker"},
    "driver": {
        "clusters",
        "model_registry",  # weights of a model that a run starts from
        "results",
        "storage",
        "tracking",
        "worker",
    },
    "notify": {"results"},
    "reports": {"model_registry", "results", "storage"},
    "retrain": {"clusters", "driver", "model_registry", "notify", "reports", "results", "storage"},
    "schedule": {"model_registry", "results", "storage"},
    "sweep": {"clusters", "driver", "notify", "results", "storage"},
    "cli": {"clusters", "driver", "model_registry", "notify", "reports", "results", "retrain", "schedule", "sweep"},
    "compat": {"clusters", "driver", "rank", "results", "worker"},  # parts of it run in each of these
}
# (file or room, the one module of a closed room that it may import)
DOORS = {
    ("workloads", "ddptrain.rank.context"),
    ("workloads", "ddptrain.rank.prepare"),  # weights of rank 0 for all, after DDP was built
    ("workloads", "ddptrain.rank.checkpoint.weights"),  # a saved model
    ("checkpoint.py", "ddptrain.results.checkpoints.verification"),  # a checkpoint is verified before it is used
    ("checkpoint.py", "ddptrain.results.errors"),
    ("__init__.py", "ddptrain.rank.context"),  # ddptrain.RankContext
    ("__init__.py", "ddptrain.rank.huggingface"),  # ddptrain.HuggingFaceCallback
    ("__init__.py", "ddptrain.rank.evaluation"),  # ddptrain.SavedCheckpoint
    ("__main__.py", "ddptrain.cli.main"),
    ("__main__.py", "ddptrain.cli.warm.client"),
    ("api.py", "ddptrain.model_registry"),  # ddptrain.load_model
    ("api.py", "ddptrain.workloads.checkpoint"),
    ("api.py", "ddptrain.results"),  # a table of the run in notebooks
    ("api.py", "ddptrain.driver"),  # runs from Python: what the command does, without its process
    ("run_handle.py", "ddptrain.driver"),
    ("run_handle.py", "ddptrain.results"),
}
# Open inside functions: sampling names is the workload's business, once `generate` has been asked for it.
LAZY_DOORS = {("cli", "workloads")}

TORCH_FREE = (
    "cli",
    "clusters",
    "config",
    "driver",
    "model_registry",
    "notify",
    "protocol",
    "reports",
    "results",
    "retrain",
    "schedule",
    "storage",
    "sweep",
    "worker",
    HALL,
)
TORCH = {"torch", "torchvision", "dask_pytorch_ddp"}


class Import(NamedTuple):
    """One imported name: file, line, full name, and whether the import waits inside a function."""

    file: Path
    line: int
    name: str
    lazy: bool

    @property
    def room(self) -> str:
        """The room of ddptrain that it belongs to, or HALL."""
        first, _, rest = self.name.partition(".")
        room = rest.partition(".")[0]
        return room if first == "ddptrain" and room in ROOMS else HALL

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE.parent)}:{self.line}: {self.name}"


@cache
def imports_of(room: str) -> list[Import]:
    """Every import in a room; what only type checkers see is left out."""
    files = PACKAGE.glob("*.py") if room == HALL else (PACKAGE / room).rglob("*.py")
    return [
        item for file in sorted(files) for item in walk(ast.parse(file.read_text(encoding="utf-8")), file, lazy=False)
    ]


def walk(node: ast.AST, file: Path, *, lazy: bool) -> Iterator[Import]:
    for name in imported_names(node):
        yield Import(file, getattr(node, "lineno", 0), name, lazy)
    inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for_type_checkers = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    children = node.orelse if isinstance(node, ast.If) and for_type_checkers else ast.iter_child_nodes(node)
    for child in children:
        yield from walk(child, file, lazy=inside)


def imported_names(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(level=0, module="ddptrain", names=[ast.alias(name="RankContext")]):
            return ["ddptrain.rank.context"]
        case ast.ImportFrom(level=0):
            return [f"{node.module}.{alias.name}" for alias in node.names]
        case ast.ImportFrom():
            return ["a relative import, which this test can't follow"]
        case ast.Call(args=[ast.Constant(value=str(name)), *_]) if "import_module" in ast.unparse(node.func):
            return [name]
    return []


def is_open(item: Import, room: str) -> bool:
    if item.room in {room, *FOUNDATION} or item.room in ALLOWED[room]:
        return True
    if item.lazy and (room, item.room) in LAZY_DOORS:
        return True
    return any(
        opener in {room, item.file.name} and (item.name == module or item.name.startswith(f"{module}."))
        for opener, module in DOORS
    )


@pytest.mark.parametrize("room", [HALL, *ROOMS])
def test_room_imports_only_the_rooms_that_are_open_to_it(room: str) -> None:
    assert room in ALLOWED, f"ddptrain/{room}/ is a new room: say above what it may import"
    closed = [str(item) for item in imports_of(room) if not is_open(item, room)]
    assert not closed, "\n".join(closed)


@pytest.mark.parametrize("room", TORCH_FREE)
def test_torch_is_not_imported_outside_the_rooms_that_train(room: str) -> None:
    found = [str(item) for item in imports_of(room) if {*item.name.split(".")} & TORCH]
    assert not found, "\n".join(found)


def test_no_import_is_relative() -> None:
    relative = [str(item) for room in [HALL, *ROOMS] for item in imports_of(room) if " relative " in item.name]
    assert not relative, "\n".join(relative)


WITHOUT_CIRCLES = (HALL, "config", "protocol", "storage", "tracking", "worker", "rank", "clusters", "driver")


def test_modules_import_each_other_in_no_circle_also_for_type_checkers() -> None:
    files = [file for room in WITHOUT_CIRCLES for file in {item.file for item in imports_of(room)}]
    modules = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in files}
    above: dict[str, set[str]] = {}
    for name, file in modules.items():
        words = {word for node in ast.walk(ast.parse(file.read_text())) for word in imported_names(node)}
        above[name] = {word if word in modules else word.rpartition(".")[0] for word in words} & modules.keys()
    while leaves := [name for name, others in above.items() if not others & above.keys()]:
        for name in leaves:
            del above[name]
    assert not above, "these modules are in a circle, or import one"


def test_import_inside_a_function_is_seen() -> None:
    tree = ast.parse("def f():\n    if x:\n        from ddptrain.rank import context\n        import torch.nn")
    found = list(walk(tree, PACKAGE / "x.py", lazy=False))
    assert [(item.name, item.room, item.line, item.lazy) for item in found] == [
        ("ddptrain.rank.context", "rank", 3, True),
        ("torch.nn", HALL, 4, True),
    ]


def test_closed_room_is_refused_and_its_door_is_not() -> None:
    file = PACKAGE / "workloads" / "x.py"
    assert is_open(Import(file, 1, "ddptrain.rank.context.RankContext", lazy=False), "workloads")
    assert not is_open(Import(file, 1, "ddptrain.rank.server", lazy=True), "workloads")
    assert not is_open(Import(file, 1, "ddptrain.workloads.petnames", lazy=False), "cli")


def test_command_line_is_parsed_without_the_heavy_packages() -> None:
    heavy = {*TORCH, "dask", "distributed", "pydantic", "rich", "numpy", "yaml", "fsspec"}
    assert modules_after("import ddptrain.cli.main") & heavy == set()


def test_modules_of_the_torch_free_rooms_load_without_torch() -> None:
    modules = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        for room in TORCH_FREE
        for file in (PACKAGE.glob("*.py") if room == HALL else (PACKAGE / room).rglob("*.py"))
        if file.name not in {"__init__.py", "__main__.py"}
    ]
    assert modules_after("import " + ", ".join(modules)) & TORCH == set()


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    tell = "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code + tell], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())

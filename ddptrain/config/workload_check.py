"""Checks that the user's function or script exists and is valid Python, before anything is started or imported."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from ddptrain.config.config_file import MAX_NEIGHBOURS, python_files
from ddptrain.config.plugin_names import WORKLOADS, of_file, workload_target
from ddptrain.config.resolved import ResolvedConfig, import_folders
from ddptrain.config.run_config import RunConfig
from ddptrain.config.wording import describe_value, nearest, shorten
from ddptrain.config.yaml_reader import Document
from ddptrain.errors import ConfigError, Problem

COMMAND_LINE = "ddptrain run"  # the source of a script that has no configuration file
_MAY_DEFINE = r"import \*|\b(?:__getattr__|globals|exec)\b"  # in the source of a module that may have other names


def find_source(module: str, folders: Sequence[str]) -> Path | None:
    """Return the file of a module, searched as an import does; None if it is not found. Nothing is imported."""
    searched: Sequence[str] = [folder or "." for folder in folders]
    origin = None
    for name in module.split("."):
        spec = PathFinder.find_spec(name, searched)
        if spec is None:
            return None
        origin, searched = spec.origin, list(spec.submodule_search_locations or ())
    return Path(origin) if origin is not None else None


def code_problems(config: RunConfig, path: Path, document: Document) -> Iterator[Problem]:
    """Yield the problems that the script, or a function in a module that is found, does not exist."""
    if config.script is not None:
        yield from _script_problems(config, config.script.script, path, document)
    workload = WORKLOADS.target(config.workload) if isinstance(config.workload, str) else None
    for field, target in (("workload", workload), ("evaluate", config.evaluate)):
        if target is not None and (problem := _function_problem(target, path)) is not None:
            yield document.problem((field,), *problem)


def _script_problems(config: RunConfig, script: str | None, path: Path, document: Document) -> Iterator[Problem]:
    """Yield the problem that the script does not exist. An absolute path may exist on the file system of a cluster."""
    if script is None:
        return
    key = () if document.source == COMMAND_LINE else ("workload", "script")
    shown = describe_value(script)
    if script.endswith(".ipynb"):
        message = f"expected a Python file, got the notebook {shown.removeprefix('the text ')}"
        yield document.problem(key, message, f"convert it: jupyter nbconvert --to script {shorten(script)}")
        return
    candidates = [Path(folder) / script for folder in import_folders(path)]
    if any(map(_is_program, candidates)) or (os.path.isabs(script) and not config.cluster.is_embedded):
        return
    if any(each.is_dir() for each in candidates):
        message = f"expected a Python file, got the folder {shown.removeprefix('the text ')}"
        yield document.problem(key, message, "name the file in it; a folder is run only if it has a __main__.py")
        return
    beside = [file.name for each in candidates for file in python_files(each.parent)]
    match = nearest(Path(script).name, beside[:MAX_NEIGHBOURS])
    hint = f"did you mean {Path(script).parent / match}?" if match else f"looked for in {_listed(import_folders(path))}"
    yield document.problem(key, f"there is no such file, got {shown}", hint)


def _is_program(path: Path) -> bool:
    try:
        return path.is_file() or (path / "__main__.py").is_file()
    except (OSError, ValueError):
        return False


def _function_problem(target: str, path: Path) -> tuple[str, str] | None:
    """Return a message and a hint if the module is found, and its source does not have the name of the function."""
    module, _, name = target.partition(":")
    file = find_source(module, [*import_folders(path), *sys.path])
    if file is None or file.suffix != ".py":
        return None
    try:
        source = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    first = name.partition(".")[0]
    if re.search(rf"\b{first}\b|{_MAY_DEFINE}", source):
        return None
    match = nearest(first, re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE))
    hint = f"did you mean {module}:{match}?" if match else "name a function that it has"
    return f"{shorten(str(file), 300)} has no {first}, got {describe_value(target)}", hint


def check_workload(resolved: ResolvedConfig) -> None:
    """Raise ConfigError if the module of the workload's function is missing, or it or the script is no valid Python.

    Only if the ranks run on this machine, as part of the driver: the hosts of a cluster may have other modules.
    """
    config, folders = resolved.config, [*resolved.import_folders, *sys.path]
    if not config.cluster.is_embedded:
        return
    if config.script is not None:
        candidates = [Path(folder, config.script.script or "") for folder in resolved.import_folders]
        file = next(filter(Path.is_file, candidates), None)
        # Python does not compile a .pyc file, nor a zip file with a module __main__.
        files = [file] if file is not None and file.suffix != ".pyc" and not zipfile.is_zipfile(file) else []
        module, key = "", "" if resolved.place in ("", COMMAND_LINE) else "workload.script"
    else:
        module, _, function = workload_target(config.workload_name).partition(":")
        parts, key = module.split("."), "workload"
        found = [find_source(".".join(parts[: end + 1]), folders) for end in range(len(parts))]
        files = [file for file in found if file is not None and file.suffix == ".py"]
    where = resolved.place or (shorten(str(resolved.path), 300) if module else COMMAND_LINE)
    for file in files:
        if (error := _syntax_error(file)) is not None:
            message = f"{shorten(error.filename or '', 300)}:{error.lineno} is not valid Python: {error.msg}"
            line = shorten((error.text or "").strip(), 120)
            raise ConfigError([Problem(where, key, message, f"the line is: {line}" if line else "")])
    if module and (of_file(config.workload_name) or not _may_exist(module.partition(".")[0], folders)):
        message = f"there is no module {shorten(module)}, got {describe_value(config.workload_name)}"
        hint = of_file(config.workload_name) or _module_hint(module, function, resolved.import_folders)
        raise ConfigError([Problem(where, key, message, hint)])


def _syntax_error(file: Path) -> SyntaxError | None:
    try:
        compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        return error
    except (OSError, ValueError, RecursionError, MemoryError):  # the rank will report it
        pass
    return None


def _may_exist(name: str, folders: Sequence[str]) -> bool:
    """Return whether an import of a top-level module may succeed; nothing is imported."""
    try:
        return bool(PathFinder.find_spec(name, folders) or importlib.util.find_spec(name))
    except Exception:  # of a finder of another package; the ranks import the module anyway
        return True


def _module_hint(module: str, function: str, folders: Sequence[str]) -> str:
    names = [file.stem for folder in folders for file in python_files(Path(folder))]
    match = nearest(module, names[:MAX_NEIGHBOURS])
    return f"did you mean {match}:{function}?" if match else f"looked for in {_listed(folders)} and in sys.path"


def _listed(folders: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(shorten(folder, 200) for folder in folders))

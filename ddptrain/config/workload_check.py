"""Checks, before anything is started, that the user's function or script exists and is valid Python."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ddptrain.config.config_file import MAX_NEIGHBOURS, python_files
from ddptrain.config.function_signature import syntax_error, syntax_error_of_file
from ddptrain.config.load import COMMAND_LINE, place_in_file
from ddptrain.config.plugin_names import of_file, workload_target
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import describe_value, nearest, shorten
from ddptrain.errors import ConfigError, Problem


def check_workload(resolved: ResolvedConfig) -> None:
    """Raise ConfigError if the module of the workload's function is missing, or it or the script is no valid Python.

    Only if the ranks run on this machine, as part of the driver: the hosts of a cluster may have other modules.
    """
    workload = resolved.config.workload
    if not resolved.config.cluster.is_embedded:
        return
    if not isinstance(workload, str):
        _check_script(resolved)
        return
    module, _, function = workload_target(workload).partition(":")
    folders = [*resolved.import_folders, *sys.path]
    where = place_in_file(resolved.path, ("workload",), workload)
    if (error := syntax_error(module, folders)) is not None:
        raise ConfigError([_not_python(where, "workload", error)])
    if of_file(workload) or not _may_exist(module.partition(".")[0], folders):
        message = f"there is no module {shorten(module)}, got {describe_value(workload)}"
        hint = of_file(workload) or _hint(module, function, resolved.import_folders)
        raise ConfigError([Problem(where, "workload", message, hint)])


def _check_script(resolved: ResolvedConfig) -> None:
    script = resolved.config.script
    if script is None or script.script is None:
        return
    file = next(
        (path for path in (Path(folder, script.script) for folder in resolved.import_folders) if path.is_file()), None
    )
    if file is not None and not _is_compiled(file) and (error := syntax_error_of_file(file)) is not None:
        where, key = COMMAND_LINE, ""
        if resolved.path.is_file():
            where, key = place_in_file(resolved.path, ("workload", "script"), script.script), "workload.script"
        raise ConfigError([_not_python(where, key, error)])


def _is_compiled(file: Path) -> bool:
    """Return whether Python runs a file without compiling it: a .pyc file, or a zip file with a module __main__."""
    return file.suffix == ".pyc" or zipfile.is_zipfile(file)


def _not_python(where: str, key: str, error: SyntaxError) -> Problem:
    message = f"{shorten(error.filename or '', 300)}:{error.lineno} is not valid Python: {error.msg}"
    line = shorten((error.text or "").strip(), 120)
    return Problem(where, key, message, f"the line is: {line}" if line else "")


def _may_exist(name: str, folders: Sequence[str]) -> bool:
    """Return whether an import of a top-level module may succeed; nothing is imported."""
    for finder in sys.meta_path:  # those of editable installs look elsewhere than in the folders
        try:
            if finder.find_spec(name, None) or finder.find_spec(name, folders):
                return True
        except Exception:  # finders belong to other packages; the ranks import the module anyway
            return True
    return False


def _hint(module: str, function: str, folders: Sequence[str]) -> str:
    names = [file.stem for folder in folders for file in python_files(Path(folder))]
    if match := nearest(module, names[:MAX_NEIGHBOURS]):
        return f"did you mean {match}:{function}?"
    return f"looked for in {' and '.join(dict.fromkeys(shorten(folder, 200) for folder in folders))} and in sys.path"

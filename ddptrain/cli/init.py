"""`ddptrain init FOLDER`: writes a small project to start from."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ddptrain.errors import UsageError

_SCHEMA = "ddptrain.schema.json"
_SCHEMA_LINE = f"# yaml-language-server: $schema={_SCHEMA}\n"


class Workload(StrEnum):
    """What a new project trains."""

    FUNCTION = "function"
    SCRIPT = "script"
    IMAGES = "images"
    PETNAMES = "petnames"


# New file -> its source in the package; a file named .gitignore there would apply to our own repository.
_STARTERS = {
    Workload.FUNCTION: {"train.yaml": "train.yaml", "train.py": "train.py"},
    Workload.SCRIPT: {"train.yaml": "script.yaml", "train.py": "script.py"},
}
_SHIPPED = {Workload.IMAGES: "images-local", Workload.PETNAMES: "petnames"}


def init(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder to write into; created if it does not exist.")
    ] = ".",
    workload: Annotated[Workload, typer.Option(help="What the project trains.")] = Workload.FUNCTION,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the configuration instead, for editors.")
    ] = False,
) -> None:
    """Write a small training function and its YAML file; existing files are not changed.

    Examples:
        ddptrain init demo
        ddptrain init demo --workload images
        ddptrain init --schema > ddptrain.schema.json
    """
    if schema:
        typer.echo(_schema(), nl=False)
        return
    files = _starter(workload)
    target = Path(folder)
    _write(target, files)
    place = "" if target.resolve() == Path.cwd() else f"cd {shlex.quote(folder)} && "
    config = next(iter(files))
    typer.echo(f"wrote {', '.join(files)}; train it with: {place}ddptrain train {shlex.quote(config)}")


def _starter(workload: Workload) -> dict[str, str]:
    """Return the content of each file of a new project; the YAML file is the first."""
    from importlib.resources import files

    from ddptrain.config.config_file import shipped_configs

    package = files("ddptrain") / "starter"
    if workload in _STARTERS:
        contents = {name: (package / source).read_text("utf-8") for name, source in _STARTERS[workload].items()}
        contents["train.yaml"] = _SCHEMA_LINE + contents["train.yaml"]
    else:
        contents = {f"{workload}.yaml": shipped_configs()[_SHIPPED[workload]].read_text("utf-8")}
    return {**contents, ".gitignore": (package / "gitignore").read_text("utf-8"), _SCHEMA: _schema()}


def _schema() -> str:

    from ddptrain.config.json_schema import config_schema

    return json.dumps(config_schema(), indent=2) + "\n"


def _write(target: Path, files: dict[str, str]) -> None:
    """Write new files; an older schema is replaced. Raises UsageError if another file exists."""
    names = [name for name in files if name != _SCHEMA]
    existing = [name for name in names if (target / name).is_symlink() or (target / name).exists()]
    if existing:
        raise UsageError(
            f"{target} has {', '.join(existing)} already, which would be overwritten: choose another folder"
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            with (target / name).open("x", encoding="utf-8") as file:
                file.write(files[name])
        if not (target / _SCHEMA).is_symlink():
            (target / _SCHEMA).write_text(files[_SCHEMA], encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write into {target}: {error.strerror or error}") from error

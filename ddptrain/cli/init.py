"""`ddptrain init FOLDER`: writes a small project to start from."""

from __future__ import annotations

from typing import Annotated

import typer

# New file -> its source in the package; a file named .gitignore there would apply to our own repository.
_FILES = {"train.yaml": "train.yaml", "train.py": "train.py", ".gitignore": "gitignore"}


def init(folder: Annotated[str, typer.Argument(help="Folder to write into; it is made if need be.")] = ".") -> None:
    """Write a small training function and its YAML file; existing files are not changed."""
    import shlex
    from importlib.resources import files
    from pathlib import Path

    from ddptrain.errors import UsageError

    target = Path(folder)
    there = [name for name in _FILES if (target / name).is_symlink() or (target / name).exists()]
    if there:
        raise UsageError(f"{target} has {', '.join(there)} already, which would be overwritten: choose another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, source in _FILES.items():
            with (target / name).open("x", encoding="utf-8") as file:
                file.write((files("ddptrain") / "starter" / source).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot write into {target}: {error.strerror or error}") from error
    place = "" if target.resolve() == Path.cwd() else f"cd {shlex.quote(folder)} && "
    typer.echo(f"wrote {', '.join(_FILES)}; train it with: {place}ddptrain train train.yaml")

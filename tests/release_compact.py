"""Makes a wheel smaller: `python -m tests.release_compact dist/*.whl`. The source archive has everything.

Its modules lose comments, the docstrings of internal modules, and the width of their indentation; each line keeps its
number, so that tracebacks show the lines of the source. Docstrings stay where help() or the command shows them. The
scripts of HTML reports lose comments and indentation.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from zopfli import zlib as zopfli

# help() of what users import; the help texts of the commands; the descriptions of the schema.
DOCUMENTED = re.compile(
    r"ddptrain/cli/|ddptrain/config/(sections/|run_config\.py)|ddptrain/workloads/\w+/params\.py"
    r"|ddptrain/rank/(context|current_context|saved_checkpoint|huggingface)\.py"
    r"|ddptrain/(__init__|api|errors|run_handle|tracking/protocol)\.py"
)
_INDENT = 4  # spaces
_Owner = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_MULTILINE = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def compact_wheel(wheel: Path) -> None:
    """Replace the wheel with a smaller one of the same name."""
    with ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    files = {name: compact_file(name, content) for name, content in files.items() if name != record}
    files[record] = b"".join(f"{name},{_digest(data)},{len(data)}\n".encode() for name, data in files.items())
    files[record] += f"{record},,\n".encode()
    smaller = wheel.with_suffix(".part")
    with ZipFile(smaller, "w", ZIP_DEFLATED) as archive:
        for name, content in files.items():
            with archive.open(name, "w") as file:
                file._compressor = _Zopfli()  # type: ignore[attr-defined]  # zipfile knows only zlib's deflate
                file.write(content)
    smaller.replace(wheel)


class _Zopfli:
    """Deflate as zlib's objects have it, a few per cent smaller and a hundred times as slow."""

    def __init__(self) -> None:
        self._content = b""

    def compress(self, content: bytes) -> bytes:
        self._content += content
        return b""

    def flush(self) -> bytes:
        return bytes(zopfli.compress(self._content))[2:-4]  # without zlib's head and checksum


def compact_file(name: str, content: bytes) -> bytes:
    """What the wheel contains of a file."""
    if name.endswith(".py"):
        return compact_module(content.decode(), documented=DOCUMENTED.match(name) is not None).encode()
    if name.endswith(".json"):
        return json.dumps(json.loads(content), ensure_ascii=False, separators=(",", ":")).encode()
    if name.endswith(".js"):
        return compact_script(content.decode()).encode()
    return content


def compact_script(source: str) -> str:
    """JavaScript without indentation, and without lines that are empty or a comment. No text may span lines."""
    lines = [line.strip() for line in source.splitlines()]
    assert all(line.count("`") % 2 == 0 for line in lines)
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("//"))


def compact_module(source: str, *, documented: bool) -> str:
    """The source of a module without comments, and without docstrings that nobody is shown.

    Raises AssertionError if it would do anything else than the module.
    """
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
    _remove_docstrings(lines, source, documented=documented)
    inside = {
        row for token in tokens if token.type in _MULTILINE for row in range(token.start[0] + 1, token.end[0] + 1)
    }
    compact = "".join(line if row in inside else _dedented(line) for row, line in enumerate(lines, 1))
    assert _code(compact, documented=documented) == _code(source, documented=documented)
    return compact


def _remove_docstrings(lines: list[str], source: str, *, documented: bool) -> None:
    for owner, docstring in _docstrings(ast.parse(source), documented=documented):
        for row in range(docstring.lineno - 1, docstring.end_lineno or docstring.lineno):
            lines[row] = "\n"
        # A block needs a statement; and without a docstring, a dataclass would make one while it is imported.
        if len(owner.body) == 1 or isinstance(owner, ast.ClassDef):
            lines[docstring.lineno - 1] = " " * docstring.col_offset + '"_"\n'


def _docstrings(tree: ast.Module, *, documented: bool) -> Iterator[tuple[_Owner, ast.Expr]]:
    """The docstrings that are removed: in a documented module those of private functions."""
    for node in ast.walk(tree):
        if documented and not (
            isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.decorator_list
        ):
            continue
        if isinstance(node, _Owner):
            match node.body:
                case [ast.Expr(ast.Constant(str())) as docstring, *_]:
                    yield node, docstring


def _dedented(line: str) -> str:
    text = line.lstrip(" ")
    return " " * ((len(line) - len(text)) // _INDENT) + text


def _code(source: str, *, documented: bool) -> str:
    """The syntax tree of a module without the docstrings that are removed."""
    tree = ast.parse(source)
    for owner, docstring in list(_docstrings(tree, documented=documented)):
        owner.body.remove(docstring)
    return ast.dump(tree)


def _digest(content: bytes) -> str:
    """The hash of a file in RECORD."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release_compact", description=__doc__)
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    for wheel in parser.parse_args(arguments).wheels:
        before = wheel.stat().st_size
        compact_wheel(wheel)
        print(f"{wheel}: {before:,} bytes, now {wheel.stat().st_size:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make docs-test`: runs the console blocks of README and of tutorial pages in a shell, and compares their output.

Each page has a shell, an empty home and an empty folder of its own. Pages of the guide are not run: they show excerpts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.docs.blocks import Block, blocks_of, difference

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PAGES = ("README.md", "docs/checkpoints.md", "docs/start", "docs/clusters", "docs/troubleshooting.md", "docs/reference")
_END = "\x01"
_PAGE_S = 900.0


def script_of(blocks: Sequence[Block]) -> str:
    """The shell script of a page: after each command it prints a mark with the exit code, and keeps that code in $?."""
    commands = [command.text for block in blocks if not block.skipped for command in block.commands]
    return "".join(f"{text}\n__code=$?; printf '{_END}%s{_END}' $__code; (exit $__code)\n" for text in commands)


def problems_of(blocks: Sequence[Block], output: str) -> list[str]:
    """What is different from the page, a line for each command."""
    pieces = output.split(_END)
    results = list(zip(pieces[::2], pieces[1::2], strict=False))
    problems: list[str] = []
    commands = [(block, command) for block in blocks if not block.skipped for command in block.commands]
    for index, (block, command) in enumerate(commands):
        first = command.text.splitlines()[0]
        if index >= len(results):
            return [*problems, f"line {block.line}: $ {first}: did not end; the last output: {pieces[-1][-300:]!r}"]
        printed, code = results[index]
        wrong = difference(command.expected, printed)
        if not wrong and code != "0" and not command.may_fail:
            wrong = f"exit code {code}: {printed[-300:]!r}"
        if wrong:
            problems.append(f"line {block.line}: $ {first}: {wrong}")
    return problems


def run_page(page: Path) -> list[str]:
    """Run the blocks of a page and return what is different."""
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="ddptrain-docs-", dir="/tmp") as home:
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("WANDB_", "XDG_", "DDPTRAIN_"))
            },
            "HOME": home,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        command = ["bash", "--noprofile", "--norc", "-c", script_of(blocks)]
        try:
            done = subprocess.run(
                command, cwd=home, env=environment, timeout=_PAGE_S, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            output = done.stdout
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
        finally:
            _end_all(Path(home), environment)
        return problems_of(blocks, output)


def _end_all(home: Path, environment: dict[str, str]) -> None:
    """End the clusters and the runs that a page has left: only one that failed leaves any."""
    for cluster in home.glob(".local/state/ddptrain/clusters/*/"):
        subprocess.run([BIN / "ddptrain", "cluster", "down", cluster.name], env=environment, capture_output=True)
    for record in home.glob("**/runs/*/run.json"):
        if json.loads(record.read_text(encoding="utf-8"))["status"] == "running":
            stop = [str(BIN / "ddptrain"), "stop", record.parent.name, "--now", "--runs-dir", str(record.parents[1])]
            subprocess.run(stop, env=environment, capture_output=True)


def _pages(names: Sequence[str]) -> list[Path]:
    found = [
        path
        for name in names
        for path in ([ROOT / name] if name.endswith(".md") else sorted((ROOT / name).glob("*.md")))
    ]
    return [page for page in found if blocks_of(page.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make docs-test", description=__doc__)
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE|FOLDER", help="below the repository's root")
    failed = 0
    for page in _pages(parser.parse_args(arguments).pages):
        name = page.relative_to(ROOT)
        blocks = blocks_of(page.read_text(encoding="utf-8"))
        skipped = [block for block in blocks if block.skipped]
        for block in skipped:
            print(f"{name}:{block.line}: not run: {block.skipped}")
        if len(skipped) == len(blocks):
            continue
        problems = run_page(page)
        failed += len(problems)
        print("\n".join([f"{name}: {'FAILED' if problems else 'ok'}", *(f"{name}: {problem}" for problem in problems)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

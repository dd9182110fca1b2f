"""`make bench-pains`: shows problems of launchers with a peer and with ddptrain, and checks what is claimed."""

from __future__ import annotations

import argparse
import fcntl
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from tests.pains.catalogue import PROBLEMS
from tests.pains.page import PAGE, page_with, section_of
from tests.pains.problem import Problem, Show
from tests.pains.scene import open_scene


def main(argv: Sequence[str] | None = None) -> int:
    """Run the problems. Returns 1 if one is not as claimed; its section of the page is then not written."""
    parser = argparse.ArgumentParser(prog="python -m tests.pains", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME,...", help="these problems only")
    parser.add_argument("--write", action="store_true", help="write what is printed into docs/problems.md")
    parser.add_argument("--verbose", action="store_true", help="print all output")
    options = parser.parse_args(argv)
    names = [problem.name for problem in PROBLEMS]
    chosen = options.only.split(",") if options.only else names
    if unknown := sorted({*chosen} - {*names}):
        parser.error(f"no such problem: {', '.join(unknown)}; there are {', '.join(names)}")

    wrong = 0
    for problem in PROBLEMS:
        if problem.name not in chosen:
            continue
        section, problems = _show(problem, options.verbose)
        wrong += bool(problems)
        if options.write and not problems:
            _write({problem.name: section}, names)
    return 1 if wrong else 0


def _write(sections: Mapping[str, str], order: Sequence[str]) -> None:
    """Write sections of the page; another bench may write others meanwhile."""
    with PAGE.open("a+", encoding="utf-8") as page:
        fcntl.flock(page, fcntl.LOCK_EX)
        page.seek(0)
        text = page_with(page.read(), sections, order)
        page.seek(0)
        page.truncate()
        page.write(text)


def _show(problem: Problem, verbose: bool) -> tuple[str, list[str]]:
    """Run both launchers. Returns the section of the page, and what is not as claimed."""
    problems: list[str] = []
    outputs: list[list[str]] = []
    for name, show, files in (
        (problem.peer_name, problem.peer, {**problem.files, **problem.peer_files}),
        ("ddptrain", problem.ours, problem.files),
    ):
        began = time.monotonic()
        for _ in range(show.tries):
            with open_scene(files) as scene:
                show.play(scene)
            found = [f"{name}: {each}" for each in differences(show, "\n".join(scene.lines))]
            if not found:
                break
        outputs.append(scene.lines)
        print(f"{problem.name}: {name}: {'NOT as claimed' if found else 'ok'} ({time.monotonic() - began:.0f} s)")
        if verbose or found:
            print("\n".join([*(f"  | {line}" for line in scene.lines), *(f"  {each}" for each in found)]))
        sys.stdout.flush()
        problems += found
    return section_of(problem, *outputs), problems


def differences(show: Show, output: str) -> list[str]:
    """What is not as a show claims."""
    missing = [f"not found: {each}" for each in show.must if not re.search(each, output, re.MULTILINE)]
    return missing + [f"found: {each}" for each in show.never if re.search(each, output, re.MULTILINE)]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through all blocks that clean up
    sys.exit(main())

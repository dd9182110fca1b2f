"""The page docs/problems.md: a section for each problem, written from what the commands have printed."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.pains.masking import masked, trimmed
from tests.pains.problem import Problem, Show

PAGE = Path(__file__).parents[2] / "docs" / "problems.md"
_INTRODUCTION = """# Does this happen with ddptrain?

The best-known problems of launchers, each shown with a peer and with ddptrain: a script, and what both print.
`make bench-pains` runs all of them and checks what is claimed here; with `ARGS=--write` it writes this page.
Times, ids, paths and ports are masked, and lines that don't matter are `...`; lines in parentheses are notes of the
bench. The peer is torchrun, because most launchers use it or its agent; where the peer is as good, a section says so.
"""
_MARK = re.compile(r"^<!-- problem: ([\w-]+) -->$", re.MULTILINE)
_LINK = "https://github.com/{0}/issues/{1}"


def names_of(page: str) -> list[str]:
    """The problems of a page, in its order."""
    return _MARK.findall(page)


def fixed_parts(problem: Problem) -> list[str]:
    """The parts of a section that do not depend on a run."""
    parts = [f"## {problem.title}", f"{problem.happens} {_threads(problem)}"]
    parts += [part for part in (problem.peer.verdict, problem.ours.verdict) if part]
    parts.append(f"**How ddptrain avoids it.** {problem.avoided}")
    return [*parts, *([f"**Equally good.** {problem.equal}"] if problem.equal else [])]


def section_of(problem: Problem, peer: Sequence[str], ours: Sequence[str]) -> str:
    """The section of a problem with the lines that both launchers have printed."""
    head, intro, *_ = fixed_parts(problem)
    parts = [f"<!-- problem: {problem.name} -->", head, intro, _files(problem)]
    parts += [f"**{problem.peer_name}**", _output(problem.peer, peer), problem.peer.verdict]
    parts += ["**ddptrain**", _output(problem.ours, ours), problem.ours.verdict]
    parts.append(f"**How ddptrain avoids it.** {problem.avoided}")
    parts.append(f"**Equally good.** {problem.equal}" if problem.equal else "")
    return "\n\n".join(part for part in parts if part) + "\n"


def page_with(old: str, new: Mapping[str, str], order: Sequence[str]) -> str:
    """Return the page with these sections anew; the others stay, and those that `order` does not name are left out."""
    pieces = _MARK.split(old)
    sections = {name: f"<!-- problem: {name} -->{text}" for name, text in zip(pieces[1::2], pieces[2::2], strict=True)}
    sections |= new
    return "\n".join([_INTRODUCTION, *(sections[name].rstrip() + "\n" for name in order if name in sections)])


def _threads(problem: Problem) -> str:
    links = []
    for thread in problem.threads:
        repository, number = thread.split("#")
        links.append(f"[{repository.split('/')[1]}#{number}]({_LINK.format(repository, number)})")
    return f"Reported in {', '.join(links)}." if links else ""


def _files(problem: Problem) -> str:
    texts = [f'```{_language(name)} title="{name}"\n{text.strip()}\n```' for name, text in problem.files.items()]
    texts += [
        f'```{_language(name)} title="{name}, for {problem.peer_name}"\n{text.strip()}\n```'
        for name, text in problem.peer_files.items()
    ]
    return '<details markdown="1"><summary>The script</summary>\n\n' + "\n\n".join(texts) + "\n\n</details>"


def _language(name: str) -> str:
    return {"py": "python", "yaml": "yaml"}.get(name.rpartition(".")[2], "text")


def _output(show: Show, lines: Sequence[str]) -> str:
    host = socket.gethostname()
    return "\n".join(["```text", *(masked(line, host) for line in trimmed(lines, show.keep)), "```"])

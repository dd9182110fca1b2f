"""The shell script of a page, and what is read from its output."""

from __future__ import annotations

import subprocess

from tests.docs.blocks import blocks_of
from tests.docs.console import problems_of, script_of

PAGE = """```console
$ cd / && pwd
/
$ false
$ echo $?
1
$ echo "x: error: bad"; exit_code() { return 2; }; exit_code
x: error: bad
```
<!-- not run: reason -->
```console
$ echo never
```
"""


def _output(script: str) -> str:
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout


def test_commands_share_a_shell_and_a_failure_is_told() -> None:
    blocks = blocks_of(PAGE)
    output = _output(script_of(blocks))
    assert "never" not in output
    assert problems_of(blocks, output) == ["line 1: $ false: exit code 1: ''"]


def test_a_command_that_ends_the_shell_is_told() -> None:
    blocks = blocks_of("```console\n$ echo a\na\n$ exit 3\n$ echo b\nb\n```\n")
    (problem,) = problems_of(blocks, _output(script_of(blocks)))
    assert problem.startswith("line 1: $ exit 3: did not end")

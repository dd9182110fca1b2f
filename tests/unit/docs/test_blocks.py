"""Console blocks of the docs, and the comparison of their output, with known values."""

from __future__ import annotations

import pytest

from tests.docs.blocks import blocks_of, difference

PAGE = """# Page

```console
$ ddptrain train a.yaml \\
    --ranks 2
ddptrain: training
...
$ cat > x <<'EOF'
> one
> EOF
```

```python
$ not a console
```

<!-- not run: it needs a GPU -->
```console
$ ddptrain train big.yaml
```
"""


def test_blocks_have_commands_output_and_reasons() -> None:
    first, second = blocks_of(PAGE)
    assert (first.line, first.skipped) == (3, "")
    assert [command.text for command in first.commands] == [
        "ddptrain train a.yaml \\\n    --ranks 2",
        "cat > x <<'EOF'\none\nEOF",
    ]
    assert [command.expected for command in first.commands] == [["ddptrain: training", "..."], []]
    assert (second.line, second.skipped, len(second.commands)) == (18, "it needs a GPU", 1)


def test_only_a_command_whose_page_shows_an_error_may_fail() -> None:
    (block,) = blocks_of("```console\n$ a\nddptrain: error: no\n$ b\nfine\n```\n")
    assert [command.may_fail for command in block.commands] == [True, False]


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (["run p-20261122-214610-3d42 succeeded after 7.5 s"], "run p-20270101-000000-ffff succeeded after 11.0 s\n"),
        (["run p in /home/me/demo/runs/p"], "run p in /tmp/ddptrain-docs-x/demo/runs/p\n"),
        (["first", "...", "last"], "first\nother\nmore\nlast\n"),
        (["first", "..."], "first\n"),
        (["  time    ..."], "  time    queue 1.4 s, start 2.9 s\n"),
        (["val/loss 2.6414 at step 54"], "val/loss 2.6500 at step 54\n"),
        (["NAME  STATE", "dev   up"], "NAME STATE\ndev up\n"),
        (["[rank 0] a", "[rank 1] b"], "[rank 1] b\n[rank 0] a\n"),
        (["  time    queue 1.4 s, end 0.7 s"], "  time    queue 2 s, checkpoints 1.0 s, end 0.1 s\n"),
        (["a", "b"], "a\nddptrain: waiting for workers: 0 of 2 slots are there\nb\n"),
        ([], "anything\n"),
    ],
)
def test_output_that_is_as_the_page_shows_it(expected: list[str], actual: str) -> None:
    assert difference(expected, actual) == ""


@pytest.mark.parametrize(
    ("expected", "actual", "message"),
    [
        (["ddptrain: training"], "ddptrain: waiting\n", "expected 'ddptrain: training', got 'ddptrain: waiting'"),
        (["a", "b"], "a\n", "expected 'b', got 'the end'"),
        (["a"], "a\nb\n", "more than expected: 'b'"),
        (["loss 2.64"], "loss 2.90\n", "expected 'loss 2.64', got 'loss 2.90'"),
        (["2 ranks"], "3 ranks\n", "expected '2 ranks', got '3 ranks'"),
        (["a", "...", "z"], "a\nb\n", "expected 'z', got 'b'"),
        (["[rank 0] a"], "[rank 1] a\n", "expected '[rank 0] a', got '[rank 1] a'"),
    ],
)
def test_output_that_differs_is_told(expected: list[str], actual: str, message: str) -> None:
    assert difference(expected, actual) == message

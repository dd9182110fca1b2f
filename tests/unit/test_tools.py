"""The repository's own tools: the check of a release, the console blocks of the docs, the mutants."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of, difference
from tests.docs.console import problems_of, script_of
from tests.docs.links import site_links
from tests.mutants.__main__ import SUBJECTS, suites
from tests.mutants.generate import mutants_of
from tests.support import nightly, skips
from tests.support.release import NEEDED_FILES, changelog_problems, tag_problems, wheel_problems
from tests.support.release_environments import readme_commands

ROOT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n- x\n\n## [0.1.0] - 2026-11-21\n"


@pytest.mark.parametrize(
    ("changelog", "version", "expected"),
    [
        (CHANGELOG, "0.3.0", "there is no section for 0.3.0"),
        (CHANGELOG, "0.1.0", "is not the newest section"),
        (CHANGELOG.replace("2026-12-01", "soon"), "0.2.0", "no date of the form"),
        (CHANGELOG.replace("## [0.2.0]", "- left over\n\n## [0.2.0]"), "0.2.0", "[Unreleased] still has entries"),
    ],
)
def test_changelog_of_a_release(changelog: str, version: str, expected: str) -> None:
    assert changelog_problems(CHANGELOG, "0.2.0") == []
    (problem,) = changelog_problems(changelog, version)
    assert expected in problem


def test_tag_wheel_and_readme_of_a_release() -> None:
    assert [len(tag_problems(tag, "0.2.0", [])) for tag in ("v0.2.0", "0.2.0")] == [0, 1]
    assert len(tag_problems("v0.2.0", "0.2.0", ["v0.1.0"])) == 1
    name = "ddptrain-0.2.0-py3-none-any.whl"
    assert wheel_problems(NEEDED_FILES, name, "0.2.0") == []
    assert len(wheel_problems((*NEEDED_FILES[1:], "tests/x.py"), name, "0.2.1")) == 3
    commands = readme_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(commands) == 3 and commands[0].startswith("ddptrain init demo")


PAGE = """```console
$ cd / && pwd
/
$ false
$ echo "x: error: bad"; exit_code() { return 2; }; exit_code
x: error: bad
$ cat <<'EOF'
> two
> EOF
two
```
<!-- not run: reason -->
```console
$ echo never
```
"""


def test_console_blocks_run_in_one_shell_and_a_failure_is_named() -> None:
    blocks = blocks_of(PAGE)
    output = subprocess.run(["bash", "-c", script_of(blocks)], capture_output=True, text=True).stdout
    assert "never" not in output and blocks[1].skipped == "reason"
    assert problems_of(blocks, output) == ["line 1: $ false: exit code 1: ''"]


@pytest.mark.parametrize(
    ("expected", "actual", "message"),
    [
        (["run p-20261122-214610-3d42 succeeded after 7.5 s"], "run p-20270101-000000-ffff succeeded after 11 s\n", ""),
        (["first", "...", "last"], "first\nother\nmore\nlast\n", ""),
        (["val/loss 2.6414 at step 54"], "val/loss 2.6500 at step 54\n", ""),
        (["[rank 0] a", "[rank 1] b"], "[rank 1] b\n[rank 0] a\n", ""),
        (["a", "b"], "a\n", "expected 'b', got 'the end'"),
        (["a"], "a\nb\n", "more than expected: 'b'"),
        (["loss 2.64"], "loss 2.90\n", "expected 'loss 2.64', got 'loss 2.90'"),
        (["2 ranks"], "3 ranks\n", "expected '2 ranks', got '3 ranks'"),
    ],
)
def test_output_of_a_console_block(expected: list[str], actual: str, message: str) -> None:
    assert difference(expected, actual) == message


def test_links_of_the_repository_become_links_of_pages() -> None:
    files = {"docs/ci.md", "configs/petnames.yaml"}.__contains__
    text = "[CI](docs/ci.md#a) [S](SECURITY.md) [file](configs/petnames.yaml) [web](https://example.org)"
    wanted = "[CI](ci.md#a) [S](security.md) file [web](https://example.org)"
    assert site_links(text, "README.md", "index.md", files) == wanted


def test_files_that_only_the_nightly_target_runs_exist() -> None:
    assert [path for path in nightly.FILES if not (ROOT / path).is_file()] == []


def test_skips_that_are_not_listed_are_named() -> None:
    assert skips.forbidden({"no NVIDIA GPU: nvidia-smi is not installed"}) == []
    assert skips.forbidden({"cron is too old", "no such server"}) == ["cron is too old", "no such server"]


# --- mutants ---


def test_tests_of_each_part_are_there() -> None:
    missing = [path for path, names in SUBJECTS.items() if len(suites(f"{path}/x.py")["contract"]) < len(names)]
    assert missing == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = a < b", ["a < b -> (a <= b)"]),
        ("x = time.monotonic() < b", ["time.monotonic() < b -> (time.monotonic() >= b)"]),
        ("x = a and not b", ["a and not b -> (a or not b)", "not b -> b"]),
        ("x = 3 + f(a, key=b)", ["3 + f(a, key=b) -> (3 - f(a, key=b))", "3 -> 4", "3 -> 2", "f(a, key=b) -> f(a)"]),
        ("x += a", ["x += a -> pass"]),
        ("def f():\n    return a", ["return a -> return None"]),
        ("if a:\n    raise ValueError(3)", ["a -> (not a)", "raise ValueError(3) -> pass"]),
        ("print(a < b)\n_POLL_S = 0.5\nx = f'{3}'\nassert a == 3", []),
    ],
)
def test_mutants_of_a_piece_of_code(tmp_path: Path, code: str, expected: list[str]) -> None:
    (tmp_path / "code.py").write_text(code)
    found = [f"{mutant.before(code.encode())} -> {mutant.after}" for mutant in mutants_of(tmp_path, "code.py")]
    assert found == expected

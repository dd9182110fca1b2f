"""The generator of `make mutants`: which changes it makes of a piece of code, and which code it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.generate import choose, mutants_of
from tests.mutants.record import FileRecord
from tests.mutants.run import failed_test, imports, select_tests


def changes(folder: Path, code: str) -> list[str]:
    (folder / "code.py").write_text(code)
    return [f"{mutant.before(code.encode())} -> {mutant.after}" for mutant in mutants_of(folder, "code.py")]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = a < b", ["a < b -> (a <= b)"]),
        ("x = time.monotonic() < b", ["time.monotonic() < b -> (time.monotonic() >= b)"]),
        ("x = a is None", ["a is None -> (a is not None)"]),
        ("x = a and b", ["a and b -> (a or b)"]),
        ("x = not a", ["not a -> a"]),
        ("x = a + b", ["a + b -> (a - b)"]),
        ("x = a + 'text'", []),
        ("x = 3", ["3 -> 4", "3 -> 2"]),
        ("x = 0", ["0 -> 1"]),
        ("x = True", ["True -> False"]),
        ("x = min(a, b)", ["min(a, b) -> max(a, b)"]),
        ("x = f(a, b)", ["f(a, b) -> f(b, a)"]),
        ("x = f(a, key=b)", ["f(a, key=b) -> f(a)"]),
        ("x = zip(a, strict=True)", []),
        ("self.x = a", ["self.x = a -> pass"]),
        ("x += a", ["x += a -> pass"]),
        ("f(a)", ["f(a) -> pass"]),
        ("print(a < b)", []),
        ("_POLL_S = 0.5\nBUSY_TICK_S = 1.0\n_CHUNK_BYTES = 1 << 20", []),
        ("_STOP_S = 0.5", ["0.5 -> 1.0"]),
        ("def f():\n    return a", ["return a -> return None"]),
        ("def f():\n    return", []),
        ("def f():\n    raise ValueError(3)", ["raise ValueError(3) -> pass"]),
        ("if a:\n    x = b", ["a -> (not a)"]),
        ("if TYPE_CHECKING:\n    x = 3", []),
        ("def f(a: Literal[3]) -> Literal[4]:\n    '''5'''\n    assert a == 3", []),
        ("class P(Protocol):\n    x = 3", []),
        ("x = f'{3}'", []),
    ],
)
def test_changes_of_a_piece_of_code(tmp_path: Path, code: str, expected: list[str]) -> None:
    assert changes(tmp_path, code) == expected


def test_change_is_made_in_its_place_only(tmp_path: Path) -> None:
    source = "# ü\nx = [1 < a, 'ä', b <\n     c]\n".encode()
    (tmp_path / "code.py").write_bytes(source)
    *_, last = mutants_of(tmp_path, "code.py")
    assert last.apply(source).decode() == "# ü\nx = [1 < a, 'ä', (b <= c)]\n"
    assert last.lines == (2, 3)


def test_same_seed_chooses_the_same_mutants_of_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text("x = 10\ny = 20\nz = 30\n" * 5)
    chosen = choose(tmp_path, 1, 20, ["a", "b"])
    assert {mutant.path for mutant in chosen} == {"a/code.py", "b/code.py"}
    assert chosen == choose(tmp_path, 1, 20, ["a", "b"]) != choose(tmp_path, 2, 20, ["a", "b"])
    assert len(choose(tmp_path, 1, 100, ["a"])) == 30


def test_mutant_names_the_function_around_it(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("class A:\n    def f(self):\n        return a\n")
    assert [mutant.function for mutant in mutants_of(tmp_path, "code.py")] == ["A.f"]


def test_tests_that_execute_the_line_or_else_the_statement_or_else_the_module(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = f(\n    3,\n)\n")
    (tmp_path / "t.py").write_text("import os\n")
    (mutant, *_) = [one for one in mutants_of(tmp_path, "code.py") if one.operator == "boundary"]
    outcomes = {f"t.py::test_{name}": (name != "red", 1.0) for name in ("a", "b", "red")}
    assert mutant.lines == (2, 2)
    for lines, expected in (
        ({"t.py::test_a": [2], "t.py::test_b": [1], "t.py::test_red": [2]}, ["t.py::test_a"]),
        ({"t.py::test_b": [1], "t.py::test_a": [9]}, ["t.py::test_b"]),
        ({"t.py::test_a": [9]}, ["t.py::test_a"]),
        ({"t.py": [2]}, ["t.py::test_a", "t.py::test_b"]),  # a fixture of the file executes it
        ({}, []),
    ):
        record = {"t.py": FileRecord(tests=outcomes, lines={"code.py": lines})}
        assert select_tests(tmp_path, record, mutant, (1, 3)) == expected


def test_line_that_runs_at_import_is_checked_by_all_tests_of_the_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/code.py").write_text("x = 3\n")
    (mutant, *_) = mutants_of(tmp_path, "package/code.py")
    module = "package/code.py"
    first = FileRecord(tests={"a.py::test_a": (True, 1.0)}, lines={module: {"a.py": [1]}})  # it imported the module
    second = FileRecord(tests={"b.py::test_b": (True, 2.0)}, lines={module: {"b.py::test_b": [7]}})
    for name in "abcd":
        (tmp_path / f"{name}.py").write_text("from package import code" if name == "c" else "import other")
    third = FileRecord(tests={"c.py::test_c": (True, 3.0), "c.py::test_bad": (False, 0.1)})  # it uses a constant
    files = {"a.py": first, "b.py": second, "c.py": third, "d.py": FileRecord(tests={"d.py::test_d": (True, 1.0)})}
    chosen = select_tests(tmp_path, files, mutant, (1, 1))
    assert chosen == ["a.py::test_a", "b.py::test_b", "c.py::test_c"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from package.inner.code import Limits", True),
        ("import package.inner.code", True),
        ("from package.inner import code", True),
        ("from package.inner import (\n    block,\n    code,\n)", True),
        ("    from package.inner import code  # imports torch", True),
        ("from package.inner.coder import Limits", False),
        ("from package.inner import coder, block", False),
        ("from package import code", False),
    ],
)
def test_import_of_a_module_by_a_test_file_is_seen(tmp_path: Path, line: str, expected: bool) -> None:
    (tmp_path / "t.py").write_text(f"import os\n{line}\nx = 1\n")
    assert imports(tmp_path / "t.py", "package/inner/code.py") is expected


def test_name_of_the_test_that_failed() -> None:
    tests = ["t.py::test_a", "t.py::test_a[x]", "t.py::test_a[x - y]"]
    assert failed_test("..F\nFAILED t.py::test_a[x - y] - assert 1 == 2\n", tests) == "t.py::test_a[x - y]"
    assert failed_test("FAILED t.py::test_a - Failed: Timeout\n", tests) == "t.py::test_a"
    assert failed_test("ERROR t.py - ImportError\n", tests) == failed_test("3 passed", tests) == ""

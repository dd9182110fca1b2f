"""The wheel of a release: the same code on the same lines, without what nobody reads in an installation."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from tests.release_compact import compact_file, compact_module, compact_wheel

SOURCE = '''#!/usr/bin/env python
"""A module."""


class Square:
    """A square."""

    side: int = 2  # cm

    def area(self) -> int:
        """The area."""
        if self.side:
            return self.side**2  # cm²
        return 0


def nothing() -> None:
    """Do nothing."""


def text(name: str) -> str:
    # A comment of its own.
    return f"""
        # {name} is no comment
        """


def _private() -> int:
    """Private."""
    return 1
'''
INTERNAL = '''



class Square:
 "_"

 side: int = 2

 def area(self) -> int:

  if self.side:
   return self.side**2
  return 0


def nothing() -> None:
 "_"


def text(name: str) -> str:

 return f"""
        # {name} is no comment
        """


def _private() -> int:

 return 1
'''


def test_internal_module_has_no_docstrings_and_each_line_keeps_its_number() -> None:
    assert compact_module(SOURCE, documented=False) == INTERNAL
    assert SOURCE.count("\n") == INTERNAL.count("\n")


def test_documented_module_keeps_the_docstrings_that_help_shows() -> None:
    compact = compact_module(SOURCE, documented=True)
    assert '"""A module."""' in compact
    assert '"""The area."""' in compact
    assert "Private." not in compact
    assert "cm" not in compact


def test_json_has_no_spaces() -> None:
    assert compact_file("a.json", b'{\n "a": [1, "\xc3\xa4 b"]\n}') == '{"a":[1,"ä b"]}'.encode()
    assert compact_file("a.txt", b"a  b\n") == b"a  b\n"


def test_record_of_the_wheel_has_the_new_sizes_and_hashes(tmp_path: Path) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x/a.py", SOURCE)
        archive.writestr("x-1.dist-info/RECORD", "old")
    compact_wheel(wheel)
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        content = archive.read("x/a.py")
        record = archive.read("x-1.dist-info/RECORD").decode()
    assert content.decode() == INTERNAL
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    assert record == f"x/a.py,sha256={digest},{len(content)}\nx-1.dist-info/RECORD,,\n"


def test_scripts_of_reports_lose_comments_and_indentation() -> None:
    source = b"// About.\nfunction twice(x) {\n  // Two.\n\n  return 2 * x; // no\n}\n"
    assert compact_file("ddptrain/reports/html/static/a.js", source) == b"function twice(x) {\nreturn 2 * x; // no\n}\n"
    assert compact_file("ddptrain/reports/html/static/a.css", b"a { }\n\n") == b"a { }\n\n"

"""The man page that ships is the present one, and the formatter has no complaint."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.docs.man_page import TARGET, man_page, roff


def test_page_is_that_of_the_parser() -> None:
    page = man_page()
    assert TARGET.read_text(encoding="utf-8") == page, "run make schema"
    assert '.SS "ddptrain results show' in page and "\\fB\\-\\-max\\-restarts" not in page


def test_text_is_escaped() -> None:
    assert roff(".start --set a\\b\n'x") == "\\&.start \\-\\-set a\\eb\n\\&'x"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_formatter_has_no_complaint() -> None:
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", TARGET], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

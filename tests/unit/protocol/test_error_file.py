"""What torch elastic's record() writes down is read as a failure, once; what is odd is told as it stands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddptrain.protocol import error_file


def test_record_of_torch_elastic_is_a_failure_as_of_when_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "1"}
    path.write_text(json.dumps({"message": {"message": "ValueError: a: b", "extraInfo": extra}}))
    os.utime(path, ns=(5, 7))
    found = error_file.read_error_file(path)
    assert found is not None
    assert (found.time_ns, found.type, found.message, found.traceback) == (7, "ValueError", "a: b", "Traceback ...")
    assert error_file.read_error_file(path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"message": "died"}', "died"),
        ("no JSON", "no JSON"),
        ('{"message": {"message": null}}', "None"),
        ("[]", "[]"),
        ("[" * 100_000, "[" * 4_000),
    ],
)
def test_odd_file_is_told_as_it_stands(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    found = error_file.read_error_file(path)
    assert found is not None and found.message == message

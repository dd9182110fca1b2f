"""`ddptrain doctor`: its output and exit code."""

from __future__ import annotations

import json

import pytest

from ddptrain.cli.main import main
from ddptrain.driver.doctor import machine
from ddptrain.driver.doctor.judge import Check, Result


@pytest.mark.parametrize(
    ("result", "code", "last"), [("ok", 0, "ok"), ("warning", 0, "1 warning"), ("bad", 4, "1 bad")]
)
def test_bad_machine_ends_with_4(
    result: str, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Check("disk", Result(result), "1 MB are free", "free some space")]
    monkeypatch.setattr(machine, "check_machine", lambda *_: found)
    assert main(["doctor"]) == code
    out = capsys.readouterr().out
    assert out == f"{result:8} disk  1 MB are free (free some space)\n\nthis machine: {last}\n"
    assert main(["doctor", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0) and told["checks"][0]["subject"] == "disk"

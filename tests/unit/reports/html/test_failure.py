"""The frames of the user's code, and the last lines of ranks."""

from __future__ import annotations

import os
from pathlib import Path

from ddptrain.reports.html.run_card import Frame, tails, user_frames
from ddptrain.results.run_record import FailureRecord
from tests.unit.reports.runs import failed_run, run


def test_frames_of_installed_packages_are_left_out() -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 12, in main\n    step(i)\n    ~~~~^^^\n'
        '  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in forward\n    x\n'
        f'  File "{os.__file__}", line 3, in walk\n    y\n'
        '  File "/home/me/model.py", line 4\nValueError: wrong shape\n'
    )
    assert user_frames(FailureRecord(traceback=trace)) == [
        Frame("/home/me/train.py", 12, "main", "step(i)"),
        Frame("/home/me/model.py", 4, "", ""),
    ]
    assert user_frames(None) == []


def test_root_cause_comes_first(tmp_path: Path) -> None:
    found = tails(failed_run(tmp_path))
    assert list(found.items()) == [
        (1, ["step 1", "ValueError: wrong shape"]),
        (0, ["fine"]),
        (2, ["victim"]),
    ]


def test_lines_are_bounded(tmp_path: Path) -> None:
    view = run(tmp_path, logs={0: "a" * 20_000_000 + "\n" + "last\n", 1: "".join(f"{at}\n" for at in range(1000))})
    long, many = tails(view).values()
    assert [len(line) for line in long] == [503, 4]
    assert many == [str(at) for at in range(960, 1000)]


def test_credentials_are_hidden_and_links_are_not_followed(tmp_path: Path) -> None:
    view = run(tmp_path, logs={0: "opening s3://user:hunter22@host/x\n"})
    view.layout.log(1).symlink_to("/etc/hostname")
    (tail,) = tails(view).values()
    assert "hunter22" not in tail[0]

"""What is masked in the output of launchers, and which lines stay, with known values."""

from __future__ import annotations

import pytest

from tests.pains.masking import masked, trimmed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "W1123 00:30:36.109000 19575 torch/distributed/run.py:982] Sending process 19589 closing signal SIGTERM",
            "W torch/distributed/run.py] Sending process PID closing signal SIGTERM",
        ),
        ("[E1123 00:34:29.856119240 ProcessGroupGloo.cpp:69] no", "[E ProcessGroupGloo.cpp] no"),
        ("  time      : 2026-11-23_00:24:06", "  time      : TIME"),
        ("  exitcode  : -9 (pid: 14470)  (SIGKILL)", "  exitcode  : -9 (pid: PID)  (SIGKILL)"),
        ("Signal 9 (SIGKILL) received by PID 14470", "Signal 9 (SIGKILL) received by PID PID"),
        ("Connection closed by peer [127.0.0.1]:53941. x", "Connection closed by peer [127.0.0.1]:PORT. x"),
        ("port: 29500, useIpv6: false", "port: PORT, useIpv6: false"),
        ("torchrun --master-port 40799 train.py", "torchrun --master-port PORT train.py"),
        ("--rdzv-endpoint localhost:40799 train.py", "--rdzv-endpoint localhost:PORT train.py"),
        (
            "run train-20261123-002409-d2e2 in /tmp/ddptrain-pains-o2p_qyav/me/runs/train-20261123-002409-d2e2",
            "run train-ID in /home/me/runs/train-ID",
        ),
        (
            'File "/opt/x/.venv/lib/python3.11/site-packages/torch/a.py"',
            'File ".../site-packages/torch/a.py"',
        ),
        ("rank 1 on box7 failed first: killed", "rank 1 on HOST failed first: killed"),
        ("failed after 11.0 s on 2 ranks", "failed after N s on 2 ranks"),
        ("no progress for 8 s, it is in train.py:10", "no progress for N s, it is in train.py:10"),
        ("step 3: sample 11", "step 3: sample 11"),
        ("x" * 200, "x" * 180 + "..."),
    ],
)
def test_what_differs_from_run_to_run_is_masked(line: str, expected: str) -> None:
    assert masked(line, "box7") == expected


def test_lines_that_do_not_matter_become_dots() -> None:
    lines = ["$ run", "W noise", "", "W noise", "step 1", "step 2", "noise", "(exit code 1)"]
    assert trimmed(lines, ["^step 1"]) == ["$ run", "...", "step 1", "...", "(exit code 1)"]
    assert trimmed(lines, []) == lines

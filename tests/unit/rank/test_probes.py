"""What `ddptrain doctor` learns from the process that tries torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BROKEN = """
__version__ = "0.20"

class ops:
    def nms(*_):
        raise RuntimeError("operator torchvision::nms\\n  does not exist")
"""


@pytest.mark.long  # contract/test_doctor.py: the same process, where all works
def test_part_that_fails_is_a_problem_and_the_others_are_tried(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text(BROKEN)
    command = [sys.executable, "-m", "ddptrain.rank.probes"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=True)
    found = json.loads(done.stdout)
    assert (found["torch"], found["torchvision"]) == (torch.__version__, "0.20")
    assert found["problems"] == {"torchvision": "operator torchvision::nms"}

"""A script is __main__, with the arguments and the path that Python would give it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.entrypoint import find_script
from tests.unit.specs import make_spec

RUN = """
import sys
from ddptrain.rank.entrypoint import run_script
from ddptrain.protocol.rank_spec import RankSpec
run_script(RankSpec.from_json(sys.argv[1]))
"""
TELL = """
import json, os, sys
main = sys.modules["__main__"]
told = {"argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "package": __package__}
told["builtins"] = str(__builtins__)
print(json.dumps({**told, "spec": __spec__ and __spec__.name, "main": main.__dict__ is globals()}))
"""


def told(spec: RankSpec, cwd: Path, path: str = "") -> dict[str, Any]:
    """What TELL prints in a process that runs the spec's script."""
    program = f"import sys; sys.path.insert(0, {path!r})\n{RUN}" if path else RUN
    command = [sys.executable, "-c", program, spec.to_json()]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)
    assert ended.returncode == 0, ended.stderr
    said: dict[str, Any] = json.loads(ended.stdout)
    return said


def test_script_is_searched_for_in_the_folders_of_the_users_code(tmp_path: Path) -> None:
    for folder in ("code", "work"):
        (tmp_path / folder).mkdir()
    (tmp_path / "work" / "s.py").write_text("")
    spec = make_spec(script="s.py", workdir=str(tmp_path / "work"), sys_path=(str(tmp_path / "code"),))
    assert find_script(spec) == tmp_path / "work" / "s.py"
    (tmp_path / "code" / "s.py").write_text("")
    assert find_script(spec) == tmp_path / "code" / "s.py"


def test_missing_script_is_named_with_the_folders_that_were_searched(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"there is no script s\.py on host .* \(looked for in {tmp_path}\)"):
        find_script(make_spec(script="s.py", workdir=str(tmp_path)))

"""The processes that tests start by fork: what they get from `subprocess.Popen`, and when they are started anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import child_forks

ROOT = Path(__file__).parents[2]
PROBE = """
import atexit, json, os, sys
fd = int(sys.argv[1])
print(json.dumps({
    "forked": "fractions" in sys.modules, "parent": os.getppid(), "leader": os.getsid(0) == os.getpid(),
    "name": __name__, "arguments": sys.argv[2:], "given": os.environ.get("GIVEN"), "folder": os.getcwd(),
    "stdin": sys.stdin.read(), "pipe": os.read(fd, 100).decode(), "descriptors": sorted(os.listdir("/proc/self/fd")),
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
}))
atexit.register(print, "at exit")
sys.exit(7)
"""
PARENT = """
import fractions, json, os, subprocess, sys
from tests import child_forks

child_forks._MODULES |= {"probe"}
spare = {"MALLOC_ARENA_MAX": "1"}
hidden = child_forks.HiddenModules("no.such.package")
child_forks.ChildForks({**os.environ, **spare}, spare, hidden).install()
read, write = os.pipe()
os.write(write, b"through a pipe")
command = [sys.executable, "-P", "-m", "probe", str(read), "a b", ""]
env = {**os.environ, **json.loads(sys.argv[1])}
options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
child = subprocess.Popen(command, env=env, cwd=sys.argv[2], pass_fds=(read,), start_new_session=True, **options)
said = child.communicate("through stdin")[0].splitlines()
print(json.dumps({**json.loads(said[0]), "said": said[1:], "code": child.returncode, "pid": os.getpid()}))
"""
pytestmark = pytest.mark.skipif(not child_forks.can_fork_siblings(), reason="no Linux on x86-64 or arm64")


def started(folder: Path, **given: str) -> dict[str, Any]:
    """What a process says of itself that a program has started with these variables."""
    (folder / "probe.py").write_text(PROBE)
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PARENT, json.dumps(given), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_forked_process_has_what_popen_gives(tmp_path: Path) -> None:
    said = started(tmp_path, GIVEN="a value")
    assert said["forked"] and said["name"] == "__main__"
    assert said["parent"] == said["pid"] and said["leader"]
    assert said["arguments"] == ["a b", ""] and said["given"] == "a value" and said["folder"] == str(tmp_path)
    assert said["stdin"] == "through stdin" and said["pipe"] == "through a pipe"
    assert len(said["descriptors"]) == 5  # three standard ones, the pipe, and that of the listing
    assert said["said"] == ["at exit"] and said["code"] == 7


def test_spare_variables_make_no_difference_and_others_of_the_interpreter_do(tmp_path: Path) -> None:
    assert started(tmp_path, MALLOC_ARENA_MAX="1")["forked"] is True
    for given in ({"MALLOC_ARENA_MAX": "2"}, {"PYTHONHASHSEED": "3"}, {"OMP_NUM_THREADS": "4"}):
        said = started(tmp_path, **given)
        assert not said["forked"] and said["parent"] == said["pid"] and said["code"] == 7


def test_home_takes_effect_at_a_start_only_with_settings_in_it(tmp_path: Path) -> None:
    dask, fsspec = tmp_path / "one" / ".config" / "dask", tmp_path / "two" / ".config" / "fsspec"
    dask.mkdir(parents=True)
    fsspec.mkdir(parents=True)
    homes = [{"HOME": str(tmp_path / name)} for name in ("one", "two", "three")]
    (dask / "distributed.yaml").write_text("# distributed:\n\n#   logging: {}\n")
    assert [child_forks.changed_at_start(home, homes[2]) for home in homes] == [set()] * 3
    (dask / "distributed.yaml").write_text("# mine:\ndistributed: {}\n")
    (fsspec / "conf.json").write_text("{}")
    assert [child_forks.changed_at_start(home, homes[2]) for home in homes] == [{"HOME"}, {"HOME"}, set()]


def test_hidden_modules_come_back_with_the_first_import() -> None:
    code = (
        "import sys, email.mime.text, email as before; from tests.child_forks import HiddenModules\n"
        "hidden = HiddenModules('email'); assert not [n for n in sys.modules if n.startswith('email')]\n"
        "import email.mime.text as after; assert sys.modules['email'] is before and hidden not in sys.meta_path\n"
        "assert before.__spec__.origin == before.__file__ and after is before.mime.text"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_hidden_modules_can_be_looked_for_and_tell_that_they_are_back() -> None:
    code = (
        "import sys, email.mime.text; from importlib.util import find_spec\n"
        "from tests.child_forks import HiddenModules\n"
        "back = []; hidden = HiddenModules('email', lambda: back.append('email.mime.text' in sys.modules))\n"
        "spec = find_spec('email'); assert spec.submodule_search_locations\n"
        "assert 'email' not in sys.modules and not back\n"
        "import email.mime; assert back == [True]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)

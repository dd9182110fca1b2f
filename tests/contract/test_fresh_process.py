"""A script finds what it would find in a process that torchrun starts, although its rank is a fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Project

# What a script sees of its process, before and after the import of torch.
PROBE = """
import sys
seen = {"modules": sorted(sys.modules)}
import atexit, builtins, decimal, faulthandler, gc, json, locale, multiprocessing, os, resource, signal, socket
import subprocess, tempfile, threading, time, warnings

def stream(file):
    own = [file.name, file.encoding, file.errors, file.mode, file.line_buffering, file.write_through, file.isatty()]
    return [*own, file.fileno(), type(file).__name__, type(file.buffer).__name__]

def status(name):
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name + ":"))

seen["streams"] = [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)]
for name in "argv orig_argv warnoptions _xoptions executable prefix path dont_write_bytecode pycache_prefix".split():
    seen["sys." + name] = getattr(sys, name)
seen["flags"] = str(sys.flags)
seen["flags of children"] = subprocess._args_from_interpreter_flags()
seen["hooks"] = [repr(getattr(sys, name)) for name in ("excepthook", "displayhook", "unraisablehook")]
seen["breakpoint hook"] = repr(sys.breakpointhook)
seen["finders"] = [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path]
seen["limits"] = [sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile()]
seen["encodings"] = [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), locale.getpreferredencoding()]
seen["locale"] = locale.setlocale(locale.LC_ALL)
handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
seen["handlers"] = {int(number): repr(each) for number, each in handlers.items() if each != signal.SIG_DFL}
seen["signal masks"] = [status("SigBlk"), status("SigIgn"), signal.set_wakeup_fd(-1), signal.getitimer(0)]
seen["descriptors"] = sorted(name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))
seen["threads"] = [thread.name for thread in threading.enumerate()]
seen["thread hook"] = threading.excepthook.__qualname__
seen["fault handler"] = faulthandler.is_enabled()
seen["garbage"] = [gc.isenabled(), gc.get_threshold(), gc.get_debug()]
seen["process"] = [multiprocessing.get_start_method(True), multiprocessing.current_process().name]
seen["group"] = [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()]
seen["filters"] = [repr(each) for each in warnings.filters]
seen["builtins"] = sorted(vars(builtins))
seen["umask"] = status("Umask")
seen["working directory"] = os.getcwd()
limits = [name for name in dir(resource) if name.startswith("RLIMIT")]
seen["resources"] = {name: resource.getrlimit(getattr(resource, name)) for name in limits}
seen["priority"] = [os.nice(0), sorted(os.sched_getaffinity(0)), open("/proc/self/oom_score_adj").read()]
seen["defaults"] = [repr(decimal.getcontext()), tempfile.tempdir, socket.getdefaulttimeout(), time.tzname]
seen["main"] = {name: type(each).__name__ for name, each in globals().items() if name[:2] == "__"}
number: int = 1
seen["annotations"] = repr(sys.modules["__main__"].__annotations__)
seen["environment"] = dict(os.environ)
import torch, torch.distributed, numpy
seen["torch"] = [repr(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_float32_matmul_precision()]
seen["torch"] += [torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()]
with open(os.environ["SEEN"], "w") as file:
    json.dump(seen, file)
"""

# What remains different, for every script; docs/start/script.md lists it.
DIFFERENT = {
    "modules": "what ddptrain and torch import",
    "handlers": "a handler for SIGTERM",
    "descriptors": "the log, the events and the commands",
    "threads": "one that reads commands",
    "thread hook": "reports failures of threads",
    "breakpoint hook": "names --debug",
    "fault handler": "prints stacks of crashes",
    "filters": "those that torch and the modules it imports add",
    "group": "no session of its own",
}
SET_BY_DDPTRAIN = {"CUDA_VISIBLE_DEVICES", "DDPTRAIN_RUN_ID", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"}
SET_BY_DDPTRAIN |= {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
OTHER_VALUE = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "SEEN", "_"}


def seen_under_torchrun(project: Project, *args: str) -> dict[str, Any]:
    """What PROBE sees under torchrun."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"SEEN": str(project.folder / "theirs.json"), "XDG_STATE_HOME": str(project.folder / ".state")}
    command = [torchrun, "--standalone", "--nproc-per-node", "1", *args]
    done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((project.folder / "theirs.json").read_text())
    return found


def test_script_sees_what_it_sees_under_torchrun_but_for_the_differences_in_the_docs(project: Project) -> None:
    project.write("probe.py", PROBE)
    theirs = seen_under_torchrun(project, "probe.py", "--a", "b")
    project("run", "--ranks", "1", "probe.py", "--", "--a", "b", env={"SEEN": str(project.folder / "ours.json")}, rc=0)
    ours = json.loads((project.folder / "ours.json").read_text())
    environments = theirs.pop("environment"), ours.pop("environment")
    assert environments[1].keys() - environments[0].keys() == SET_BY_DDPTRAIN
    assert environments[0].keys() <= environments[1].keys()
    assert {name for name, value in environments[0].items() if environments[1][name] != value} <= OTHER_VALUE
    assert {name: ours[name] for name in ours if name not in DIFFERENT} == {
        name: theirs[name] for name in theirs if name not in DIFFERENT
    }
    assert {name for name in ours if ours[name] != theirs[name]} <= DIFFERENT.keys()
    assert set(theirs["modules"]) <= set(ours["modules"])
    assert ours["handlers"].keys() - theirs["handlers"].keys() == {"15"}
    assert theirs["filters"] == ours["filters"][-len(theirs["filters"]) :]


def test_module_starts_itself_with_the_same_command(project: Project, shared_cluster: str) -> None:
    project.write("mine/again.py", "import sys\nprint(sys.orig_argv[1:])\n")
    done = project("run", "--cluster", shared_cluster, "--ranks", "1", "-m", "mine.again", "x", rc=0)
    assert "[rank 0] ['-u', '-m', 'mine.again', 'x']" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "expression", "printed"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "torch.distributed.get_debug_level()", "DebugLevel.DETAIL"),
        pytest.param("PYTORCH_JIT", "0", "torch.jit._state._enabled.enabled", "False", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("source", ["configuration", pytest.param("shell", marks=pytest.mark.long)])
def test_variable_that_torch_reads_at_its_import_works_from_configuration_and_shell(
    project: Project, shared_cluster: str, source: str, name: str, value: str, expression: str, printed: str
) -> None:
    project.write("variable.py", f"import torch, torch._dynamo, torch.distributed\nprint('found', {expression})\n")
    where = ("run", "--cluster", shared_cluster, "--ranks", "1")
    if source == "shell":
        assert f"found {printed}" in project(*where, "variable.py", env={name: value}, rc=0).stdout
        return
    configured = project(*where, "--set", f"env.{name}={value}", "variable.py", rc=0)
    assert f"found {printed}" in configured.stdout
    assert f"ranks start cold, some seconds slower: only a new process reads {name}" in configured.stderr


def test_numbers_in_env_reach_the_ranks_as_they_are_written(project: Project, shared_cluster: str) -> None:
    project.write("printing.py", "import os\nprint(os.environ['ONE'], os.environ['TWO'])\n")
    options = ("--set", "env.ONE=12.10", "--set", "env.TWO=007")
    shell = {"ONE": "of the shell", "TWO": "of the shell"}
    done = project("run", "--cluster", shared_cluster, "--ranks", "1", *options, "printing.py", env=shell, rc=0)
    assert "[rank 0] 12.10 007" in done.stdout


OPEN_FILES = """
import atexit, gzip, os, shelve, signal, sys, tempfile, threading, time, zipfile

class Saver:
    def __init__(self, path):
        self.path = path

    def __del__(self):
        with open(os.path.join(".", self.path), "w") as file:
            file.write(text())

def text():
    return "saved"

if sys.argv[1:] == ["held"]:
    signal.signal(signal.SIGUSR1, lambda *_: text())
zipped = gzip.open("a.gz", "wb")
zipped.write(b"abc")
archive = zipfile.ZipFile("a.zip", "w")
archive.writestr("name", "content")
shelf = shelve.open("shelf", writeback=True)
shelf["key"] = []
shelf["key"].append(1)
temporary = tempfile.NamedTemporaryFile(dir=".", prefix="temporary-")
plain = open("plain.txt", "w")
plain.write("text")
saver = Saver("saver.txt")
atexit.register(print, "exit handler")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("last line")
"""


@pytest.mark.parametrize("kind", ["free", "held", "module"])
def test_files_that_a_script_leaves_open_are_complete(project: Project, shared_cluster: str, kind: str) -> None:
    project.write("leaves.py" if kind != "module" else "helper.py", OPEN_FILES)
    if kind == "module":
        project.write("leaves.py", "import helper")
    done = project("run", "--cluster", shared_cluster, "--ranks", "1", "leaves.py", "--", kind, rc=0)
    own = [line for line in done.stdout.splitlines() if line.startswith("[rank 0]")]
    assert own == ["[rank 0] last line", "[rank 0] thread", "[rank 0] exit handler"]
    read = """
        import gzip, shelve, zipfile
        print(gzip.open("a.gz").read(), zipfile.ZipFile("a.zip").read("name"), shelve.open("shelf")["key"])
        print(open("plain.txt").read(), open("saver.txt").read())
    """
    path = project.write("read.py", read)
    read_back = subprocess.run([sys.executable, path], cwd=project.folder, capture_output=True, text=True, timeout=100)
    assert read_back.stdout.splitlines() == ["b'abc' b'content' [1]", "text saved"], read_back.stderr
    assert list(project.folder.glob("temporary-*")) == []


def test_files_are_complete_if_python_is_below_the_working_directory(project: Project, shared_cluster: str) -> None:
    code = """
        import os, zipfile
        archive = zipfile.ZipFile(os.path.join(os.path.dirname(__file__), "a.zip"), "w")
        archive.writestr("name", "content")
        archive.itself = archive  # only the garbage collector closes it
    """
    command = "run", "--runs-dir", project.folder / "runs", "--cluster", shared_cluster, "--ranks", "1"
    project(*command, project.write("leaves.py", code), cwd=Path("/"), rc=0)
    assert zipfile.ZipFile(project.folder / "a.zip").read("name") == b"content"


def test_modules_of_the_script_are_found_before_those_of_the_rank_server(project: Project, shared_cluster: str) -> None:
    project.write("statistics.py", "MINE = 'statistics'\n")
    project.write("cuda/__init__.py", "MINE = 'cuda'\n")
    project.write("pydantic/__init__.py", "MINE = 'pydantic'\n")
    project.write("sympy/notes.txt", "a folder without modules hides nothing\n")
    code = (
        "import cuda, pydantic, statistics, sympy\nprint(cuda.MINE, pydantic.MINE, statistics.MINE, sympy.Integer(2))\n"
    )
    project.write("own.py", code)
    done = project("run", "--cluster", shared_cluster, "--ranks", "1", "own.py", rc=0)
    assert "[rank 0] cuda pydantic statistics 2" in done.stdout


def test_function_imports_its_own_modules_before_those_of_the_rank_server(
    project: Project, shared_cluster: str
) -> None:
    project.write("statistics.py", "MINE = 'statistics'\n")
    config = project.function("import statistics\n\ndef train(ctx, x):\n    print(statistics.MINE)\n", params={"x": 1})
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "1", rc=0)
    assert "[rank 0] statistics" in done.stdout


def test_traceback_is_in_the_log_although_the_script_replaces_print(project: Project, shared_cluster: str) -> None:
    code = "import builtins\nbuiltins.print = lambda *_, **__: None\nraise ValueError('shown nowhere else')\n"
    project.write("silent.py", code)
    project("run", "--cluster", shared_cluster, "--ranks", "1", "silent.py", rc=1)
    (folder,) = project.run_directories()
    assert 'silent.py", line 3' in (folder / "logs" / "rank-0.log").read_text()


@pytest.mark.long
def test_script_may_close_all_descriptors(project: Project, shared_cluster: str) -> None:
    code = """
        import os, sys
        os.closerange(3, 256)
        files = [open(f"own-{number}", "w") for number in range(10)]
        print("closed")
        sys.exit(int(sys.argv[1]))
    """
    project.write("closes.py", code)
    where = ("run", "--cluster", shared_cluster, "--ranks", "1", "closes.py")
    for status in ("0", "1"):
        done = project(*where, "--", status, rc=int(status))
        assert "closed" in done.stdout and "Traceback" not in done.stdout
    assert [path.read_text() for path in sorted(project.folder.glob("own-*"))] == [""] * 10


@pytest.mark.long
def test_folder_zip_file_and_compiled_file_are_scripts(project: Project, shared_cluster: str) -> None:
    build = """
        import py_compile, zipapp
        py_compile.compile("app/__main__.py", "compiled.pyc")
        zipapp.create_archive("app", "packed.pyz")
    """
    project.write("app/__main__.py", "import sys\nprint('argv', sys.argv, __name__)\nimport beside\n")
    project.write("app/beside.py", "print('beside', __name__)\n")
    project.write("beside.py", "print('beside', __name__)\n")
    subprocess.run([sys.executable, project.write("build.py", build)], cwd=project.folder, check=True, timeout=100)
    for script in ("app", "packed.pyz", "compiled.pyc"):
        done = project("run", "--ranks", "1", "--cluster", shared_cluster, script, "--", "x", rc=0)
        assert f"[rank 0] argv ['{script}', 'x'] __main__" in done.stdout
        assert "[rank 0] beside beside" in done.stdout


def test_warning_of_torch_names_the_line_of_the_script(project: Project, shared_cluster: str) -> None:
    code = """
        import torch.distributed as dist
        from torch.nn import Linear
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        DistributedDataParallel(Linear(1, 1), bucket_cap_mb=1, process_group=dist.group.WORLD, check_reduction=True)
        dist.destroy_process_group()
    """
    project.write("warned.py", code)
    done = project("run", "--cluster", shared_cluster, "--ranks", "2", "warned.py", rc=0)
    assert "warned.py:7: " in done.stdout

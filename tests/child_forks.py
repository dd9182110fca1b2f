"""Starts the processes of a forked command by fork, too: workers, schedulers and rank servers.

An import of torch and Dask takes a rank server 2 s of CPU time and a worker 0.7 s, and the integration tests start
hundreds of them. The fork server (tests/fork_server.py) has imported both. Each process that it forks has a helper: a
fork of its own, made at its start, when it has one thread and no state. `subprocess.Popen` has the helper fork where
it would start `python -m MODULE` with one of _MODULES. The new process has the caller as its parent (CLONE_PARENT), and
session, environment, descriptors, signals and working directory as `Popen` would give them. A test
itself may also start `python -c CODE` in this way. Any other program, an environment that only a real start reads, and
any other system than Linux on x86-64 or arm64 get a real start.
"""

from __future__ import annotations

import array
import atexit
import copy
import ctypes
import fcntl
import importlib
import inspect
import io
import json
import multiprocessing.process
import multiprocessing.spawn
import multiprocessing.util
import os
import platform
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

LENGTH = struct.Struct("!I")
HELPER = "fork helper"  # the name of its process
RANK_IMPORTS = "DDPTRAIN_TEST_RANK_IMPORTS"  # modules that take long to import: a rank server has them for its ranks
# Read by Python, the C library, torch, Dask and fsspec when they start or are imported.
_READ_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "DASK_", "FSSPEC_", "OPENBLAS_", "OMP_", "KMP_", "GOMP_", "MKL_", "LC_"),
    *("LANG", "TZ", "TORCH_"),  # TORCHINDUCTOR_CACHE_DIR is set by an import of torch
)
# Where Dask and fsspec look for their settings. Most folders that tests make their HOME have none.
_READ_AT_START_NAMES = frozenset({"HOME"})
_SETTINGS = (".config/dask", ".config/fsspec")
_SET_BY_IMPORTS = frozenset({"KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"})  # by scikit-learn, for another OpenMP library
_RANK_SERVER = "ddptrain.rank.server"
# Modules, and scripts of tests by their names, that start further processes.
_SCRIPTS = frozenset({"command.py", "migrate_from_dask_pytorch_ddp.py"})
_STARTING = _SCRIPTS | {
    "ddptrain",
    "ddptrain.clusters.backends.dask_class_process",
    "ddptrain.clusters.scheduler.scheduler_process",
    "ddptrain.worker",
    "distributed.cli.dask_worker",
    "tests.integration.with_limit",
}
_MODULES = _STARTING | {
    _RANK_SERVER,
    "ddptrain.cli.warm.server",
    "ddptrain.clusters.backends.kubernetes.port_forward",
    "ddptrain.driver.transfer.inputs_process",
    "distributed.cli.dask_scheduler",
    "tests.unit.worker.plain_scheduler",
    "wandb",
}
# Scripts that torchrun starts in the tests, as `python -u SCRIPT`, and variables that it sets; the second is for NCCL.
_RANK_SCRIPTS = frozenset({"torchrun_script.py", "imagenet.py", "main.py"})
_OF_TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
_REPOSITORY = str(Path(__file__).parents[1])
_NAMESPACES = {"net": "net", "mount": "mnt", "uts": "uts", "pid": "pid"}  # as nsenter and /proc name them
_FIRST_SPARE_FD = 200
_IGNORABLE = (int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGHUP))
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_TID_ADDRESS = 1, 15, 40
_SYSTEM_CALLS = {"x86_64": 56, "aarch64": 220}  # clone


# They become part of Dask's configuration, which a forked process reads anew.
_DASK_FACTS = frozenset({"DASK_SCHEDULER_ADDRESS", "DASK_WORKER_NAME", "DASK_INTERNAL_INHERIT_CONFIG"})
# Dask's nanny sets them for its worker, which computes nothing in these tests: ranks and their server lack them.
_OF_NANNIES = frozenset(
    {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "PYTHONHASHSEED"}
)


def changed_at_start(environment: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    """The variables that differ between both environments and that take effect only at a real start."""
    names = {*environment, *other} - _SET_BY_IMPORTS - _DASK_FACTS
    names = {name for name in names if _value(environment, name) != _value(other, name)}
    return {name for name in names if name.startswith(_READ_AT_START) or name in _READ_AT_START_NAMES}


def _value(environment: Mapping[str, str], name: str) -> str | list[str] | None:
    value = environment.get(name)
    if name == "HOME":
        return _settings_below(Path(value or os.path.expanduser("~")))
    if name != "PYTHONPATH" or value is None:
        return value
    return [folder for folder in value.split(os.pathsep) if folder != _REPOSITORY]  # it is on the path anyway


def _settings_below(home: Path) -> list[str]:
    """The lines of all settings in a home; Dask writes files of comments there."""
    files = [file for folder in _SETTINGS for file in sorted((home / folder).glob("*")) if file.is_file()]
    lines = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


def send_order(link: socket.socket, order: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Send an order with descriptors; returns the pid of the process that was forked for it."""
    data = json.dumps(order).encode()
    link.sendmsg([LENGTH.pack(len(data))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    link.sendall(data)
    (pid,) = LENGTH.unpack(_receive(link, LENGTH.size))
    return int(pid)


def read_order(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next order and its descriptors. Raises EOFError or ConnectionError where none comes any more."""
    head, fds, _, _ = socket.recv_fds(link, LENGTH.size, 64)
    if not head:
        raise EOFError
    (size,) = LENGTH.unpack(head + _receive(link, LENGTH.size - len(head)))
    order: dict[str, Any] = json.loads(_receive(link, size))
    return order, fds


def _receive(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


# --- modules that only rank servers have ---


class HiddenModules(MetaPathFinder, Loader):
    """Modules that are loaded but not in `sys.modules`: the first import of one of them brings all back."""

    def __init__(self, package: str, on_return: Callable[[], object] = lambda: None) -> None:
        """`on_return` is called when they are back."""
        self._modules = {n: m for n, m in sys.modules.items() if n == package or n.startswith(package + ".")}
        self._on_return = on_return
        self._spec: ModuleSpec | None = None
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._modules))  # a process that ends need not take them apart

    def restore(self) -> None:
        """Put them back."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            sys.modules.update(self._modules)
            self._on_return()

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """A spec for a module that is loaded already."""
        if name not in self._modules:
            return None
        spec = copy.copy(self._modules[name].__spec__)
        assert spec is not None
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The loaded module."""
        module: ModuleType = self._modules[spec.name]
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has been executed."""
        module.__spec__ = self._spec
        self.restore()


# --- in the process that starts others ---


class Forks(ABC):
    """What `subprocess.Popen` asks of a process that forks."""

    def __init__(self, environment: Mapping[str, str], spare: Mapping[str, str]) -> None:
        """`environment` is that of the process that forks; of it a new process may lack the variables `spare`."""
        self._environment, self._spare = dict(environment), dict(spare)

    @abstractmethod
    def start(self, order: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Fork for an order; returns the pid of the new process, a child of this one."""

    def install(self) -> None:
        """Have `subprocess.Popen` of this process use forks."""
        subprocess.Popen = self.popen()  # type: ignore[assignment, misc]

    def popen(self) -> type[subprocess.Popen[Any]]:
        """A `subprocess.Popen` that uses forks."""
        forks = self
        execute = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]

        class Popen(subprocess.Popen):  # type: ignore[type-arg]
            def _execute_child(self, *args: Any) -> None:
                call = execute.bind(self, *args).arguments
                order = forks.order(call)
                if order is None:
                    super()._execute_child(*args)  # type: ignore[misc]
                    return
                own = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
                standard = [number if fd == -1 else fd for number, fd in enumerate(own)]
                self.pid = forks.start(order, [*standard, *order["fds"]])
                self._child_created = True
                pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
                self._close_pipe_fds(*(call[name] for name in pipes))  # type: ignore[attr-defined]

        return Popen

    def order(self, call: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the helper has to do for a call of Popen; None where only a real start does."""
        words = [os.fspath(word) for word in call["args"]] if isinstance(call["args"], list | tuple) else []
        host, entered, words = _split_host(words)
        options, module, arguments = _split(words)
        env = dict(os.environ if call["env"] is None else call["env"])
        of_torchrun = os.path.basename(module) in _RANK_SCRIPTS
        cwd = entered or os.fspath(call["cwd"] or os.getcwd())
        environment = self._environment | (_OF_TORCHRUN if of_torchrun else {})
        plain = (
            self._is_known(module)
            and (call["preexec_fn"], call["executable"]) == (None, None)
            and call["close_fds"]
            and (call["uid"], call["gid"], call["gids"], call["umask"]) == (None, None, None, -1)
            and os.path.isdir(cwd)
            and all(fd < _FIRST_SPARE_FD for fd in call["pass_fds"])
            and not changed_at_start({**self._spare, **env}, environment)
        )
        if not plain:
            return None
        code = arguments.pop(0) if module in ("-c", _RANK_SERVER) else ""
        return {
            "module": module,
            "args": arguments,
            "code": code,
            "one_thread": of_torchrun,
            "safe": "-P" in options,
            "quiet": "-W ignore" in options,
            "host": host,
            "env": env,
            "cwd": cwd,
            "fds": list(call["pass_fds"]),
            "session": bool(call["start_new_session"]),
            "group": call.get("process_group", -1),
            "ignored": [number for number in _IGNORABLE if signal.getsignal(number) is signal.SIG_IGN],
            "words": words,
        }

    def _is_known(self, module: str) -> bool:
        """Whether a module or script may be forked."""
        return module in _MODULES or os.path.basename(module) in _SCRIPTS | _RANK_SCRIPTS


def _split_host(words: list[str]) -> tuple[int, str, list[str]]:
    """Of `nsenter --target PID ... env --chdir FOLDER COMMAND...`: these three; of any other command 0, "" and itself.

    It is how tests/integration/netns.py starts commands on its hosts.
    """
    until = len(_NAMESPACES) + 3
    known = words[:2] == ["nsenter", "--target"] and words[3:until] == [f"--{name}" for name in _NAMESPACES]
    if known and words[until : until + 2] == ["env", "--chdir"]:
        return int(words[2]), words[until + 2], words[until + 3 :]
    return 0, "", words


def _split(words: Sequence[str]) -> tuple[frozenset[str], str, list[str]]:
    """Options, module and arguments of `python OPTION... -m MODULE ARGUMENT...` and `python SCRIPT ARGUMENT...`.

    Options are "-P" and "-W ignore". A script stands for a module; "-c" does, with its code as the first argument. For
    all else it is "".
    """
    options, rest = set(), list(words[1:])
    while rest[:1] == ["-P"] or rest[:2] == ["-W", "ignore"]:
        size = 1 if rest[0] == "-P" else 2
        options.add(" ".join(rest[:size]))
        del rest[:size]
    if words[:1] == [sys.executable] and rest[:1] == ["-m"] and len(rest) > 1:
        return frozenset(options), rest[1], rest[2:]
    if words[:1] == [sys.executable] and rest[:2] == ["-u", "-c"] and f"from {_RANK_SERVER} import" in rest[2]:
        return frozenset({"-P"}), _RANK_SERVER, rest[2:]
    if words[:1] == [sys.executable] and rest[:1] == ["-c"] and len(rest) > 1:
        return frozenset(options), "-c", rest[1:]
    if words[:1] == [sys.executable] and os.path.basename("".join(words[1:2])) in _SCRIPTS:
        return frozenset({"-P"}), words[1], list(words[2:])
    if words[:2] == [sys.executable, "-u"] and os.path.basename("".join(words[2:3])) in _RANK_SCRIPTS:
        return frozenset({"-P"}), words[2], list(words[3:])
    return frozenset(), "", []


class ChildForks(Forks):
    """The helper of this process. Made while there is one thread."""

    def __init__(self, environment: Mapping[str, str], spare: Mapping[str, str], hidden: HiddenModules) -> None:
        """As of `Forks`; modules that are `hidden` are there for rank servers alone."""
        super().__init__(environment, spare)
        self._hidden = hidden
        self._lock = threading.Lock()  # Dask's nannies start their workers in threads
        self._link, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._link.close()
            self._serve(theirs)
        theirs.close()

    def start(self, order: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Have the helper fork; returns the pid of the new process, a child of this one."""
        with self._lock:
            return send_order(self._link, order, fds)

    def install(self) -> None:
        """Have `subprocess.Popen` and Dask's nannies in this process use the helper."""
        super().install()
        original = multiprocessing.util.spawnv_passfds

        def spawn(path: Any, args: Any, passfds: Sequence[int]) -> int:
            order = self._spawn_order([os.fsdecode(word) for word in args], passfds)
            return self.start(order, [0, 1, 2, *passfds]) if order else original(path, args, passfds)

        multiprocessing.util.spawnv_passfds = spawn

    def _spawn_order(self, words: Sequence[str], fds: Sequence[int]) -> dict[str, Any] | None:
        """What the helper has to do for a process of multiprocessing; None where only a real start does."""
        found = re.search(r"spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)", words[-2])
        env = {name: value for name, value in os.environ.items() if name not in _OF_NANNIES}
        environment = {name: value for name, value in self._environment.items() if name not in _OF_NANNIES}
        if not found or changed_at_start({**self._spare, **env}, {**self._spare, **environment}):
            return None
        return {
            "module": "-c",
            "args": list(words[-1:]),
            "words": list(words),
            "safe": True,
            "host": 0,
            "spawn": [int(found[1]), int(found[2])],
            "fds": list(fds),
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "session": False,
            "group": -1,
            "ignored": [],
        }

    # --- in the helper ---

    def _serve(self, link: socket.socket) -> NoReturn:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, HELPER.encode(), 0, 0, 0)
        set_command_line([HELPER])
        for number in _IGNORABLE:
            signal.signal(number, signal.SIG_IGN)
        os.closerange(3, link.fileno())
        os.closerange(link.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        while True:
            try:
                order, fds = read_order(link)
            except (EOFError, ConnectionError):
                os._exit(0)
            pid = fork_sibling()
            if pid == 0:
                link.detach()  # it is closed with all other descriptors
                self._run(order, fds)
            for fd in fds:
                os.close(fd)
            link.sendall(LENGTH.pack(pid))

    def _run(self, order: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
        """Be the process of an order, to its end."""
        be_child(order, fds)
        if order["module"] == _RANK_SERVER:
            self._hidden.restore()
            sys.stdin, sys.stdout, sys.stderr = open(0), _unbuffered(1), _unbuffered(2)  # noqa: SIM115
            for name in order["env"].get(RANK_IMPORTS, "").split():
                importlib.import_module(name)
        if order["module"] in _STARTING or "spawn" in order:
            ChildForks(self._environment, self._spare, self._hidden).install()
        if "spawn" in order:
            tracker, pipe = order["spawn"]
            run_to_end(lambda: multiprocessing.spawn.spawn_main(pipe, tracker_fd=tracker))
        run_program(order)


def _unbuffered(fd: int) -> io.TextIOWrapper:
    """A stream of `python -u`."""
    raw = io.FileIO(fd, "w", closefd=False)
    raw.name = {1: "<stdout>", 2: "<stderr>"}[fd]
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def be_child(order: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Give this process, just forked for an order, what `Popen` gives: descriptors, signals, session, environment."""
    _take_descriptors(fds, order["fds"])
    for number in _IGNORABLE:
        signal.signal(number, signal.SIG_IGN if number in order["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in order["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["session"]:
        os.setsid()
    elif order["group"] >= 0:
        os.setpgid(0, order["group"])
    if order["host"]:
        _enter(order["host"])
    become_program(order)


def _enter(pid: int) -> None:
    """Go on in a child in the namespaces of another process, as nsenter does; this process ends as the child does."""
    namespaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in _NAMESPACES.values()]
    for namespace in namespaces:
        assert ctypes.CDLL(None).setns(namespace, 0) == 0, f"the process {pid} has no such namespace"
        os.close(namespace)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def become_program(order: Mapping[str, Any]) -> None:
    """Folder, environment, arguments and import path of this process, as a real start would have them."""
    os.chdir(order["cwd"])
    multiprocessing.process.ORIGINAL_DIR = order["cwd"]  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None
    if not order["safe"]:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    if order.get("quiet"):
        warnings.simplefilter("ignore")
    sys.argv = [order["module"], *order["args"]]
    set_command_line(order["words"])
    _set_environment_block(order["env"])
    if (dask := sys.modules.get("dask")) and any(order["env"].get(name) for name in _DASK_FACTS):
        dask.config.refresh()


def run_program(order: Mapping[str, Any]) -> NoReturn:
    """Run the module, the script or the code of an order as `__main__`, and end."""
    module = order["module"]
    if order.get("one_thread"):  # OMP_NUM_THREADS has been read already
        importlib.import_module("torch").set_num_threads(1)
    if order.get("code"):
        main = sys.modules["__main__"] = ModuleType("__main__")
        run_to_end(lambda: exec(compile(order["code"], "<string>", "exec"), vars(main)))
    if module.endswith(".py"):
        path = os.path.abspath(module)
        sys.path.insert(0, os.path.dirname(path))
        run_to_end(lambda: runpy.run_path(path, run_name="__main__"))
    run_to_end(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def run_to_end(program: Callable[[], object]) -> NoReturn:
    """Run a program, and end as the interpreter does, but without taking apart hundreds of modules.

    That takes 0.3 s of CPU time with Dask and torch. Threads, exit handlers and buffers get what they always get.
    """
    code = 0
    try:
        program()
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            raise  # the interpreter prints it
        code = stop.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # the interpreter tries again, says so and changes the code
    os._exit(code & 0xFF)


def set_command_line(words: Sequence[str]) -> None:
    """Set the command line in /proc, within the space that the program's arguments had."""
    _write_block(45, words)


def _set_environment_block(environment: Mapping[str, str]) -> None:
    """Set the environment in /proc, where tests look for their marks: these come first, lest the space be too small.

    The C library has no pointers there any more: all variables have been set anew.
    """
    names = sorted(environment, key=lambda name: not name.startswith("DDPTRAIN_"))
    _write_block(47, [f"{name}={environment[name]}" for name in names])


def _write_block(field: int, words: Sequence[str]) -> None:
    """Write words, each with a zero, to the space whose ends are in two fields of /proc/self/stat after the name."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[field : field + 2])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _take_descriptors(given: Sequence[int], numbers: Sequence[int]) -> None:
    """Make `given` the descriptors 0, 1, 2 and `numbers`, and close all others."""
    spare = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_SPARE_FD) for fd in given]
    os.closerange(0, _FIRST_SPARE_FD)
    for fd, number in zip(spare, [0, 1, 2, *numbers], strict=True):
        os.dup2(fd, number)
    os.closerange(_FIRST_SPARE_FD, os.sysconf("SC_OPEN_MAX"))


def can_fork_siblings() -> bool:
    """Whether this system has what `ChildForks` needs."""
    return sys.platform == "linux" and platform.machine() in _SYSTEM_CALLS


def fork_sibling() -> int:
    """`os.fork`, but the new process is a child of this process's parent."""
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    address = ctypes.c_void_p()  # where the C library keeps the number of this thread
    libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    flags = _CLONE_PARENT | int(signal.SIGCHLD)
    if address.value:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    none = ctypes.c_void_p()
    places = [none, address, none] if platform.machine() == "x86_64" else [none, none, address]
    arguments = [ctypes.c_long(_SYSTEM_CALLS[platform.machine()]), ctypes.c_long(flags), none, *places]
    libc.syscall.restype = ctypes.c_long
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(*arguments))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    assert pid >= 0, "clone failed"
    return pid

"""Scripts of many kinds give under `ddptrain run` what they give under torchrun.

The expectations are torchrun's: a test marked `long` checks each of them with torchrun. Where a run differs by design,
the case says how and why, and docs/start/script.md says it, too. Lines of scripts that are compared begin with ">".
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.contract.conftest import Project
from tests.support.command import PATIENCE_S

Lines = Sequence[str] | Mapping[int, Sequence[str]]
Files = Mapping[str, str | bytes | None]


@dataclass(frozen=True, slots=True)
class Case:
    """A script, how it is started, and what torchrun makes of it."""

    name: str
    code: str = ""  # of script.py
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, str] = field(default_factory=dict)  # further files of the project: text
    build: Callable[[Path], object] = lambda _: None  # makes files in the project's folder
    script: Sequence[str] = ("script.py",)
    ranks: int = 2
    max_restarts: int = 0
    signum: signal.Signals | None = None  # sent to the command when all ranks have printed "> at work"
    rc: int = 0
    lines: Lines = field(
        default_factory=dict
    )  # of each rank, or of some: a rank that fails may end the others at any line
    files: Files = field(default_factory=dict)  # afterwards; None: there is no such file
    says: str = ""  # in what the command prints: the cause of a failure
    # What differs by design, and why.
    rc_here: int | None = None
    files_here: Files = field(default_factory=dict)
    why: str = ""


def _ends(name: str, end: str, rc: int, **more: object) -> Case:
    """A script of which rank 1 ends with `end`."""
    code = f"""
        import atexit, ctypes, os, signal, sys, threading, time
        print("> begins")
        if os.environ["RANK"] == "1":
            {end}
        print("> goes on")
    """
    return Case(name, code, rc=rc, **more)  # type: ignore[arg-type]


_BEGINS = {1: ["begins"]}
_GOES_ON = ["begins", "goes on"]
_THREAD = "threading.Thread(target=lambda: {}).start(); time.sleep(0.3)"

EXITS = [
    Case(
        "exits-that-are-0",
        """
        import os, sys
        print("> begins", flush=True)
        [lambda: sys.exit(None), lambda: sys.exit(False), lambda: os._exit(0), lambda: sys.exit(256)][
            int(os.environ["RANK"])
        ]()
        """,
        ranks=4,
        lines=["begins"],
    ),
    _ends("exit-1", "sys.exit(1)", 1, lines=_BEGINS),
    _ends("exit-3", "sys.exit(3)", 1, lines=_BEGINS),
    _ends("exit-255", "exit(255)", 1, lines=_BEGINS),
    _ends("exit-negative", "sys.exit(-1)", 1, lines=_BEGINS),
    _ends("exit-text", "sys.exit('> data set is empty')", 1, lines={1: ["begins", "data set is empty"]}),
    _ends("exit-true", "sys.exit(True)", 1, lines=_BEGINS),
    _ends("os-exit", "os._exit(5)", 1),
    _ends("exception", "raise ValueError('wrong shape')", 1, lines=_BEGINS, says="wrong shape"),
    _ends("base-exception", "raise BaseException('from the bottom')", 1, lines=_BEGINS, says="from the bottom"),
    _ends("keyboard-interrupt", "raise KeyboardInterrupt", 1, lines=_BEGINS),
    _ends("exception-group", "raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])", 1, lines=_BEGINS),
    _ends("exit-in-thread", _THREAD.format("sys.exit(3)"), 0, lines=_GOES_ON),
    _ends("exception-in-thread", _THREAD.format("1 / 0"), 0, lines=_GOES_ON),
    _ends("os-exit-in-thread", _THREAD.format("os._exit(3)"), 1),
    _ends("exception-in-atexit", "atexit.register(lambda: 1 / 0)", 0, lines=_GOES_ON),
    _ends("exit-in-atexit", "atexit.register(sys.exit, 3)", 0, lines=_GOES_ON),
    _ends("abort", "os.abort()", 1),
    _ends("segmentation-fault", "ctypes.string_at(0)", 1, says="SIGSEGV"),
    _ends("kill-9-to-itself", "os.kill(os.getpid(), 9)", 1, says="SIGKILL"),
    _ends("sigusr1-to-itself", "os.kill(os.getpid(), signal.SIGUSR1)", 1, says="SIGUSR1"),
    _ends("sigint-to-itself", "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", 1, lines=_BEGINS),
    _ends(
        "sigterm-to-itself",
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)",
        1,
        rc_here=4,
        why="SIGTERM that ddptrain has not sent means that the host is about to stop",
    ),
    Case("stdout-is-none", "import sys\nprint('> begins', flush=True)\nsys.stdout = None\n", lines=["begins"]),
    Case(
        "finalizers-at-exit",
        """
        import atexit, weakref

        class Kept:
            pass

        kept = Kept()
        atexit.register(print, "> exit handler")
        weakref.finalize(kept, print, "> finalizer")
        """,
        lines=["finalizer", "exit handler"],
    ),
    Case(
        "end-in-order",
        """
        import atexit, threading, time
        from concurrent.futures import ThreadPoolExecutor

        class Held:
            def __del__(self):
                print("> released")

        held = Held()
        held.itself = held  # a cycle
        pool = ThreadPoolExecutor(1)
        pool.submit(lambda: (time.sleep(0.1), print("> work of the pool")))
        atexit.register(print, "> first registered")
        atexit.register(print, "> last registered")
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        print("> last line")
        """,
        lines=[
            "last line",
            "work of the pool",
            "last registered",
            "first registered",
            "released",
        ],
    ),
]

SIGNALS = [
    Case(
        "handlers-in-the-script",
        """
        import os, signal, subprocess, time

        def handle(number, frame):
            print(">", signal.Signals(number).name)

        for each in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD):
            signal.signal(each, handle)
        for each in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), each)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.2)
        print(">", subprocess.run(["true"]).returncode)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        print("> waited for", signal.sigwait([signal.SIGUSR1]).name)
        """,
        lines=["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP", "SIGALRM", "SIGCHLD", "0", "waited for SIGUSR1"],
    ),
    *[
        Case(
            f"{number.name.lower()}-to-the-command",
            f"""
            import pathlib, os, signal, sys, time
            rank, asked = os.environ["RANK"], []
            signal.signal(signal.{number.name}, lambda *_: asked.append(1))
            print("> at work", flush=True)
            while not asked:
                time.sleep(0.02)
            pathlib.Path("saved-" + rank).write_text("state")
            """,
            signum=number,
            lines=["at work"],
            files={"saved-0": "state", "saved-1": "state"},
            rc=1,
            rc_here=rc,
            why="the exit code says what ended the run, and whether it should be run again",
        )
        for number, rc in ((signal.SIGTERM, 75), (signal.SIGINT, 130))
    ],
    Case(
        "sigint-and-child-processes",
        """
        import os, pathlib, subprocess, sys
        child = '''
        import pathlib, sys, time
        try:
            print("> at work", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            pathlib.Path(sys.argv[1]).write_text("interrupted")
        '''
        rank = os.environ["RANK"]
        try:
            subprocess.run([sys.executable, "-c", __import__("textwrap").dedent(child), "child-" + rank])
        finally:
            pathlib.Path("finally-" + rank).write_text("")
        """,
        signum=signal.SIGINT,
        lines=["at work"],
        files={"child-0": "interrupted", "child-1": "interrupted", "finally-0": "", "finally-1": ""},
        rc=1,
        rc_here=130,
        why="the exit code says what ended the run",
    ),
]

MODULES = [
    Case(
        "module-and-modules-of-its-own",
        before={
            "pack/__init__.py": "",
            "pack/program.py": """
                import queue, server, statistics, sys
                from . import beside
                from .sub.deep import NAME
                print(">", __name__, __package__, beside.__name__, NAME, sys.argv[1:])
                print(">", queue.MINE, server.MINE, statistics.MINE)
            """,
            "pack/beside.py": "",
            "pack/sub/__init__.py": "",
            "pack/sub/deep.py": "from ..beside import __name__ as NAME\n",
            "queue.py": "MINE = 'queue'\n",
            "statistics.py": "MINE = 'statistics'\n",
            "server.py": "MINE = 'server'\n",
        },
        script=("-m", "pack.program"),
        args=("--x",),
        lines=["__main__ pack pack.beside pack.beside ['--x']", "queue server statistics"],
    ),
    Case(
        "package-with-main",
        before={"pack/__init__.py": "", "pack/__main__.py": "print('>', __name__, __package__, __spec__.name)\n"},
        script=("-m", "pack"),
        lines=["__main__ pack pack.__main__"],
    ),
    Case(
        "relative-import-in-a-script",
        "from . import beside\n",
        before={"beside.py": ""},
        rc=1,
        says="attempted relative import with no known parent package",
    ),
    Case(
        "hidden-packages",
        """
        import config, datasets, models, pydantic, rank, utils, worker
        print(">", *[each.MINE for each in (config, datasets, models, pydantic, rank, utils, worker)])
        import torch, importlib
        print(">", importlib.import_module("models.vision").MINE, torch.ones(2).sum().item())
        """,
        before={
            **{f"{name}.py": f"MINE = '{name}'\n" for name in ("config", "datasets", "rank", "utils", "worker")},
            **{f"{name}/__init__.py": f"MINE = '{name}'\n" for name in ("models", "pydantic")},
            "models/vision.py": "MINE = 'vision'\n",
        },
        lines=["config datasets models pydantic rank utils worker", "vision 2.0"],
    ),
    Case(
        "script-in-a-folder",
        before={
            "code/train.py": """
                import os, sys, beside
                print(">", os.path.relpath(__file__), sys.argv[0], os.path.relpath(sys.path[0]), os.listdir("data"))
                os.chdir("data")
                open(f"made-{os.environ['RANK']}", "w").write(os.path.basename(os.getcwd()))
            """,
            "code/beside.py": "",
            "data/set.csv": "1,2",
        },
        script=("code/train.py",),
        ranks=1,
        lines=["code/train.py code/train.py code ['set.csv']"],
        files={"data/made-0": "data"},
    ),
    Case(
        "name-with-blanks",
        before={"a b é.py": "import sys\nprint('>', sys.argv)\n"},
        script=("a b é.py",),
        args=("x",),
        lines=["['a b é.py', 'x']"],
    ),
    Case(
        "script-without-end-py",
        before={"program": "print('>', __file__[-8:])\n"},
        script=("program",),
        lines=["/program"],
    ),
    Case(
        "byte-order-mark-and-coding",
        build=lambda folder: (folder / "script.py").write_bytes(
            b"# -*- coding: latin-1 -*-\nprint('>', '\xe9', ascii('\xe9'))\n"
        ),
        lines=["é '\\xe9'"],
    ),
    Case(
        "syntax-error",
        "def f(:\n",
        rc=1,
        says="SyntaxError",
    ),
    Case(
        "no-such-script",
        script=("missing.py",),
        before={"x.py": ""},
        rc=1,
        rc_here=2,
        says="missing.py",
        why="a mistake in the command is found before ranks start: exit code 2",
    ),
    Case(
        "future-and-docstring",
        '''
        """The doc."""
        from __future__ import annotations
        x: NotThere = 1
        print(">", __doc__, __annotations__, __name__, __spec__, __package__, __builtins__.__name__)
        print(">", sorted(name for name in vars() if not name.startswith("__")))
        ''',
        lines=["The doc. {'x': 'NotThere'} __main__ None None builtins", "['annotations', 'x']"],
    ),
]

FILES = [
    Case(
        "output-of-each-stream",
        """
        import ctypes, os, subprocess, sys
        print("> print")
        sys.stdout.buffer.write(b"> buffer\\n")
        sys.stdout.flush()
        os.write(1, b"> descriptor\\n")
        subprocess.run(["echo", "> child"])
        libc = ctypes.CDLL(None)
        libc.puts(b"> C")
        libc.fflush(None)
        print("> unicode \\u00e9\\u4e2d", "x" * 300)
        print("> carriage\\r> return")
        print("> without newline", end="", flush=True)
        print(flush=True)
        print("> to stderr", file=sys.stderr)
        sys.__stderr__.write("> to __stderr__\\n")
        os.write(2, b"> to 2")
        """,
        lines=[
            "print",
            "buffer",
            "descriptor",
            "child",
            "C",
            "unicode é中 " + "x" * 300,
            "carriage\r> return",
            "without newline",
            "to stderr",
            "to __stderr__",
            "to 2",
        ],
    ),
    Case(
        "replaced-streams",
        """
        import contextlib, io, os, sys
        class Tee(io.StringIO):
            def write(self, text):
                sys.__stdout__.write(text.upper())
                return len(text)
        sys.stdout = Tee()
        print("> through a tee")
        with contextlib.redirect_stdout(io.StringIO()) as kept:
            print("> nowhere")
        sys.__stdout__.write(f"> {len(kept.getvalue())}\\n")
        saved = os.dup(1)
        os.dup2(os.open(f"one-{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY), 1)
        os.write(1, b"to a file")
        os.dup2(saved, 1)
        os.write(1, b"> and back\\n")
        """,
        lines=["THROUGH A TEE", "10", "and back"],
        files={"one-0": "to a file", "one-1": "to a file"},
    ),
]

RESTARTS = [
    Case(
        "restarts-with-progress",
        """
        import os, pathlib
        count, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
        if rank == "0":
            snapshot = pathlib.Path("snapshot")
            epoch = int(snapshot.read_text()) if snapshot.exists() else 0
            print("> from epoch", epoch, "attempt", count, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
            snapshot.write_text(str(epoch + 2))
            if epoch + 2 < 6:
                raise RuntimeError("always the same")
        """,
        max_restarts=5,
        lines={0: [f"from epoch {2 * count} attempt {count} of 5" for count in range(3)]},
        files={"snapshot": "6"},
    ),
    _ends(
        "restarts-without-success",
        "raise ValueError('never')",
        1,
        max_restarts=2,
        lines={1: ["begins"] * 3},
        says="never",
    ),
    _ends(
        "restart-after-a-signal",
        "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.kill(os.getpid(), 9)",
        0,
        max_restarts=1,
    ),
    Case(
        "restart-of-process-groups",
        """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if count == "0" and dist.get_rank() == 1:
            os._exit(9)
        dist.barrier()
        print(">", total.item(), "in attempt", count)
        dist.destroy_process_group()
        """,
        max_restarts=1,
        lines=["3 in attempt 1"],
    ),
]

PROCESSES = [
    Case(
        "multiprocessing-in-the-script",
        """
        import multiprocessing, os, subprocess, sys
        from concurrent.futures import ProcessPoolExecutor

        def square(x):
            return x * x, __name__, os.environ["RANK"]

        def put(queue, value):
            queue.put(value)

        class Mine:
            value = 3

        if __name__ == "__main__":
            rank = os.environ["RANK"]
            for method in ("fork", "spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                with context.Pool(1) as pool:
                    result = pool.map(square, [3])
                queue = context.Queue()
                process = context.Process(target=put, args=(queue, Mine()))
                process.start()
                print(">", method, [each[0] for each in result], result[0][2] == rank, queue.get().value)
                process.join()
                print(">", process.exitcode, process.daemon)
            ended = context.Process(target=sys.exit, args=(7,))
            ended.start(); ended.join()
            with ProcessPoolExecutor(1) as pool:
                print(">", ended.exitcode, pool.submit(square, 4).result()[0])
        """,
        ranks=1,
        lines=[
            "fork [9] True 3",
            "0 False",
            "spawn [9] True 3",
            "0 False",
            "forkserver [9] True 3",
            "0 False",
            "7 16",
        ],
    ),
    Case(
        "data-loader-workers",
        """
        import os, torch
        from torch.utils.data import DataLoader, Dataset, get_worker_info

        class Set(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                if index == 99:
                    raise KeyError("no such picture")
                return index, get_worker_info().num_workers

        def init(number):
            assert os.environ["WORLD_SIZE"] and torch.initial_seed() == get_worker_info().seed

        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                loader = DataLoader(Set(), 4, num_workers=1, worker_init_fn=init, multiprocessing_context=method,
                                    persistent_workers=True)
                for epoch in range(2):
                    print(">", method, [(x.tolist(), n.tolist()) for x, n in loader][1])
            try:
                list(DataLoader(Set(), sampler=[99], num_workers=1))
            except KeyError as error:
                print(">", "no such picture" in str(error))
        """,
        ranks=1,
        lines=["fork ([4, 5, 6, 7], [1, 1, 1, 1])"] * 2 + ["spawn ([4, 5, 6, 7], [1, 1, 1, 1])"] * 2 + ["True"],
    ),
    _ends(
        "loader-worker-is-killed",
        """import torch.utils.data as data
            class Dies(data.Dataset):
                def __len__(self): return 2
                def __getitem__(self, index): os.kill(os.getpid(), 9)
            list(data.DataLoader(Dies(), num_workers=1))""",
        1,
        lines=_BEGINS,
        says="DataLoader worker",
    ),
    Case(
        "fork-in-the-script",
        """
        import os, sys
        print("> before")
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print("> child")
            sys.exit(3)
        print(">", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        lines=["before", "child", "3"],
    ),
    Case(
        "processes-left-behind",
        """
        import os, pathlib, subprocess, sys
        code = "import pathlib, sys, time; time.sleep(1); pathlib.Path(sys.argv[1]).write_text('uploaded')"
        subprocess.Popen([sys.executable, "-c", code, "left-" + os.environ["RANK"]], start_new_session=True,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        """,
        files={"left-0": "uploaded", "left-1": "uploaded"},
        files_here={"left-0": None, "left-1": None},
        why="no process is left behind",
    ),
]

ENCODINGS = [
    Case(
        "lang-c",
        "import sys, os\nprint('>', sys.stdout.encoding, sys.getfilesystemencoding())\n",
        env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        ranks=1,
        lines=["ascii ascii"],
    ),
    Case(
        "pythonioencoding",
        "import sys\nprint('> \\u00e9', sys.stdout.encoding, sys.stderr.errors)\n",
        ranks=1,
        env={"PYTHONIOENCODING": "latin-1:replace"},
        lines=["\ufffd iso8859-1 backslashreplace"],
    ),
    Case(
        "python-variables",
        """
         import sys, warnings
         print(">", sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions, __debug__, hash("a") == hash("b"))
         assert False
         """,
        env={"PYTHONOPTIMIZE": "1", "PYTHONWARNINGS": "ignore", "PYTHONHASHSEED": "0"},
        ranks=1,
        lines=["1 False ['ignore'] False False"],
    ),
    Case(
        "arguments",
        "import sys\nprint('>', ascii(sys.argv[1:]))\n",
        args=(
            "--ranks",
            "9",
            "-m",
            "",
            "a b",
            "*",
            "$HOME",
            "--x=é",
            "line\nline",
            "-h",
            "--cluster",
            "x",
            os.fsdecode(b"\xff"),
            "--set",
            "a=b",
            "'\"",
        ),
        lines=[
            ascii(
                [
                    "--ranks",
                    "9",
                    "-m",
                    "",
                    "a b",
                    "*",
                    "$HOME",
                    "--x=é",
                    "line\nline",
                    "-h",
                    "--cluster",
                    "x",
                    "\udcff",
                    "--set",
                    "a=b",
                    "'\"",
                ]
            )
        ],
    ),
    Case(
        "error-that-can-not-be-encoded",
        "raise ValueError('\\udcff' + chr(0x4e2d) + ' is wrong')\n",
        rc=1,
        says="is wrong",
    ),
]

LAUNCH = [
    Case(
        "variables-of-torchrun",
        """
        import os, socket
        e = os.environ
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
        names += " ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE"
        print(">", *[e[name] for name in names.split()])
        names = "RESTART_COUNT MAX_RESTARTS USE_AGENT_STORE SIGNALS_TO_HANDLE"
        print(">", *[e["TORCHELASTIC_" + name] for name in names.split()], e["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
        socket.getaddrinfo(e["MASTER_ADDR"], int(e["MASTER_PORT"]))
        print(">", bool(e["TORCHELASTIC_RUN_ID"]), os.path.isdir(os.path.dirname(e["TORCHELASTIC_ERROR_FILE"])))
        import torch.distributed as dist
        print(">", dist.is_torchelastic_launched(), dist.is_initialized())
        """,
        max_restarts=3,
        lines={
            rank: [
                f"{rank} 2 {rank} 2 0 1 default {rank} 2",
                "0 3 True SIGTERM,SIGINT,SIGHUP,SIGQUIT 1",
                "True True",
                "True False",
            ]
            for rank in (0, 1)
        },
    ),
    Case(
        "standard-input-and-flags",
        """
        import sys
        print(">", repr(sys.stdin.read()), sys.flags.interactive, sys.flags.safe_path, sys.flags.isolated)
        print(">", sys.stdout.isatty(), sys.stdout.write_through, sys.gettrace(), sys.getrecursionlimit())
        """,
        lines=["'' 0 False 0", "False True None 1000"],
    ),
    Case(
        "error-file-of-record",
        """
        import os
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            if os.environ["RANK"] == "1":
                raise RuntimeError("cause that record has written")

        if __name__ == "__main__":
            main()
        """,
        rc=1,
        says="cause that record has written",
    ),
    Case(
        "error-file-of-its-own",
        """
        import json, os, sys, time
        if os.environ["RANK"] == "1":
            extra = {"timestamp": int(time.time()), "py_callstack": "none"}
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                json.dump({"message": {"message": "cause of its own", "extraInfo": extra}}, file)
            sys.exit(1)
        """,
        rc=1,
        says="cause of its own",
    ),
    Case(
        "process-groups",
        """
        import os, torch, torch.distributed as dist
        from datetime import timedelta
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

        def total():
            tensor = torch.tensor([float(dist.get_rank() + 1)])
            dist.all_reduce(tensor)
            return tensor.item()

        dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=60))
        print("> env", total(), dist.get_world_size())
        group = dist.new_group([1])
        print("> part", dist.get_rank(group))
        everything = [None] * size
        dist.all_gather_object(everything, {"rank": rank})
        print(">", everything)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), float(rank + 1))).sum().backward()
        print("> gradient", model.module.weight.grad.tolist())
        store = dist.distributed_c10d._get_default_store()
        store.set(f"key-{rank}", str(rank))
        print(">", store.get(f"key-{1 - rank}"))
        dist.destroy_process_group()
        """,
        lines={
            rank: [
                "env 3.0 2",
                f"part {rank - 1}",
                "[{'rank': 0}, {'rank': 1}]",
                "gradient [[1.5, 1.5]]",
                f"b'{1 - rank}'",
            ]
            for rank in (0, 1)
        },
    ),
    Case(
        "device-mesh-and-cpu-group-without-arguments",
        """
        import torch, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        print(">", mesh.get_local_rank(), mesh["dp"].size())
        import torch.distributed.checkpoint as checkpoint
        state = {"weight": torch.ones(4)}
        checkpoint.save(state, checkpoint_id="saved")
        state["weight"].zero_()
        checkpoint.load(state, checkpoint_id="saved")
        print(">", state["weight"].sum().item())
        dist.destroy_process_group()
        """,
        lines={rank: [f"{rank} 2", "4.0"] for rank in (0, 1)},
    ),
    Case(
        "process-group-by-tcp",
        """
        import os, pathlib, socket, time, torch, torch.distributed as dist
        rank = int(os.environ["RANK"])
        if rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            pathlib.Path("port.new").write_text(str(port))
            os.rename("port.new", "port")
        while not os.path.exists("port"):
            time.sleep(0.02)
        address = f"tcp://127.0.0.1:{pathlib.Path('port').read_text()}"
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # or torch takes the launcher's store
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        print(">", tensor.item())
        dist.destroy_process_group()
        """,
        lines=["2.0"],
    ),
    Case(
        "group-left-open",
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        print(">", dist.get_rank())
        dist.barrier()
        """,
        lines={0: ["0"], 1: ["1"]},
    ),
    Case(
        "collective-after-a-rank-has-failed",
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("batch of rank 1 is empty")
        dist.all_reduce(torch.ones(1))
        """,
        rc=1,
        says="batch of rank 1 is empty",
    ),
]

CASES = [*EXITS, *SIGNALS, *MODULES, *FILES, *RESTARTS, *PROCESSES, *ENCODINGS, *LAUNCH]
# One of each kind; the others run in `make nightly`.
CORE = {
    *("exception", "kill-9-to-itself", "end-in-order", "handlers-in-the-script"),
    *("module-and-modules-of-its-own", "no-such-script", "output-of-each-stream"),
    *("restarts-with-progress", "arguments", "variables-of-torchrun", "error-file-of-record"),
    "collective-after-a-rank-has-failed",
}
_each = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case.name in CORE else [pytest.mark.long], id=case.name) for case in CASES]
)
# What ddptrain gets wrong.
DEFECTS = {
    "finalizers-at-exit": "weakref.finalize runs after the exit handlers, because torch has used it before the script",
}


@_each
def test_script_runs_as_under_torchrun(
    project: Project, shared_cluster: str, case: Case, request: pytest.FixtureRequest
) -> None:
    if case.name in DEFECTS:
        request.applymarker(pytest.mark.xfail(reason=DEFECTS[case.name], strict=True))
    _write(project, case)
    options = [f"--set=env.{name}={value}" for name, value in case.env.items()]
    options += [f"--set=failure.max_restarts={case.max_restarts}"]
    arguments = ["--", *case.args] if case.args else []
    running = project.start(
        "run", "--cluster", shared_cluster, "--ranks", str(case.ranks), *options, *case.script, *arguments
    )
    if case.signum:
        for rank in range(case.ranks):
            running.wait_for(f"[rank {rank}] > at work")
        running.popen.send_signal(case.signum)
    done = running.finish()
    logs = [path for folder in project.run_directories() for path in sorted((folder / "logs").glob("rank-*.log"))]
    rc = case.rc if case.rc_here is None else case.rc_here
    assert done.rc == rc, done.stdout + done.stderr
    assert case.says in done.stdout + done.stderr
    _compare(project, case, [_marked(path) for path in logs], {**case.files, **case.files_here})


@pytest.mark.long
@_each
def test_expectation_is_that_of_torchrun(project: Project, case: Case, request: pytest.FixtureRequest) -> None:
    if case.name == "restart-of-process-groups":
        reason = "torchrun restarts with the same store, in which the ranks may find addresses of ranks that have ended"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
    _write(project, case)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(case.env)
    options = ["--standalone", f"--nproc-per-node={case.ranks}", f"--max-restarts={case.max_restarts}"]
    options += ["--monitor-interval=0.1", f"--log-dir={project.folder / 'logs'}", "--redirects=3"]
    command = [str(Path(sys.executable).with_name("torchrun")), *options, *case.script, *case.args]
    output = (project.folder / "output").open("w+")
    with (
        output,
        subprocess.Popen(
            command, cwd=project.folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as popen,
    ):
        deadline = time.monotonic() + PATIENCE_S
        if case.signum:
            while [lines[:1] for lines in _of_torchrun(project, case)] != [["at work"]] * case.ranks:
                assert popen.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            popen.send_signal(case.signum)
        rc = popen.wait(PATIENCE_S)
        output.seek(0)
        text = output.read()
    assert rc == case.rc, text
    # Without `record` torchrun itself names no cause: it is in the rank's log, or in the file that the rank wrote.
    logs = [path.read_text(errors="replace") for path in project.folder.glob("logs/*/attempt_*/*/*.*")]
    assert case.says in "".join([text, *logs])
    _compare(project, case, _of_torchrun(project, case), case.files)


def _write(project: Project, case: Case) -> None:
    if case.code:
        project.write("script.py", case.code)
    for name, text in case.before.items():
        project.write(name, text)
    case.build(project.folder)


def _compare(project: Project, case: Case, found: Sequence[Sequence[str]], files: Files) -> None:
    expected = case.lines if isinstance(case.lines, Mapping) else dict.fromkeys(range(case.ranks), case.lines)
    assert {rank: list(found[rank]) for rank in expected if rank < len(found)} == {
        rank: list(lines) for rank, lines in expected.items()
    }
    for name, content in files.items():
        wanted = content.encode() if isinstance(content, str) else content
        there = [path.read_bytes() for path in project.folder.glob(name)]
        assert there == ([] if wanted is None else [wanted]), name


def _of_torchrun(project: Project, case: Case) -> list[list[str]]:
    """The lines of each rank, of all attempts."""
    folders = sorted(project.folder.glob("logs/*/attempt_*"))
    streams = ("stdout.log", "stderr.log")
    return [
        [line for folder in folders for name in streams for line in _marked(folder / str(rank) / name)]
        for rank in range(case.ranks)
    ]


def _marked(path: Path) -> list[str]:
    """The lines of a log that a script has marked."""
    if not path.exists():
        return []
    lines = path.read_bytes().decode(errors="replace").split("\n")
    return [line.removeprefix("> ") for line in lines if line.startswith("> ")]

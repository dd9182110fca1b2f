"""What an exception means: a root cause, a victim of another rank, or a failure in a DataLoader worker."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._utils import ExceptionWrapper
from torch.distributed import DistBackendError

import ddptrain
from ddptrain.errors import CheckpointNotWritten
from ddptrain.protocol import events
from ddptrain.rank import failure as failures


class Awkward(Exception):
    """Cannot be created from a text alone, so torch passes it on as a RuntimeError."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def failure(error: BaseException) -> events.Failure:
    """The event for an exception in a DataLoader worker."""
    try:
        raise error
    except BaseException:
        passed_on = ExceptionWrapper(where="in DataLoader worker process 0")
    try:
        passed_on.reraise()
    except BaseException as raised:
        return failures.failure(raised, "train")
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("x"), "KeyError", "'x' (in DataLoader worker process 0)"),
        (ValueError("bad\nsecond"), "ValueError", "bad (in DataLoader worker process 0)\nsecond"),
        (Awkward("a", "b"), "Awkward", "a b (in DataLoader worker process 0)"),
        (RuntimeError("connection reset by peer"), "RuntimeError", "connection reset by peer (in DataLoader worker"),
    ],
)
def test_exception_in_a_dataloader_worker_is_reported_as_itself(error: Exception, kind: str, message: str) -> None:
    told = failure(error)
    assert told.type == kind
    assert told.message.startswith(message)
    assert not told.lost_peer
    inner, _, outer = told.traceback.partition("which this rank was waiting for")
    assert "raise error" in inner
    assert "passed_on.reraise()" in outer
    assert "Caught" not in told.traceback


def test_a_checkpoint_that_cannot_be_written_is_marked() -> None:
    full = CheckpointNotWritten(28, "a checkpoint could not be written: No space left on device")
    assert failures.failure(full, "train").unwritable
    assert not failures.failure(OSError(28, "No space left on device"), "train").unwritable  # of the user's own files


def test_import_error_names_the_interpreter_and_the_folders_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = os.path.dirname(os.__file__)
    monkeypatch.setattr("sys.path", ["/project", "/project", library, f"{library}/lib-dynload", "/site-packages", ""])
    error = ModuleNotFoundError("No module named 'x'", name="x")
    failures.add_search_path(error)
    assert error.__notes__ == [f"not found by {sys.executable} in /project, /site-packages, ."]


def _handled() -> events.Failure | None:
    """What another thread, which handles commands, finds."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(failures.handled, "train").result()


def test_an_exception_is_found_while_a_finally_block_runs() -> None:
    found: list[events.Failure | None] = []
    with pytest.raises(ValueError, match="sample 4711"):  # noqa: PT012  # what happens inside is tested
        try:
            raise ValueError("sample 4711")
        finally:
            found.append(_handled())
    assert found[0] is not None
    assert (found[0].type, found[0].message, found[0].phase) == ("ValueError", "sample 4711", "train")
    assert found[0].handled
    assert 'raise ValueError("sample 4711")' in found[0].traceback
    assert _handled() is None


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), RuntimeError("Connection closed by peer [::1]:1")]
)
def test_an_end_and_a_lost_peer_are_no_failures_that_explain_others(error: BaseException) -> None:
    try:
        raise error
    except BaseException:
        assert _handled() is None


def test_failure_has_type_phase_and_a_traceback_of_at_most_100_000_characters() -> None:
    failed = failures.failure(ValueError("x" * 100_001), "rendezvous")
    assert (failed.type, failed.phase, failed.exit_code, failed.handled) == ("ValueError", "rendezvous", None, False)
    assert 100_000 < len(failed.traceback) < 100_050 and " characters] ..." in failed.traceback
    assert failed.time_ns > 0 and not (failed.lost_peer or failed.timed_out or failed.unwritable)


def exit_of(code: Callable[[], object]) -> SystemExit:
    with pytest.raises(SystemExit) as stop:
        code()
    return stop.value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "sys.exit(2) (the following arguments are required: --lr)"),
        (["--lr", "x"], "sys.exit(2) (argument --lr: invalid float value: 'x')"),
        (["--lr", "1", "--lrr"], "sys.exit(2) (unrecognized arguments: --lrr)"),
    ],
)
def test_exit_of_argparse_names_the_wrong_argument(arguments: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    assert failures.bad_exit(exit_of(lambda: parser.parse_args(arguments)), "train").message == message


@pytest.mark.parametrize(
    ("handled", "code", "message", "lost"),
    [
        (KeyError("label"), 1, "sys.exit(1) (after KeyError: 'label')", False),
        (ValueError("no data"), "failed: no data", "sys.exit('failed: no data')", False),
        (
            RuntimeError("Connection closed by peer"),
            1,
            "sys.exit(1) (after RuntimeError: Connection closed by peer)",
            True,
        ),
    ],
)
def test_exit_that_follows_from_an_exception_names_it(
    handled: Exception, code: object, message: str, lost: bool
) -> None:
    def leave() -> None:
        try:
            raise handled
        except Exception:
            sys.exit(code)  # type: ignore[arg-type]

    failed = failures.bad_exit(exit_of(leave), "train")
    assert (failed.message, failed.lost_peer, failed.timed_out) == (message, lost, False)
    handled.args = ("Timed out waiting 9ms",)
    assert failures.bad_exit(exit_of(leave), "train").timed_out is lost


@pytest.mark.parametrize("error", [AssertionError(), AssertionError(" "), MemoryError(), KeyboardInterrupt()])
def test_exception_without_a_message_names_its_line(error: BaseException) -> None:
    with pytest.raises(type(error)):
        raise error  # the line
    line = error.__traceback__.tb_lineno if error.__traceback__ else 0
    assert failures.failure(error, "train").message == f"raise error  # the line (test_failure.py:{line})"


class Iterator:
    """torch's iterator over a DataLoader with two workers, whose second one has ended with a status."""

    def __init__(self, *statuses: int | None) -> None:
        self.pipes = [os.pipe() for _ in statuses]
        self._workers: list[Any] = []
        for status, (reading, writing) in zip(statuses, self.pipes, strict=True):
            if status is not None:
                os.close(writing)
            self._workers.append(SimpleNamespace(sentinel=reading, exitcode=status, join=lambda timeout: None))

    def _try_get_data(self, error: Exception) -> None:
        raise error

    def close(self) -> None:
        for worker, pipe in zip(self._workers, self.pipes, strict=True):
            for fd in pipe if worker.exitcode is None else pipe[:1]:
                os.close(fd)


@pytest.mark.parametrize(
    ("error", "statuses", "message"),
    [
        (
            FileNotFoundError(2, "No such file or directory"),
            (None, 4),
            "[Errno 2] No such file or directory (DataLoader worker process 1: exit code 4)",
        ),
        (
            RuntimeError("DataLoader worker (pid(s) 77) exited unexpectedly"),
            (-9, None),
            "DataLoader worker (pid(s) 77) exited unexpectedly (DataLoader worker process 0: killed by SIGKILL)",
        ),
        (RuntimeError("size mismatch"), (-9, None), "size mismatch"),
        (EOFError("no input"), (), "no input"),
    ],
)
def test_end_of_a_dataloader_worker_is_named(error: Exception, statuses: tuple[int | None, ...], message: str) -> None:
    iterator = Iterator(*statuses)
    try:
        iterator._try_get_data(error)
    except Exception as raised:
        told = failures.failure(raised, "train")
    iterator.close()
    assert (told.type, told.message) == (type(error).__qualname__, message)


def chained(first: BaseException, second: BaseException, *, explicit: bool = False) -> BaseException:
    """`second`, raised while `first` is handled."""
    try:
        try:
            raise first
        except BaseException as error:
            if explicit:
                raise second from error
            raise second  # noqa: B904
    except BaseException as error:
        return error


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize(
    ("first", "lost", "timed_out"),
    [
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), True, False),
        (RuntimeError("Timed out waiting 3000ms for recv operation to complete"), False, True),
        (ValueError("sample 4711"), False, False),
    ],
)
def test_error_that_follows_from_a_lost_peer_is_a_victims(
    first: BaseException, lost: bool, timed_out: bool, explicit: bool
) -> None:
    told = failures.failure(chained(first, KeyError("step 3 failed"), explicit=explicit), "train")
    assert (told.type, told.lost_peer, told.timed_out) == ("KeyError", lost, timed_out)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            FileNotFoundError("no file x"),
            RuntimeError("no data\nmore"),
            "no data (after FileNotFoundError: no file x)\nmore",
        ),
        (ValueError(), RuntimeError("failed"), "failed (after ValueError)"),
        (ValueError("bad label"), RuntimeError("step 3: bad label"), "step 3: bad label"),
        (EOFError("x"), RuntimeError("DataLoader worker (pid 7) is killed"), "DataLoader worker (pid 7) is killed"),
        (ValueError("x" * 400), RuntimeError("failed"), None),
    ],
)
def test_error_that_was_handled_is_named_unless_the_message_has_it(
    first: BaseException, second: BaseException, message: str | None
) -> None:
    told = failures.failure(chained(first, second), "train").message
    assert told == message if message is not None else len(told) < 400
    assert "after" not in failures.failure(chained(first, second), "setup").message


# --- A traceback shows the user's frames, and one line for each sequence of a library's frames ---


TORCH = (
    '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 7, in _call_impl\n    return f()\n'
)
MINE = '  File "/home/me/train.py", line 3, in main\n    model(x)\n    ^^^^^^^^\n'
HEAD = "Traceback (most recent call last):\n"


def test_frames_of_torch_become_one_line() -> None:
    text = HEAD + MINE + TORCH * 3 + MINE + TORCH + "ValueError: boom\n"
    said = HEAD + MINE + "  ... 3 frames of torch ...\n" + MINE + "  ... 1 frame of torch ...\n" + "ValueError: boom\n"
    assert failures.shortened(text) == said


def test_frames_of_built_in_workloads_are_shown_and_others_of_ddptrain_are_not() -> None:
    package = Path(ddptrain.__file__).parent
    ours = f'  File "{package}/rank/context.py", line 1, in checkpoint\n    x\n'
    workload = f'  File "{package}/workloads/petnames/train.py", line 1, in train\n    x\n'
    frozen = '  File "<frozen importlib._bootstrap>", line 1, in _find\n'
    assert failures.shortened(HEAD + workload + ours + frozen) == (
        HEAD + workload + "  ... 1 frame of ddptrain ...\n" + "  ... 1 frame of Python ...\n"
    )


def test_traceback_starts_with_the_users_frame_and_not_with_the_launchers() -> None:
    launcher = Path(ddptrain.__file__).parent / "rank" / "lifecycle.py"
    scope: dict[str, Any] = {}
    exec(compile("def launch(function):\n    function()\n", str(launcher), "exec"), scope)  # our own code

    def user() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as raised:
        scope["launch"](user)
    text = failures.user_traceback(raised.value)
    assert "in user" in text and text.endswith("ValueError: boom\n")
    assert "lifecycle.py" not in text


# --- Which errors make a rank a victim: another rank is gone, or did not come in time ---


@pytest.mark.parametrize(
    "words",
    [
        "[/gloo/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "wait timeout after 300000ms, keys: /default_pg/0//cuda//timeout",
        "Rank 0 timed out: Ranks 1 failed to pass monitoredBarrier in 3000 ms",
    ],
)
def test_time_out_of_a_collective_operation_is_known(words: str) -> None:
    told = failures.failure(RuntimeError(words), "train")
    assert (told.timed_out, told.lost_peer) == (True, False)


@pytest.mark.parametrize("error", [RuntimeError("DataLoader timed out after 5 seconds"), TimeoutError("timed out")])
def test_time_out_of_the_users_code_is_not_one_of_a_collective(error: Exception) -> None:
    assert not failures.failure(error, "train").timed_out


@pytest.mark.parametrize(("folder", "lost"), [("/venv/torch/distributed/", True), ("/home/me/", False)])
def test_broken_connection_inside_of_torch_is_a_lost_peer(folder: str, lost: bool) -> None:
    code = "raise ConnectionResetError(104, 'Connection reset by peer')\n"
    with pytest.raises(ConnectionResetError) as raised:
        exec(compile(code, f"{folder}store.py", "exec"), {})
    assert failures.lost_peer(raised.value) is lost
    assert failures.failure(raised.value, "train").lost_peer is lost


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("NCCL AllReduce failed: remote process exited or there was a network error"), (True, False)),
        (RuntimeError("NCCL communicator was aborted after a previous error"), (True, False)),
        (RuntimeError("NCCL operation timed out"), (False, True)),
        (DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:9, a message of a later version"), (True, False)),
        (DistBackendError("wait timeout after 600000ms"), (False, True)),
        (RuntimeError("NCCL error: invalid usage"), (False, False)),
    ],
)
def test_error_of_a_collective_is_known_by_its_type_or_its_message(
    error: RuntimeError, expected: tuple[bool, bool]
) -> None:
    found = failures.failure(error, "train")
    assert (found.lost_peer, found.timed_out) == expected

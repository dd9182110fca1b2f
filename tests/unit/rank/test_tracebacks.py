"""Tracebacks, and errors of a peer that was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistBackendError

import ddptrain
from ddptrain.rank import failure as failures
from ddptrain.rank.failure import clipped, shortened, user_traceback

# --- A traceback shows the user's frames, and one line for each sequence of a library's frames ---


TORCH = (
    '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 7, in _call_impl\n    return f()\n'
)
MINE = '  File "/home/me/train.py", line 3, in main\n    model(x)\n    ^^^^^^^^\n'
HEAD = "Traceback (most recent call last):\n"


def test_frames_of_torch_become_one_line() -> None:
    text = HEAD + MINE + TORCH * 3 + MINE + TORCH + "ValueError: boom\n"
    said = HEAD + MINE + "  ... 3 frames of torch ...\n" + MINE + "  ... 1 frame of torch ...\n" + "ValueError: boom\n"
    assert shortened(text) == said


def test_repeated_lines_belong_to_their_frame() -> None:
    text = HEAD + TORCH + "  [Previous line repeated 9 more times]\n" + TORCH + MINE + "RecursionError\n"
    assert shortened(text) == HEAD + "  ... 2 frames of torch ...\n" + MINE + "RecursionError\n"


def test_chained_errors_are_shortened_separately() -> None:
    between = "ValueError: a\n\nDuring handling of the above exception, another exception occurred:\n\n"
    text = HEAD + TORCH * 2 + between + HEAD + MINE + TORCH * 2 + "KeyError: b\n"
    fold = "  ... 2 frames of torch ...\n"
    assert shortened(text) == HEAD + fold + between + HEAD + MINE + fold + "KeyError: b\n"


def test_frames_of_built_in_workloads_are_shown_and_others_of_ddptrain_are_not() -> None:
    package = Path(ddptrain.__file__).parent
    ours = f'  File "{package}/rank/context.py", line 1, in checkpoint\n    x\n'
    workload = f'  File "{package}/workloads/petnames/train.py", line 1, in train\n    x\n'
    frozen = '  File "<frozen importlib._bootstrap>", line 1, in _find\n'
    assert shortened(HEAD + workload + ours + frozen) == (
        HEAD + workload + "  ... 1 frame of ddptrain ...\n" + "  ... 1 frame of Python ...\n"
    )


def test_text_without_frames_is_unchanged() -> None:
    assert shortened("ValueError: boom\n") == "ValueError: boom\n"


def test_traceback_starts_with_the_users_frame_and_not_with_the_launchers() -> None:
    launcher = Path(ddptrain.__file__).parent / "rank" / "lifecycle.py"
    scope: dict[str, Any] = {}
    exec(compile("def launch(function):\n    function()\n", str(launcher), "exec"), scope)  # our own code

    def user() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as raised:
        scope["launch"](user)
    text = user_traceback(raised.value)
    assert "in user" in text and text.endswith("ValueError: boom\n")
    assert "lifecycle.py" not in text


def test_traceback_of_the_launcher_alone_keeps_its_frames() -> None:
    launcher = Path(ddptrain.__file__).parent / "rank" / "script.py"
    with pytest.raises(ValueError, match="boom") as raised:
        exec(compile("raise ValueError('boom')\n", str(launcher), "exec"), {})
    error = raised.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of the test
    assert f'  File "{launcher}", line 1, in <module>\n' in user_traceback(error)


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("abcd", 4, "abcd"),
        ("abcde", 4, "ab\n... [1 characters] ...\nde"),
        ("abcdefghij", 6, "abc\n... [4 characters] ...\nhij"),
    ],
)
def test_middle_of_a_long_text_is_left_out(text: str, limit: int, expected: str) -> None:
    assert clipped(text, limit) == expected


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


def test_broken_connection_of_the_users_code_is_a_root_cause() -> None:
    assert not failures.lost_peer(ConnectionResetError(104, "Connection reset by peer"))


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

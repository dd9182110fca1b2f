"""Which errors make a rank a victim: another rank is gone, or did not come in time."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError

from ddptrain.rank import failure as failures


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

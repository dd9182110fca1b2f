"""The stand-in for dask_pytorch_ddp, as far as no cluster is needed."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from ddptrain.compat.dask_pytorch_ddp import data, dispatch, failures, outbox, rank_entrypoint, results
from ddptrain.errors import TrainingFailed
from ddptrain.protocol.news import RankExit
from ddptrain.results.errors import UnsafePath
from tests.unit.specs import make_spec


class Unpicklable(Exception):
    """Its arguments are not those that it was made of."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def worker_at(folder: Path) -> Any:
    return SimpleNamespace(local_directory=str(folder))


def look(folder: Path, key: str = "topic", done: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return asyncio.run(outbox.look(["box"], key, done, dask_worker=worker_at(folder)))


def test_signatures_are_those_of_the_original() -> None:
    import dask_pytorch_ddp.data
    import dask_pytorch_ddp.dispatch

    ours, theirs = (inspect.signature(run).parameters for run in (dispatch.run, dask_pytorch_ddp.dispatch.run))
    assert [(it.name, it.kind) for it in ours.values()] == [(it.name, it.kind) for it in theirs.values()]
    # Its results can't be imported any more: they need Pub/Sub, which distributed has no longer.
    handler = results.DaskResultsHandler
    assert list(inspect.signature(handler).parameters) == ["pub_sub_key"]
    assert list(inspect.signature(handler.submit_result).parameters) == ["self", "path", "data"]
    process = inspect.signature(handler.process_results).parameters
    assert list(process) == ["self", "prefix", "futures", "raise_errors"] and process["raise_errors"].default is True
    assert data.S3ImageFolder is dask_pytorch_ddp.data.S3ImageFolder
    assert dispatch.dispatch_with_ddp is dask_pytorch_ddp.dispatch.dispatch_with_ddp


def test_results_wait_in_the_order_of_their_making_until_they_were_fetched(tmp_path: Path) -> None:
    box = outbox.make_box(worker_at(tmp_path), "box")
    for number in range(3):
        outbox.put(box, "topic", "same.txt", memoryview(f"{number}".encode()))
    outbox.put(box, "other", "theirs.txt", memoryview(b"x"))
    told = look(tmp_path)
    found = [outbox.data_file(box.parent, entry["name"]).read_text() for entry in told]
    assert found == ["0", "1", "2"]
    again = look(tmp_path, done=tuple(entry["name"] for entry in told))
    assert again == [] and len(look(tmp_path, "other")) == 1


def test_names_that_leave_the_box_are_refused() -> None:
    for name in ("../x/00000000000000000001-1-1", "box/../../x", "box/", "/etc/passwd"):
        with pytest.raises(ValueError, match="no result has the name"):
            outbox.data_file(Path("/spool"), name)


def test_ranks_of_a_job_share_a_box_and_other_tasks_have_their_own() -> None:
    assert outbox.box_of("ddptrain/dispatch-1/1/0") == outbox.box_of("ddptrain/dispatch-1/1/7") == "dispatch-1"
    boxes = {outbox.box_of(key) for key in ("train-1", "train-2", "ddptrain/", "../../x")}
    assert len(boxes) == 4 and not any("/" in box or "." in box for box in boxes)


def test_result_in_a_job_goes_to_its_box_and_not_out_of_the_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = outbox.make_box(worker_at(tmp_path), "box")
    with monkeypatch.context() as patch:
        patch.setenv(outbox.VARIABLE, str(box))
        handler = pickle.loads(pickle.dumps(results.DaskResultsHandler("topic")))
        handler.submit_result("a/ü.txt", "ü")
        handler.submit_result("b.bin", bytearray(b"12"))
        for path in ("/etc/x", "../x", "a/../../x", ""):
            with pytest.raises(UnsafePath):
                handler.submit_result(path, "x")
    assert [(it["path"], it["size_bytes"]) for it in look(tmp_path)] == [("a/ü.txt", 2), ("b.bin", 2)]
    with pytest.raises(RuntimeError, match="neither a rank nor a Dask task"):
        handler.submit_result("c", "x")
    assert results.DaskResultsHandler().pub_sub_key != results.DaskResultsHandler().pub_sub_key


def test_error_comes_home_as_it_is_with_where_it_was_raised() -> None:
    error = pickle.loads(failures.sealed(KeyError("name"), "rank 1 on h", "trace", 5, victim=False))
    assert type(error) is KeyError and error.__notes__ == ["rank 1 on h:\ntrace"]
    error = pickle.loads(failures.sealed(Unpicklable(1, 2), "rank 1 on h", "trace", 5, victim=False))
    assert isinstance(error, TrainingFailed) and str(error) == "rank 1 on h: Unpicklable: 1 and 2"


def test_first_cause_is_the_earliest_that_did_not_lose_a_peer() -> None:
    victim, late, first = (
        pickle.loads(failures.sealed(ValueError(at), "r", "t", at, victim=at == 1)) for at in (1, 3, 2)
    )
    assert failures.first_cause([RuntimeError("of Dask"), victim, late, first]) is first
    assert failures.first_cause([victim]) is victim


def test_rank_that_was_stopped_is_not_the_cause_of_the_loss_of_another_worker(tmp_path: Path) -> None:
    """Dask's own error of the lost worker has no time, and the stopped rank ends later."""
    lost = RuntimeError("the worker was lost")
    with pytest.raises(failures.RankFailed) as stopped:
        outcome(tmp_path, -signal.SIGTERM)
    assert failures.first_cause([stopped.value, lost]) is lost
    with pytest.raises(failures.RankFailed) as killed:
        outcome(tmp_path, -signal.SIGKILL)
    assert failures.first_cause([killed.value, lost]) is killed.value


def outcome(folder: Path, status: int) -> Any:
    log = folder / "log"
    log.write_text("last words\n")
    return dispatch._outcome(make_spec(rank=1), str(folder / "answer"), log, RankExit(7, status, 9))


def test_rank_that_was_killed_fails_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(failures.RankFailed, match=r"rank 1 on .*: killed by SIGKILL; its last output:\nlast words"):
        outcome(tmp_path, -9)


def test_answer_of_a_rank_is_its_value_its_error_or_nothing(tmp_path: Path) -> None:
    assert outcome(tmp_path, 0) is None
    rank_entrypoint._write_answer(
        str(tmp_path / "answer"), rank_entrypoint.ERROR, failures.sealed(OSError(3, "x"), "r", "t", 1, victim=False)
    )
    with pytest.raises(OSError, match="x"):
        outcome(tmp_path, 1)
    rank_entrypoint._write_answer(str(tmp_path / "answer"), rank_entrypoint.VALUE, cloudpickle.dumps({"a": 1}))
    assert outcome(tmp_path, 0) == {"a": 1}
    (tmp_path / "answer.value").write_bytes(b"no pickle")
    with pytest.raises(failures.RankFailed, match="return value can't be read"):
        outcome(tmp_path, 0)


def test_rank_calls_the_function_with_what_dask_has_brought(tmp_path: Path) -> None:
    pickled = cloudpickle.dumps((lambda *args, **kwargs: [args, kwargs], (None, 2), {"a": None, "b": 4}))
    (tmp_path / "job").write_bytes(pickle.dumps((pickled, {0: 1, "a": 3, "local_rank": 5})))
    ctx: Any = SimpleNamespace(rank=0)
    rank_entrypoint.main(ctx, job=str(tmp_path / "job"), answer=str(tmp_path / "answer"))
    expected = [(1, 2), {"a": 3, "b": 4, "local_rank": 5}]
    assert rank_entrypoint.read_answer(str(tmp_path / "answer"), rank_entrypoint.VALUE) == expected

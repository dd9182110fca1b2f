"""The stand-in for dask_pytorch_ddp, as far as no cluster is needed."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from ddptrain.compat.dask_pytorch_ddp import data, dispatch, rank_entrypoint, results
from ddptrain.results.errors import UnsafePath


class Unpicklable(Exception):
    """Its arguments are not those that it was made of."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


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


def test_result_that_leaves_the_prefix_and_one_of_no_rank_are_refused() -> None:
    handler = results.DaskResultsHandler("topic")
    for path in ("/etc/x", "../x", "a/../../x", ""):
        with pytest.raises(UnsafePath):
            handler.submit_result(path, "x")
    with pytest.raises(RuntimeError, match="not a rank"):
        handler.submit_result("c", "x")
    assert results.DaskResultsHandler().pub_sub_key != results.DaskResultsHandler().pub_sub_key


def called(inputs: Path, function: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
    """Return the name of the answer of a rank, and the answer."""
    saved: dict[str, bytes] = {}
    about = {"rank": 1, "local_rank": 5, "device": SimpleNamespace(type="cpu"), "inputs": inputs}
    ctx: Any = SimpleNamespace(**about, save_file=saved.__setitem__)
    (inputs / rank_entrypoint.JOB).write_bytes(cloudpickle.dumps((function, args, kwargs)))
    try:
        rank_entrypoint.main(ctx, pass_local_rank=True)
    except BaseException:
        assert not saved or next(iter(saved)).endswith(".error")
    ((name, answer),) = saved.items() or [("", pickle.dumps(None))]
    return name, pickle.loads(answer)


def test_answer_of_a_rank_is_its_value_its_error_or_nothing(tmp_path: Path) -> None:
    assert called(tmp_path, lambda *args, **kwargs: [args, kwargs], 1, a=2) == (
        "answers/1.value",
        [(1,), {"a": 2, "local_rank": 5}],
    )

    def fails(error: BaseException, local_rank: int) -> None:
        raise error

    assert called(tmp_path, fails, SystemExit(0)) == ("", None)
    name, error = called(tmp_path, fails, KeyError("name"))
    assert name == "answers/1.error" and type(error) is KeyError and error.__notes__[0].startswith("rank 1 on ")

    def fails_twice(local_rank: int) -> None:
        raise Unpicklable(1, 2)

    name, error = called(tmp_path, fails_twice)
    assert isinstance(error, rank_entrypoint.RankFailed) and str(error).endswith("Unpicklable: 1 and 2")

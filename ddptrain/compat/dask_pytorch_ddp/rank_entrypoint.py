"""The workload of `dispatch.run`: calls the user's pickled function, and writes its result to a file."""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from ddptrain.compat.dask_pytorch_ddp import failures
from ddptrain.file_ops import write_atomic
from ddptrain.rank.failure import exit_code, lost_peer, user_traceback

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

VALUE, ERROR = "value", "error"


def main(ctx: RankContext, *, job: str, answer: str) -> None:
    """Call the function in the file `job`; write its value or error to `answer`.value or `answer`.error."""
    try:
        function, args, kwargs = _loaded(job)
        value = function(*args, **kwargs)
        data = cloudpickle.dumps(value)
    except BaseException as error:  # the client gets whatever the function raised
        if not isinstance(error, SystemExit) or exit_code(error):
            where, trace = f"rank {ctx.rank} on {socket.gethostname()}", user_traceback(error)
            sealed = failures.sealed(error, where, trace, time.time_ns(), victim=lost_peer(error))
            _write_answer(answer, ERROR, sealed)
        raise
    _write_answer(answer, VALUE, data)


def _loaded(job: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function and its arguments. The user's client has pickled them, as Dask does for every task."""
    pickled, future_arguments = pickle.loads(Path(job).read_bytes())  # noqa: S301
    function, args, kwargs = pickle.loads(pickled)  # noqa: S301
    args = tuple(future_arguments.pop(index, value) for index, value in enumerate(args))
    return function, args, {**kwargs, **future_arguments}


def _write_answer(answer: str, ending: str, data: bytes) -> None:
    write_atomic(Path(f"{answer}.{ending}"), data, durable=False)


def read_answer(answer: str, ending: str) -> Any:
    """Return the rank's VALUE or ERROR. Raises FileNotFoundError, or any error of unpickling."""
    return pickle.loads(Path(f"{answer}.{ending}").read_bytes())  # noqa: S301  # written by a child process of this worker

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
from ddptrain.rank.failure import exceptions
from ddptrain.rank.failure.tracebacks import user_traceback

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
        if not isinstance(error, SystemExit) or exceptions.exit_code(error):
            where, trace = f"rank {ctx.rank} on {socket.gethostname()}", user_traceback(error)
            sealed = failures.sealed(error, where, trace, time.time_ns(), victim=exceptions.lost_peer(error))
            _leave(answer, ERROR, sealed)
        raise
    _leave(answer, VALUE, data)


def _loaded(job: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and its arguments, pickled by the user's client, as Dask does for every task."""
    pickled, given = pickle.loads(Path(job).read_bytes())  # noqa: S301
    function, args, kwargs = pickle.loads(pickled)  # noqa: S301
    args = tuple(given.pop(place, value) for place, value in enumerate(args))
    return function, args, {**kwargs, **given}


def _leave(answer: str, ending: str, data: bytes) -> None:
    write_atomic(Path(f"{answer}.{ending}"), data, durable=False)


def answered(answer: str, ending: str) -> Any:
    """Return the rank's VALUE or ERROR. Raises FileNotFoundError, or any error of unpickling."""
    return pickle.loads(Path(f"{answer}.{ending}").read_bytes())  # noqa: S301  # written by a child process of this worker

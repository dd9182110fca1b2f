"""The workload of `dispatch.run`: calls the user's pickled function, and saves its result as an artifact of the run."""

from __future__ import annotations

import pickle
import socket
from typing import TYPE_CHECKING

import cloudpickle

from ddptrain.errors import TrainingFailed
from ddptrain.rank.failure import exit_code, user_traceback

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

WORKLOAD = f"{__name__}:main"
JOB = "job.pickle"  # in the run's inputs: (function, args, kwargs)
ANSWERS = "answers"  # below artifacts/: RANK.value or RANK.error, as a pickle


class RankFailed(TrainingFailed):
    """A rank ended without an exception that can be pickled: it was killed or stopped, for example."""


def main(ctx: RankContext, *, pass_local_rank: bool) -> None:
    """Call the function that the user's client has pickled."""
    assert ctx.inputs is not None
    try:
        function, args, kwargs = pickle.loads((ctx.inputs / JOB).read_bytes())  # noqa: S301  # as Dask does for a task
        if pass_local_rank:  # with a GPU 0, because a rank sees only its own GPU
            kwargs["local_rank"] = 0 if ctx.device.type == "cuda" else ctx.local_rank
        answer: bytes = cloudpickle.dumps(function(*args, **kwargs))
    except BaseException as error:  # the client gets whatever the function raised
        if not isinstance(error, SystemExit) or exit_code(error):
            where = f"rank {ctx.rank} on {socket.gethostname()}"
            ctx.save_file(f"{ANSWERS}/{ctx.rank}.error", _pickled(error, where))
        raise
    ctx.save_file(f"{ANSWERS}/{ctx.rank}.value", answer)


def _pickled(error: BaseException, where: str) -> bytes:
    """Return the pickled exception; one that can't be pickled becomes a RankFailed."""
    note = f"{where}:\n{user_traceback(error)}"
    failed = RankFailed(f"{where}: {type(error).__qualname__}: {error}")
    failed.add_note(note)
    error.add_note(note)
    try:
        data: bytes = cloudpickle.dumps(error)
        if isinstance(pickle.loads(data), Exception):  # noqa: S301  # the data were made by this process
            return data
    except Exception:  # pickling runs user code, which may raise anything: only the text is sent then
        pass
    failure: bytes = cloudpickle.dumps(failed)
    return failure

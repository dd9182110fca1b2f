"""The Dask task of a rank of `dispatch.run`: start it here, pass on what it prints, return what it does."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Worker, get_worker

from ddptrain.compat.dask_pytorch_ddp import failures, outbox
from ddptrain.compat.dask_pytorch_ddp.rankside import ERROR, VALUE, answered
from ddptrain.protocol.notices import RankExit, exit_from_json
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.worker import rank_task, spool
from ddptrain.worker.foreign_worker import rank_host

_LOOK_S = 0.1
_TAIL_BYTES = 2000


async def open_store(run_id: str, key: str, host: str, dask_worker: Worker) -> int:
    """For client.run: the port of a store for the gang whose first rank has that key; it lives as long as the key."""
    return rank_host(dask_worker, run_id).open_store(key, host)


def run_job(spec_json: str, pickled: bytes, given: Mapping[int | str, Any]) -> Any:
    """Run the pickled (function, args, kwargs) as a rank; `given` are arguments that Dask has brought.

    Raises: what the function has raised; RankFailed where its process ended otherwise.
    """
    spec = RankSpec.from_json(spec_json)
    worker = get_worker()
    host = rank_host(worker, spec.run_id)
    folder = host.scratch / spec.run_id / f"job-{spec.rank}"
    folder.mkdir(parents=True, mode=0o700)
    job, answer = folder / "job", folder / "answer"
    job.write_bytes(
        cloudpickle.dumps((pickled, dict(given)))
    )  # what is pickled stays so: torch is not for this process
    spec = dataclasses.replace(
        spec,
        code=dataclasses.replace(
            spec.code,
            params={"job": str(job), "answer": str(answer)},
            sys_path=(*spec.code.sys_path, worker.local_directory),  # Client.upload_file puts modules there
        ),
        env={**spec.env, outbox.VARIABLE: str(outbox.make_box(worker, spec.run_id))},
    )
    log = spool.rank_spool(host.scratch, spec.run_id, spec.attempt, spec.rank).log
    with _echoed(log):
        exited = exit_from_json(rank_task.run_rank(spec.to_json()))
    return _outcome(spec, str(answer), log, exited)


def _outcome(spec: RankSpec, answer: str, log: Path, exited: RankExit) -> Any:
    who = f"rank {spec.rank} on {socket.gethostname()}"
    try:
        if exited.status == 0:
            return answered(answer, VALUE)
        raised = answered(answer, ERROR)
    except FileNotFoundError:
        if exited.status == 0:
            return None  # it has left by sys.exit(0)
        text = f"{who}: {exited.text}{_last_words(log)}"
        raise failures.ended(text, exited.time_ns) from None
    except Exception as error:
        what = "return value" if exited.status == 0 else "exception"
        text = f"{who}: its {what} can't be read on its worker: {error!r}{_last_words(log)}"
        raise failures.ended(text, exited.time_ns) from error
    raise raised


def _last_words(log: Path) -> str:
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace").strip()
        return f"; its last words:\n{text}" if text else ""
    return ""


@contextmanager
def _echoed(log: Path) -> Iterator[None]:
    """Until the block ends, what the rank prints stands in this worker's own output as well, as Dask's tasks do it."""
    over = threading.Event()
    echo = threading.Thread(target=_echo, args=(log, over), name="ddptrain-echo", daemon=True)
    echo.start()
    try:
        yield
    finally:
        over.set()
        echo.join()


def _echo(log: Path, over: threading.Event) -> None:
    offset, last = 0, False
    while True:
        with suppress(OSError):  # not there yet; or nobody reads what this worker prints
            data = spool.read_chunk(log, offset, spool.READ_LIMIT_BYTES)
            offset += len(data)
            if data:
                sys.stderr.write(data.decode("utf-8", "replace"))
                sys.stderr.flush()
                continue
        if last:
            return
        last = over.wait(_LOOK_S)

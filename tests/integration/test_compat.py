"""Code that was written for dask_pytorch_ddp, after its imports have changed: on a cluster, and as a workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli

# All in one program, for a cluster takes seconds to start.
NOTEBOOK = """
import gc, glob, json, logging, os, signal, tempfile, threading, time
from dask.distributed import Client, LocalCluster
from ddptrain.compat.dask_pytorch_ddp import dispatch, results

logger = logging.getLogger("distributed.worker")
handler = results.DaskResultsHandler("a topic that is always the same")
said = {}


def ended(future):
    try:
        return future.result()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


SIZE = 60_000_000


def my_rank():
    import torch.distributed

    return torch.distributed.get_rank()


def train(times, word="", local_rank=None):
    rank = my_rank()
    for epoch in range(times):
        handler.submit_result(f"rank-{rank}/epoch.json", json.dumps({"epoch": epoch, "at": time.time()}))
    if rank == 0:
        handler.submit_result("model.bin", bytes(SIZE))
    else:
        results.DaskResultsHandler("another topic").submit_result("not-asked-for.txt", "x")
    logger.info("logged by rank %d", rank)
    return [rank, int(os.environ["WORLD_SIZE"]), local_rank, times, word]


def fails():
    rank = my_rank()
    import torch.distributed

    handler.submit_result(f"failing/{rank}.txt", "just before")
    torch.distributed.barrier()
    if rank == 1:
        handler.submit_result("../outside.txt", "x")
    torch.distributed.barrier()


def work(client):
    inner = "a closure's"
    for number in (1, 2):
        futures = dispatch.run(
            client, lambda times, **more: train(times, word=inner, **more), client.submit(int, 3), pass_local_rank=True
        )
        handler.process_results(f"out-{number}", futures)
        said[f"returned-{number}"] = client.gather(futures)
    futures = dispatch.run(client, fails)
    try:
        handler.process_results("out-3", futures)
    except Exception as error:
        said["raised"] = [type(error).__name__, str(error), error.__notes__[0].partition(":")[0]]


def uses_upload(data):
    import uploaded_module

    return [uploaded_module.NAME, len(data)]


def upload(client):
    os.mkdir("elsewhere")
    with open("elsewhere/uploaded_module.py", "w") as file:
        file.write("NAME = 'uploaded'")
    client.upload_file("elsewhere/uploaded_module.py")
    futures = dispatch.run(client, uses_upload, bytes(3_000_000))
    said["uploaded"] = client.gather(futures)
    (folder,) = set(glob.glob(tempfile.gettempdir() + "/ddptrain-dispatch-*/" + futures[0].key.partition("/")[0]))
    said["largest"] = {name: os.path.getsize(f"{folder}/{name}") for name in ("config.yaml", "events.jsonl")}
    del futures
    gc.collect()
    said["kept"] = os.path.exists(folder)


def waits_for(name):
    while not os.path.exists(name):
        time.sleep(0.05)


def interrupt(client):
    busy = dispatch.run(client, waits_for, os.path.abspath("go"))
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        dispatch.run(client, print, "MUST NOT RUN")
    except KeyboardInterrupt:
        said["interrupted"] = True
    deadline = time.monotonic() + 60
    while sum(thread.name.startswith("dispatch-") for thread in threading.enumerate()) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    open("go", "w").close()
    said["busy"] = client.gather(busy)


def waits():
    handler.submit_result(f"{my_rank()}.txt", "started")
    time.sleep(600)


def kill_a_worker(client):
    pids = client.run(os.getpid)
    while not (os.path.exists("lost/0.txt") and os.path.exists("lost/1.txt")):
        time.sleep(0.05)
    os.kill(max(pids.values()), signal.SIGKILL)


def lose_a_worker(client):
    futures = dispatch.run(client, waits)
    threading.Thread(target=kill_a_worker, args=(client,)).start()
    try:
        handler.process_results("lost", futures)
    except BaseException as error:
        said["lost"] = [f"{type(error).__name__}: {error}", *map(ended, futures)]


if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        work(client)
        upload(client)
        interrupt(client)
        lose_a_worker(client)
    print("SAID " + json.dumps(said))
"""

WORKLOAD = '''
import torch
import torch.distributed as dist
from ddptrain.compat.dask_pytorch_ddp.results import DaskResultsHandler

handler = DaskResultsHandler("topic")


def train(epochs):
    """As it was written for dispatch.run(client, train, 2)."""
    import logging

    for epoch in range(epochs):
        logging.getLogger("distributed.worker").info("epoch %d", epoch)
        handler.submit_result(f"logs/{dist.get_rank()}/{epoch}.json", "{}")
    handler.submit_result(f"model-{dist.get_rank()}.pt", torch.ones(2).numpy().tobytes())
'''


def told_by_notebook(run_cli: Cli) -> tuple[dict[str, Any], str]:
    """What the program says of its jobs, and what its workers have printed."""
    done = run_cli(program=run_cli.program(NOTEBOOK), timeout_s=400)
    assert done.rc == 0, done.stderr + done.stdout
    said: dict[str, Any] = json.loads(done.stdout.partition("SAID ")[2])
    return said, done.stderr


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.timeout(420)  # Dask's nannies start Python anew for each worker, and each rank imports torch
def test_notebook_runs_after_its_import_has_changed(run_cli: Cli) -> None:
    """Jobs return, and hand over results, each time anew; those that die fail their futures, and stop the others."""
    said, printed = told_by_notebook(run_cli)
    wanted = [[rank, 2, rank, 3, "a closure's"] for rank in (0, 1)]
    assert said["returned-1"] == said["returned-2"] == wanted
    epochs = []
    for number in (1, 2):
        folder = run_cli.folder / f"out-{number}"
        assert files(folder).keys() == {"rank-0/epoch.json", "rank-1/epoch.json", "model.bin"}
        assert (folder / "model.bin").read_bytes() == bytes(60_000_000)
        epochs.append(json.loads((folder / "rank-1" / "epoch.json").read_text()))
    assert [epoch["epoch"] for epoch in epochs] == [2, 2]
    assert epochs[0]["at"] < epochs[1]["at"]
    assert "INFO - logged by rank 0" in printed and "INFO - logged by rank 1" in printed
    # The first cause is raised, not the peer that has lost it; and what was submitted before is there.
    kind, message, who = said["raised"]
    assert kind == "UnsafePath" and "outside.txt" in message and who.startswith("rank 1 on ")
    assert files(run_cli.folder / "out-3").keys() == {"failing/0.txt", "failing/1.txt"}
    assert not (run_cli.folder / "outside.txt").exists()
    # Modules that were uploaded are found; large arguments are not in the configuration; no files stay.
    assert said["uploaded"] == [["uploaded", 3_000_000]] * 2
    assert max(said["largest"].values()) < 100_000 and said["kept"] is False
    # Ctrl-C ends the wait for slots, and only that.
    assert said["interrupted"] is True and said["busy"] == [None, None] and "MUST NOT RUN" not in printed
    # A worker that is lost fails its future, which Dask would leave pending, and the others are stopped.
    raised, *each = said["lost"]
    (lost,) = [text for text in each if text == raised]
    (stopped,) = [text for text in each if text != raised]
    assert "was lost" in lost and stopped.startswith("RankFailed: rank ") and "killed by SIGTERM" in stopped
    assert files(run_cli.folder / "lost").keys() == {"0.txt", "1.txt"}


def test_function_of_dispatch_run_is_a_workload_whose_results_are_artifacts(run_cli: Cli, warm_cluster: str) -> None:
    (run_cli.folder / "job.py").write_text(WORKLOAD)
    (run_cli.folder / "job.yaml").write_text("{workload: job:train, params: {epochs: 2}, cluster: {ranks: 2}}")
    done = run_cli("train", "job.yaml", "--run-id", "mine", "--cluster", warm_cluster)
    assert done.rc == 0, done.stdout + done.stderr
    run = run_cli.folder / "runs" / "mine"
    logs = {f"logs/{rank}/{epoch}.json" for rank in (0, 1) for epoch in (0, 1)}
    assert files(run / "artifacts").keys() == logs | {"model-0.pt", "model-1.pt"}
    assert "distributed.worker - INFO - epoch 1" in (run / "logs" / "rank-1.log").read_text()

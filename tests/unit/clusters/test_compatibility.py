"""The check of clusters of others: what does not fit is one table, which says what to do."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddptrain.clusters import compatibility, compatibility_probe
from ddptrain.clusters.compatibility import Needs, check_cluster, folded
from ddptrain.errors import ClusterError
from tests.support.environments import make_environment
from tests.unit.worker.daskbench import DaskBench, Driver

PACKAGES = ("ddptrain", "torch", "distributed", "dask-pytorch-ddp")
OURS = json.loads(compatibility_probe.look(PACKAGES, "json", ())) | {"workload": "found"}
NEEDS = Needs("mine.training:main", ("/srv/code", "/home/me"))


def told(**values: str | None) -> str:
    return json.dumps(OURS | {name.replace("_", "-"): value for name, value in values.items()})


class FakeClient:
    """A scheduler and workers that answer what they are told to: text, an error, or (None) nothing ever."""

    def __init__(self, workers: Mapping[str, object], scheduler: object, left: Sequence[str] = ()) -> None:
        self.answers = {"scheduler": scheduler, **workers}
        self.there = {worker: 1 for worker in workers if worker not in left}

    def sync(self, function: Callable[..., Any], *args: Any) -> Any:
        return asyncio.run(function(*args))

    async def run_on_scheduler(self, function: object, text: str) -> object:
        assert function is eval  # by reference: no code of ours is unpickled there
        return await self._answer("scheduler", text)

    async def run(self, function: object, text: str, workers: Sequence[str]) -> dict[str, object]:
        assert function is eval
        return {worker: await self._answer(worker, text) for worker in workers}

    async def nthreads(self) -> dict[str, int]:
        return self.there

    async def _answer(self, who: str, text: str) -> object:
        answer = self.answers[who]
        if answer is None:
            await asyncio.sleep(3600)
        if isinstance(answer, Exception):
            raise answer
        return eval(text, {}) if answer is eval else answer


def checked(
    workers: Mapping[str, object], scheduler: object = None, needs: Needs = NEEDS, left: Sequence[str] = ()
) -> str:
    """The table; empty where all is well."""
    client: Any = FakeClient(workers, scheduler or told(), left)
    try:
        check_cluster(client, list(workers), needs)
    except ClusterError as error:
        return str(error)
    return ""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "_DEADLINE_S", 0.5)


# --- what fits ---


def test_cluster_that_fits_is_taken() -> None:
    assert checked({"tcp://a:1": told(), "tcp://b:1": told()}) == ""


def test_cluster_without_workers_is_asked_about_its_scheduler() -> None:
    assert checked({}) == ""
    assert "scheduler" in checked({}, told(ddptrain=None))


def test_torch_and_platform_may_differ_from_the_drivers() -> None:
    other = told(torch="2.7.0", platform="linux aarch64")
    assert checked({"tcp://a:1": other, "tcp://b:1": other}) == ""


def test_scheduler_needs_neither_torch_nor_the_workload() -> None:
    assert checked({"tcp://a:1": told()}, told(torch=None, dask_pytorch_ddp=None, workload=None)) == ""


def test_patch_version_of_python_may_differ() -> None:
    major, minor, _ = OURS["Python"].split(".")
    assert checked({"tcp://a:1": told(Python=f"{major}.{minor}.99")}) == ""


# --- what does not ---


@pytest.mark.parametrize(
    ("answer", "marked", "advice"),
    [
        ({"Python": "3.9.18"}, "3.9.18 !", "use Python 3.1"),
        ({"ddptrain": None}, "missing !", f"pip install ddptrain=={OURS['ddptrain']})"),
        ({"ddptrain": "0.0.1"}, "0.0.1 !", f"pip install ddptrain=={OURS['ddptrain']})"),
        ({"torch": None}, "missing !", f"pip install torch=={OURS['torch'].partition('+')[0]})"),
        ({"distributed": "2025.6.1"}, "2025.6.1 !", "pip install 'distributed>=2025.7')"),
        ({"dask_pytorch_ddp": None}, "missing !", "pip install dask-pytorch-ddp)"),
        ({"workload": None}, "missing !", "module mine.training importable on the workers"),
    ],
)
def test_each_misfit_of_a_worker_is_marked_and_says_what_to_do(
    answer: dict[str, str | None], marked: str, advice: str
) -> None:
    text = checked({"tcp://10.0.0.1:4000": told(), "tcp://10.0.0.2:4000": told(**answer)})
    lines = text.splitlines()
    assert [marked in line for line in lines if "(1 worker)" in line] == [False, True]
    assert text.count(" !") == 1
    assert advice in text.replace("\n", " ")


@pytest.mark.parametrize("answer", [{"Python": "3.9.18"}, {"ddptrain": "9.9"}, {"distributed": "2024.12.1"}])
def test_scheduler_is_checked_too(answer: dict[str, str | None]) -> None:
    (row,) = [line for line in checked({"tcp://a:1": told()}, told(**answer)).splitlines() if " !" in line]
    assert row.split()[0] == "scheduler"


@pytest.mark.parametrize("usual", [OURS["torch"], "2.9.0"])
def test_worker_with_another_torch_than_most_is_marked(usual: str) -> None:
    workers = {f"tcp://10.0.0.{number}:1": told(torch=usual) for number in (1, 2)}
    text = checked({"tcp://10.0.0.9:1": told(torch="2.6.0"), **workers})
    assert [line.split()[0] for line in text.splitlines() if "2.6.0 !" in line] == ["10.0.0.9"]
    assert f"torch=={usual.partition('+')[0]})" in text.replace("\n", " ")


def test_built_in_workload_is_not_looked_for_apart_from_ddptrain() -> None:
    text = checked({"tcp://a:1": told(ddptrain=None, workload=None)}, needs=Needs("ddptrain.workloads.x:train", ()))
    assert "workload" not in text and text.count("missing !") == 1


# --- the table ---


def test_table_as_it_is_read() -> None:
    workers = {f"tcp://10.0.0.{host}:{port}": told() for host in range(1, 9) for port in (4000, 4001)}
    others = {"tcp://10.0.0.9:4000": told(ddptrain=None, workload=None)}
    lines = checked(workers | others).splitlines()
    assert lines[0] == "this cluster can't run the training (! marks what does not fit):"
    assert max(map(len, lines)) <= 90, "ten more are in front of it when it is shown"
    assert lines[1].split()[:3] == ["Python", "ddptrain", "torch"]
    assert [line.split()[0] for line in lines[2:5]] == ["driver", "scheduler", "10.0.0.[1-8]"]
    assert "10.0.0.[1-8] (16 workers)  " in lines[4]
    assert "10.0.0.9 (1 worker)  " in lines[5]
    assert lines[6].startswith("To do: install what is marked there (pip install ddptrain==")
    column = lines[1].index("ddptrain")
    assert [line[column - 1] for line in lines[2:6]] == [" "] * 4
    assert lines[5][column:].startswith("missing !")


def test_workers_of_one_host_that_differ_are_told_apart_by_port() -> None:
    text = checked({"tcp://[::1]:1000": told(), "tcp://[::1]:1001": told(ddptrain=None)})
    assert "[::1]:1000 (1 worker)" in text and "[::1]:1001 (1 worker)" in text


def test_table_is_never_wider_than_a_terminal() -> None:
    long = {"torch": "2.16.0.dev20261101+cu130.git0123456789", "Python": "3.12.11", "distributed": "2024.12.1"}
    hosts = [f"ip-10-0-{number * 7 % 256}-{number * 13 % 256}.eu-west-1.compute.internal" for number in range(60)]
    odd = {f"tls://{host}:1": told(**long, ddptrain="0.0.1.dev12345678", workload=None) for host in hosts[:50]}
    fine = {f"tls://{host}:1": told() for host in hosts[50:]}
    text = checked({**odd, **fine, "tls://b:1": told(dask_pytorch_ddp=None)})
    assert max(map(len, text.splitlines())) <= 100
    for column in ("Python", "ddptrain", "torch", "distributed", "dask-pytorch-ddp", "workload"):
        assert column in text.splitlines()[1]
    assert {"(50", "(10", "(1"} <= set(text.split())  # workers


def test_what_others_say_can_not_move_the_cursor() -> None:
    assert "\x1b" not in checked({"tcp://a:1": told(ddptrain="\x1b[2J")}, OSError("\x1b[31m"))


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.7"], ["10.0.0.[1-3,7]"]),
        (["node-09.lan", "node-10.lan", "node-11.lan"], ["node-[09-11].lan"]),
        (["n9", "n10"], ["n[9-10]"]),
        (["n1", "n01"], ["n[1,01]"]),
        (["10.0.1.1", "10.0.1.2", "10.0.2.1"], ["10.0.1.[1-2]", "10.0.2.1"]),
        (["alpha", "beta", "alpha2"], ["alpha", "beta", "alpha2"]),
    ],
)
def test_names_of_hosts_are_folded(names: list[str], short: list[str]) -> None:
    assert folded(names) == short


# --- who does not answer ---


@pytest.mark.usefixtures("soon")
def test_silent_workers_are_named_beside_the_answers_of_others() -> None:
    text = checked({"tcp://a:1": told(), "tcp://b3:1": None, "tcp://b4:1": None})
    assert "b[3-4] (2 workers)  no answer within 0.5 s" in text
    assert "a (1 worker)" in text
    assert "restart them" in text


@pytest.mark.usefixtures("soon")
def test_silent_scheduler_is_named() -> None:
    client: Any = FakeClient({}, None)
    with pytest.raises(ClusterError, match=r"scheduler +no answer within"):
        check_cluster(client, [], NEEDS)


@pytest.mark.usefixtures("soon")
def test_worker_that_left_while_it_was_asked_does_not_matter() -> None:
    gone = {"tcp://b:1": None, "tcp://c:1": OSError("Connection refused")}
    assert checked({"tcp://a:1": told(), **gone}, left=list(gone)) == ""


def test_error_of_the_probe_is_told_in_full() -> None:
    reason = "Cannot run function as the scheduler has been explicitly disallowed from deserializing " * 2
    text = checked({"tcp://a:1": RuntimeError("no eval here")}, ValueError(reason))
    assert "could not be asked: RuntimeError: no eval here" in text
    assert " ".join(reason.split()) in " ".join(text.split())


# --- the probe ---


def test_probe_is_text_for_python_3_9() -> None:
    ast.parse(inspect.getsource(compatibility_probe), feature_version=(3, 9))


def test_probe_finds_modules_as_a_rank_will_import_them(tmp_path: Path) -> None:
    (tmp_path / "single.py").write_text("raise RuntimeError('it was imported')")
    (tmp_path / "bare" / "inner").mkdir(parents=True)
    folders = ("/nowhere", str(tmp_path))

    def finds(workload: str) -> bool:
        return checked({"tcp://a:1": eval}, needs=Needs(workload, folders)) == ""

    assert finds("single:main") and finds("json.decoder:main")
    assert finds("bare.inner:main") and not finds("bare:main")  # a bare folder holds modules and no function
    assert not finds("nowhere:main")


def test_what_is_loaded_counts_and_not_what_was_installed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddptrain.__version__", "0.0.9")
    answer = json.loads(compatibility_probe.look(("ddptrain", "nothing-of-this-name"), "json", ()))
    assert (answer["ddptrain"], answer["nothing-of-this-name"]) == ("0.0.9", None)


def test_what_is_installed_between_two_probes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    arguments = (("brandnew",), "brandnew", ())
    before = json.loads(compatibility_probe.look(*arguments))
    now = tmp_path.stat().st_mtime_ns
    (tmp_path / "brandnew.py").touch()
    (tmp_path / "brandnew-2.5.dist-info").mkdir()
    (tmp_path / "brandnew-2.5.dist-info" / "METADATA").write_text("Name: brandnew\nVersion: 2.5\n")
    os.utime(tmp_path, ns=(now + 10**9, now + 10**9))  # another time, however coarse the file system's clock is
    after = json.loads(compatibility_probe.look(*arguments))
    assert (before["brandnew"], before["workload"]) == (None, None)
    assert (after["brandnew"], after["workload"]) == ("2.5", "found")


# --- real clusters ---


def refused(driver: Driver, needs: Needs) -> list[str]:
    with pytest.raises(ClusterError) as error:
        check_cluster(driver.client, list(driver.client.nthreads()), needs)
    return str(error.value).splitlines()


@pytest.fixture
def dask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaskBench]:
    monkeypatch.setattr(compatibility, "_DEADLINE_S", 60.0)
    with DaskBench(tmp_path) as bench:
        bench.scheduler()
        yield bench


def start_worker(dask: DaskBench, name: str, python: Path | None = None) -> None:
    """A `dask worker` of another environment, without what PYTHONPATH (-E) names here, or of this one."""
    other = () if python is None else ("-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])", str(python), "-E")
    where = ("--scheduler-file", str(dask.scheduler_file), "--local-directory", str(dask.folder / name))
    command = ("-P", "-m", "distributed.cli.dask_worker", *where, "--nthreads", "1", "--no-dashboard", "--name", name)
    dask.start(name, *other, *command)


_LOADED = "[name for name in ('torch', 'sums', 'ddptrain') if name in __import__('sys').modules]"


def test_worker_without_ddptrain_and_with_another_torch_is_told(dask: DaskBench) -> None:
    (dask.folder / "sums.py").write_text("raise RuntimeError('it was imported')")
    python = make_environment(dask.folder / "env", without="ddptrain", versions={"torch": "2.0.0"})
    start_worker(dask, "bare", python)
    start_worker(dask, "fine")
    with dask.driver(workers=2) as driver:
        lines = refused(driver, Needs("sums:main", (str(dask.folder),)))
        bare = driver.workers["bare"]
        assert driver.client.run(eval, _LOADED, workers=[bare]) == {bare: []}, "the probe has imported something heavy"
    (row,) = [line for line in lines if "missing !" in line]
    assert row.split()[0] == bare.partition("://")[2]
    assert "2.0.0 !" in row and row.count(" !") == 2
    assert f"ddptrain=={OURS['ddptrain']}" in " ".join(lines)


def test_stopped_worker_is_named_in_time(dask: DaskBench) -> None:
    for name in ("one", "two"):
        start_worker(dask, name)
    with dask.driver(workers=2) as driver:
        check_cluster(driver.client, list(driver.workers.values()), Needs("json:loads", ()))
        pid = driver.call(os.getpid, worker="two")
        silent = driver.workers["two"].partition("://")[2]
        with stopped(pid), pytest.MonkeyPatch.context() as patch:
            rows: list[str] = []
            for deadline_s in (2.0, 8.0, 32.0):  # the others may be slow here
                patch.setattr(compatibility, "_DEADLINE_S", deadline_s)
                rows = [line for line in refused(driver, Needs("json:loads", ())) if "no answer within" in line]
                if len(rows) == 1:
                    break
    (row,) = rows
    assert row.split()[0] == silent


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)

"""The key of W&B is where it is needed, in the ranks' environment, and nowhere else."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from distributed import Scheduler

from tests.conftest import Cli
from tests.servers.dask_cluster import DaskCluster
from tests.support.command import wait_until

KEY = "5ecre7" * 7  # wandb takes none that is shorter than 40
OPTIONS = {"api_key": "own-5ecre7", "login": {"secret": {"words": ["open 5esame"]}}, "every": 3}
SECRETS = (KEY, KEY[::-1], "own-5ecre7", "open 5esame")
WORKLOAD = """
import hashlib, os, time

class Sink:  # a tracker that needs keys, and is careless with them
    def __init__(self, options):
        self.options = options

    def start(self, facts):
        assert not [text for text in found(self.options) if text in repr((facts, dict(os.environ)))]
        print("options", *(hashlib.sha256(text.encode()).hexdigest() for text in found(self.options)), flush=True)
        facts.tell(f"I am here with {self.options}")
        facts.found({"url": f"http://there/{self.options['api_key']}"})

    def log(self, item):
        raise ValueError(f"no room for {self.options['login']['secret']['words'][0]}")

    def finish(self, state):
        raise ValueError(f"no end for {self.options}")


def found(options):
    return [options["api_key"], options["login"]["secret"]["words"][0]]


def wait(ctx, until):
    ctx.log({"train/loss": 1.0}, step=1)
    print("key", hashlib.sha256(os.environ["WANDB_API_KEY"].encode()).hexdigest(), flush=True)
    while not os.path.exists(until):
        time.sleep(0.02)
"""


def _all_of_scheduler() -> Any:
    """All that a scheduler holds of tasks and messages, as bytes; a function in a function travels by value."""

    def dump(dask_scheduler: Scheduler) -> bytes:
        import cloudpickle

        parts: list[Any] = [str(dask_scheduler.get_events())]
        for state in dask_scheduler.tasks.values():
            parts += [cloudpickle.dumps(state.run_spec), repr(state), str(state.annotations)]
        return b"\n".join(part if isinstance(part, bytes) else str(part).encode() for part in parts)

    return dump


def _arguments() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


FAILING = """
import os

def fail(ctx, db_password, source_options, words):
    assert os.environ["OWN_PASS"] == "env-5ecre7"
    ctx.log({"train/loss": 1.0}, step=1)
    raise RuntimeError(f"no way in with {db_password}, {source_options['account_key']} and {words[0]}")
"""


def test_secrets_of_params_and_environment_are_in_no_record_of_a_run(
    tmp_path: Path, run_cli: Cli, warm_cluster: str
) -> None:
    (tmp_path / "work.py").write_text(FAILING)
    params = {
        "db_password": "param-5ecre7",
        "source_options": {"account_key": "option-5ecre7", "anon": False},
        "words": ["s3://bucket/f?sig=sig-5ecre7", "plain"],
    }
    config = {"workload": "work:fail", "params": params, "env": {"OWN_PASS": "env-5ecre7", "PLAIN": "seen"}}
    (tmp_path / "run.yaml").write_text(json.dumps({**config, "cluster": {"ranks": 2, "address": warm_cluster}}))
    done = run_cli("train", "run.yaml")
    assert done.rc == 1, done.stderr
    assert "no way in with" in done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    record, kept = (run / "run.json").read_text(), (run / "config.yaml").read_text()
    assert "no way in with <left out>, <left out> and" in record
    assert "plain" in kept
    for text in (record, kept, (run / "events.jsonl").read_text()):
        assert "5ecre7" not in text


def test_key_reaches_ranks_on_a_cluster_of_others_and_nobody_else(tmp_path: Path, run_cli: Cli) -> None:
    for name in ("tmp", "cluster"):
        (tmp_path / name).mkdir()
    (tmp_path / "work.py").write_text(WORKLOAD)
    config: dict[str, Any] = {"workload": "work:wait", "params": {"until": str(tmp_path / "go")}}
    own = {"name": "work:Sink", "options": OPTIONS}
    config |= {"cluster": {"ranks": 1}, "env": {"OWN_PASSWORD": KEY[::-1]}}
    config |= {"tracking": {"wandb": {"mode": "rank0"}, "other": [own]}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    cluster_env = {"TMPDIR": str(tmp_path / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    with contextlib.closing(DaskCluster(tmp_path / "cluster", env=cluster_env)) as cluster:
        cluster.add_dask_worker("foreign")
        env = {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}
        running = run_cli.start("train", "run.yaml", "--cluster", cluster.file, "--verbose", env=env)
        running.wait_for(f"key {hashlib.sha256(KEY.encode()).hexdigest()}")
        running.wait_for(" ".join(["options", *(hashlib.sha256(text.encode()).hexdigest() for text in SECRETS[2:])]))
        with cluster.client() as client:
            (run,) = (tmp_path / "runs").iterdir()
            wait_until(lambda: list((run / "tracking/wandb").glob("offline-run-*/*.wandb")), "a record of the run")
            held = client.run_on_scheduler(_all_of_scheduler())
        arguments = _arguments()
        (tmp_path / "go").touch()
        ended = running.finish()
        assert ended.rc == 0, ended.stderr
        said = [path.read_text() for path in (tmp_path / "cluster").glob("*.log")]
    assert run.name.encode() in held, "the spec was there to be seen"
    assert "work:Sink could not finish: ValueError: no end for" in ended.stderr
    assert "I am here with" in ended.stderr
    assert not any(secret.encode() in held for secret in SECRETS)
    assert not any(secret in text for secret in SECRETS for text in [*arguments, *said, ended.stdout, ended.stderr])
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert not [path for path, data in kept.items() for secret in SECRETS if secret.encode() in data]

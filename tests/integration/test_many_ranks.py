"""A run with more ranks than fit on a screen, and the log that says what was decided."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.conftest import PATIENCE_S, Cli

RANKS = 17
WORKLOAD = """
import torch.distributed

def work(ctx, fail_on=-1):
    torch.distributed.barrier()
    print("epoch 1/1", flush=True)
    ctx.progress(1, 1, unit="epochs")
    print("of rank", ctx.rank)
    print("the last line", flush=True)
    if ctx.rank == fail_on:
        raise ValueError("wrong shape, token=abcdef123456")
"""


def configured(folder: Path) -> str:
    (folder / "work.py").write_text(WORKLOAD)
    config = {"workload": "work:work", "cluster": {"ranks": RANKS, "gpus": 0}, "env": {"OMP_NUM_THREADS": "1"}}
    (folder / "many.yaml").write_text(json.dumps(config))
    return "many.yaml"


def shown_of(lines: list[str], text: str) -> bool:
    """Whether rank 0's line with this text is shown, and not that of every other rank.

    On a busy machine ranks print at different times.
    """
    ranks = [line for line in lines if line.endswith(f"] {text}")]
    return ranks.count(f"[rank 0] {text}") == 1 and len(ranks) < RANKS


def test_17_ranks_that_fail_in_a_pipe_are_shown_as_rank_0_and_what_differs_and_the_log_says_what_was_decided(
    tmp_path: Path, run_cli: Cli
) -> None:
    ended = run_cli("train", configured(tmp_path), "--set", "params.fail_on=11", "--verbose", timeout_s=3 * PATIENCE_S)
    assert ended.rc == 1, ended.stderr
    lines = ended.stdout.splitlines()
    assert shown_of(lines, "epoch 1/1")
    for rank in range(RANKS):
        assert lines.count(f"[rank {rank}] of rank {rank}") == 1
    traceback = [line for line in lines if line.startswith("[rank 11]")]
    assert traceback[-1] == "[rank 11] ValueError: wrong shape, token=abcdef123456"
    (run_dir,) = (tmp_path / "runs").iterdir()
    for rank in range(RANKS):
        printed = (run_dir / "logs" / f"rank-{rank}.log").read_text()
        assert printed.startswith(f"epoch 1/1\nof rank {rank}\nthe last line\n")

    log = (run_dir / "logs" / "ddptrain.log").read_text()
    assert all(re.match(rf"\S+Z [A-Z]+ [a-z-]+ run={run_dir.name} ", line) for line in log.splitlines())
    for decisive in (
        "INFO driver .*driver started version=",
        "INFO clusters .*local worker started pid=",
        "INFO scheduler .*slots reserved",
        "INFO driver .*rank=11 rank placed host=",
        "INFO driver .*attempt=1 rank=11 rank ordered worker=",
        "INFO worker .*attempt=1 rank=11 rank started .*pid=[0-9]+ start=forked",
        'INFO driver .*rank=11 fault kind=exception message="ValueError: wrong shape, token=<left out>" victim=False',
        "INFO driver .*attempt=1 deadline set deadline=settle in_s=",
        "INFO worker .*rank=11 rank ended .*status=1",
        "INFO driver .*attempt ended status=failed cause_rank=11",
        "INFO driver .*run ends status=failed exit_code=1",
    ):
        assert re.search(decisive, log), decisive
    assert "abcdef123456" not in log
    shown = [line for line in ended.stderr.splitlines() if not line.startswith("ddptrain: ")]
    assert set(log.splitlines()) <= set(shown)  # --verbose shows at least that, on stderr
    described = run_cli("results", "show", run_dir.name)
    assert re.search(rf"log for bug reports +runs/{run_dir.name}/logs/ddptrain\.log\n", described.stdout)

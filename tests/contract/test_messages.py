"""What a run prints while it runs and when it fails."""

from __future__ import annotations

from tests.contract.conftest import Project, lines


def test_error_of_two_ranks_is_one_line_and_one_traceback(project: Project, shared_cluster: str) -> None:
    config = project.function("def train(ctx):\n    ctx.mean(1.0)\n    raise ValueError('no such label')\n")
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=1)
    told = [line for line in done.stderr.splitlines() if "no such label" in line]
    assert len(told) == 1 and "failed first: ValueError: no such label (the same error: rank " in told[0], done.stderr
    assert done.stdout.count("Traceback (most recent call last)") == 1, done.stdout
    for rank in (0, 1):  # each rank's log still has its own
        log = (project.run_directories()[0] / "logs" / f"rank-{rank}.log").read_text()
        assert log.count("Traceback (most recent call last)") == 1
        assert f"[rank {rank}] ValueError: no such label" in done.stdout


def test_cause_is_shown_while_the_other_ranks_take_long_to_stop(project: Project, shared_cluster: str) -> None:
    code = """
        import signal, threading

        def train(ctx):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ctx.mean(1.0)
            if ctx.rank == 1:
                raise ValueError("no such label")
            threading.Event().wait()
    """
    config = project.function(code, failure={"grace_s": 4})
    running = project.start("train", config, "--cluster", shared_cluster, "--ranks", "2")
    running.wait_for("failed first: ValueError: no such label")
    assert running.popen.poll() is None, "the cause was shown only at the end"
    assert "; log: " not in running.stderr
    done = running.finish()
    assert done.rc == 1
    faults = [line for line in lines(project.run_directories()[0] / "events.jsonl") if line["event"] == "fault"]
    assert [fault["rank"] for fault in faults if not fault["victim"]] == [1]

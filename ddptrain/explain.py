"""The text of `ddptrain explain`: for each exit code its meaning, an example, the causes, and what to do."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ddptrain.errors import ExitCode

BROKEN_PIPE = 128 + signal.SIGPIPE
KILLED = 128 + signal.SIGKILL
_MOST_CAUSES = 3


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of an exit code (or the message that it shows), and what to do.

    sign: a regular expression; a run whose root cause it matches has this cause.
    """

    cause: str
    action: str
    sign: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known about an exit code. example: what the command prints. remarks: lines with full sentences.

    causes: the most likely ones first.
    """

    title: str
    example: str = ""
    causes: tuple[Cause, ...] = ()
    remarks: str = ""


_INTERRUPTED = Explanation(
    "interrupted",
    "ddptrain: run train-20260612-080000-a1b2 cancelled: interrupted by SIGTERM; checkpoint step-20 is saved",
    (
        Cause(
            "Ctrl-C, or a second signal, which does not wait for a checkpoint",
            "start it again with --resume RUN; to save, send one signal and wait for failure.grace_s",
            "SIGINT",
        ),
        Cause(
            "the signal came before the first checkpoint (also with ddptrain stop)",
            "start it again; save more often, as checkpoint.every_s: 300 does",
            "SIGTERM|ddptrain stop",
        ),
        Cause("the function does not call ctx.checkpoint", "call it on all ranks", "SIGTERM|ddptrain stop"),
        Cause("a script without a handler for SIGTERM", "the handler of a script should save, and exit with 0 or 75"),
    ),
    "130 after Ctrl-C, 129 after SIGHUP, 131 after SIGQUIT, also if the run has saved; 143 after SIGTERM, if there is "
    "no checkpoint.\n"
    "If there is a checkpoint, --resume RUN continues from it. Every process of the run has ended.",
)

EXPLANATIONS: dict[int, Explanation] = {
    ExitCode.SUCCEEDED: Explanation("succeeded", remarks="Nothing to do."),
    ExitCode.TRAINING_FAILED: Explanation(
        "the training code failed",
        "ddptrain: run train-20260612-080000-a1b2 failed: rank 1 on vm failed first: ValueError: batch 3 has "
        "31 samples, expected 32; log: runs/train-20260612-080000-a1b2/logs/rank-1.log",
        (
            Cause(
                "an exception with your file and line",
                "fix it; --full-traceback shows the frames of torch, too",
                "Error|Exception",
            ),
            Cause("CUDA out of memory", "use a smaller batch, or prepare: {precision: bf16}", "CUDA out of memory"),
            Cause(
                "killed by SIGKILL: often the kernel, because memory was short; the message says so if the kernel "
                "counted it",
                "use smaller batches, fewer loader workers, fewer ranks on the host",
                "SIGKILL",
            ),
            Cause(
                "a metric is nan or inf, and failure.nan is stop",
                "lower the learning rate, clip gradients, or use bf16 or fp32; --resume RUN continues from the last "
                "finite checkpoint",
                r"failure\.nan is stop",
            ),
            Cause(
                "No module named ... on a host",
                "install it there; ddptrain copies your project, not its packages",
                "No module named",
            ),
            Cause(
                "killed by SIGSEGV or SIGABRT: compiled code, such as CUDA or an extension",
                'env: {CUDA_LAUNCH_BLOCKING: "1"} shows the line; the log has the stack',
                "SIGSEGV|SIGABRT|SIGBUS",
            ),
            Cause(
                "rank 0 is in ctx.checkpoint, which rank 1 has not called",
                "call it on all ranks",
                r"in ctx\.checkpoint",
            ),
            Cause(
                "all images of the source are bad",
                "check the folder, the format and the access rights",
                "images .*bad|bad images",
            ),
        ),
        "The rank that is named failed first. Errors of other ranks, such as 'Connection reset by peer' of "
        "gloo or a NCCL error, are consequences.\n"
        "failure.max_restarts: 2 starts the ranks again from the last checkpoint. The same failure twice at "
        "the same step is not tried a third time.\n"
        "ddptrain predict ends with this code if some of the images could not be classified.\n"
        "With tracking.strict: true a tracker's failure has this code, too. In sweeps it means that no trial "
        "is complete.",
    ),
    ExitCode.USAGE: Explanation(
        "usage or configuration; nothing was started",
        "ddptrain: error: --set params.epochz=3: params.epochz: unknown key (did you mean params.epochs?)",
        (
            Cause("a wrong field or value", "fix the line that is named; ddptrain schema lists all fields"),
            Cause(
                "data are missing or empty (params.source, params.names)", "check the path or URL, and the credentials"
            ),
            Cause("no run has that name", "ddptrain results lists the runs of a folder; --runs-dir names another one"),
            Cause("a resume with changed parameters", "--allow-changes, or start a new run"),
            Cause("weights or a checkpoint are damaged or of another model", "the message names the file"),
            Cause(
                "retrain: the data check found a class without images, or half of the files gone",
                "check the data; --force trains anyway",
            ),
        ),
        "ddptrain train CONFIG --dry-run checks the configuration and the cluster, and starts nothing.",
    ),
    ExitCode.INTERNAL: Explanation(
        "a bug of ddptrain",
        "ddptrain: internal error: KeyError: 'x'; this is a bug of ddptrain, the details are in ...",
        (
            Cause(
                "this should not happen",
                "report it with the crash log that the message names, logs/ddptrain.log of the run (secrets are "
                "removed from both), and the output of ddptrain --version",
            ),
        ),
        "The run directory is intact: --resume RUN continues from the last checkpoint.",
    ),
    ExitCode.CLUSTER: Explanation(
        "cluster or infrastructure",
        "ddptrain: run train-20260612-080000-a1b2 failed: no Dask scheduler answers at tcp://10.0.0.5:8786 "
        "within 60 s: connection refused; is it up, and the port right?",
        (
            Cause(
                "too few free slots",
                "cluster.wait_s: 3600 waits in line; ddptrain cluster status NAME shows who holds them; "
                "ask for fewer --ranks",
                "slots",
            ),
            Cause(
                "no scheduler answers",
                "is it up (ddptrain cluster list), is the port open, is the address right? "
                "cluster.start_timeout_s is the time limit",
                "[Ss]cheduler .*(answer|ended)",
            ),
            Cause(
                "a worker was lost: out of memory, restarted, cut off",
                "the message names the host; failure.max_losses: 3 continues on others",
                "worker .*(lost|ended|memory|restarted)",
            ),
            Cause(
                "the GPUs can't be listed",
                "the message has NVML's reason: the driver, or a container without the driver capability utility; "
                "cluster.gpus: 0 trains on the CPU",
                "GPUs of .* can't be listed",
            ),
            Cause(
                "disk full, quota, limit on the size of files (ulimit -f)",
                "free some space: ddptrain results prune --keep 20; the last complete checkpoint is intact",
                "No space left|[Dd]isk (quota|space)|disk of .* is full|[Ff]ile too large|limit on the size",
            ),
            Cause(
                "a store (S3, ...) does not answer",
                "check credentials, region and endpoint; then continue with --resume RUN",
                "(s3|gs|az|https?)://",
            ),
            Cause(
                "versions do not match",
                "install the same Python, torch and ddptrain everywhere; the table shows the differences",
                "[Vv]ersion",
            ),
            Cause(
                "ranks cannot reach each other",
                "set the interface: env: {NCCL_SOCKET_IFNAME: eth0, GLOO_SOCKET_IFNAME: eth0}",
                r"\breach\b",
            ),
            Cause("a certificate is wrong or missing", "set cluster.tls", "certificate|TLS"),
            Cause("the cluster is of another host", "run the command on the host that is named", "runs on "),
            Cause(
                "schedule check: no successful retraining in time",
                "does the schedule run (ddptrain schedule list, crontab -l, systemctl --user list-timers)?",
            ),
        ),
        "ddptrain doctor checks this machine, ddptrain doctor --cluster NAME all hosts of a cluster.",
    ),
    ExitCode.HANG: Explanation(
        "hang: no progress in time",
        "ddptrain: run train-20260612-080000-a1b2 failed: rank 1 on vm hung: no progress for 41 s, it is in "
        "train.py:13 in load while rank 0 waits for it in all_reduce (stacks: artifacts/stacks/)",
        (
            Cause(
                "the rank is in a line of your code: a lock, a download, an endless loop", "give requests a time limit"
            ),
            Cause(
                "nothing is wrong: a step takes longer than the limit",
                "failure.hang_timeout_s: 1800, or call ctx.progress",
            ),
            Cause(
                "the other ranks wait in all_reduce, which this one does not call: a condition or a number of steps "
                "that differs between ranks",
                "give every rank the same number of steps; decide together with ctx.mean",
            ),
            Cause(
                "the rank waits for data: too few loader workers, a file system that does not answer (NFS)",
                "check the mount; use ctx.loader",
            ),
            Cause(
                "all ranks are in NCCL: the network between the hosts",
                "env: {NCCL_DEBUG: INFO, NCCL_SOCKET_IFNAME: eth0}",
            ),
        ),
        "The rank that is named is the one that is missing. The stacks of all ranks are in artifacts/stacks/ "
        "of the run.\n"
        "By default the limit is 120 s. Once a rank has reported 20 times, it is 10 times the longest pause so far, "
        "at least 40 s and at most 600 s. failure.hang_timeout_s: null turns it off. With failure.max_restarts: 2 the "
        "ranks start again from the last checkpoint.",
    ),
    ExitCode.LOCKED: Explanation(
        "the run is running in another process, or another host has taken it over",
        "ddptrain: error: run nightly is held by process 29678 on vm; wait for it, or choose another --run-id",
        (
            Cause(
                "another shell or cron job runs it",
                "nothing: this start was not needed. ddptrain watch RUN shows it, ddptrain stop RUN ends it",
            ),
            Cause(
                "its driver on another host is silent",
                "wait: the lock ends by itself, in an object store within 3 minutes",
            ),
            Cause("retrain with overlap: wait, and the wait is over", "set a longer retrain.wait, or overlap: skip"),
        ),
        "The lock ends with its process. There is no lock file to delete.",
    ),
    ExitCode.REJECTED: Explanation(
        "retrain: trained, but the gate rejected the new version",
        "retrain petnames rejected: version 2 was rejected, version 1 stays the champion: ...",
        (
            Cause(
                "the new version is worse than the gate allows",
                "look at the data, at the gate, and at ddptrain models show MODEL; to use it anyway: ddptrain models "
                "promote MODEL VERSION",
            ),
        ),
        "The new version is kept, the old one stays in use.",
    ),
    ExitCode.DEADLINE: Explanation(
        "retrain: out of time",
        causes=(Cause("retrain.deadline is over", "set a longer deadline, or train for fewer epochs"),),
        remarks="The state is saved; the next start of ddptrain retrain continues.",
    ),
    ExitCode.PREEMPTED: Explanation(
        "preempted, and a checkpoint is saved",
        "run nightly stopped (saved) (exit code 75): ended by ddptrain stop; continue with --resume nightly",
        (
            Cause(
                "someone sent SIGTERM: Slurm, Kubernetes, a spot instance, ddptrain stop",
                "run the same command again with --resume RUN",
            ),
        ),
        "Nothing is lost. In a batch script: ddptrain train CONFIG --run-id nightly --resume auto, and submit "
        "the same script again on exit code 75.",
    ),
    ExitCode.HUNG_UP: replace(_INTERRUPTED, title="interrupted by SIGHUP: the terminal was closed"),
    ExitCode.INTERRUPTED: replace(_INTERRUPTED, title="interrupted by Ctrl-C"),
    ExitCode.QUIT: replace(_INTERRUPTED, title="interrupted by SIGQUIT"),
    ExitCode.TERMINATED: replace(_INTERRUPTED, title="ended by SIGTERM or ddptrain stop, without a new checkpoint"),
    KILLED: Explanation(
        "ddptrain itself was killed by SIGKILL",
        "Killed",
        (
            Cause("the kernel, because memory was short", "look at dmesg; use less memory on this host"),
            Cause("Slurm or Kubernetes, after its grace period", "make it longer than failure.grace_s"),
            Cause("kill -9", "use ddptrain stop"),
        ),
        "The ranks ended with it. --resume RUN continues from the last checkpoint.",
    ),
    BROKEN_PIPE: Explanation(
        "the reader of the output has closed it",
        causes=(Cause("the output went to head, or to a pager that was left", "nothing; or write it to a file"),),
    ),
}


def is_known(code: int) -> bool:
    """Return whether `code` is an exit code of ddptrain, or 128 plus the number of a signal."""
    return code in EXPLANATIONS or code - 128 in signal.valid_signals()


def explanation_of(code: int) -> Explanation:
    """Return what is known about an exit code. A code that ddptrain does not use has no causes."""
    known = EXPLANATIONS.get(code)
    if known is not None:
        return known
    if code - 128 in signal.valid_signals():
        return Explanation(f"ended by {signal.Signals(code - 128).name}", remarks="The shell adds 128 to a signal.")
    listed = ", ".join(str(int(code)) for code in EXPLANATIONS)
    return Explanation("not an exit code of ddptrain", remarks=f"Its exit codes: {listed}.")


def causes_of(code: int, root_cause: str) -> tuple[Cause, ...]:
    """Return the causes of an exit code that match the root cause of a run; if none matches, the most likely causes."""
    causes = explanation_of(code).causes
    return tuple(each for each in causes if each.sign and re.search(each.sign, root_cause)) or causes[:_MOST_CAUSES]


def cause_lines(causes: Iterable[Cause]) -> list[str]:
    """Return causes as lines, each with what to do."""
    return [line for each in causes for line in (f"  - {each.cause}", f"    -> {each.action}")]


def as_text(code: int, *, complete: bool = False) -> list[str]:
    """Return the lines that explain an exit code: the most likely causes, or all that is known."""
    explanation = explanation_of(code)
    shown = len(explanation.causes) if complete else _MOST_CAUSES
    more = len(explanation.causes) - shown
    lines = [f"exit code {code}: {explanation.title}"]
    if explanation.example:
        lines += ["", "what it looks like:", f"  {explanation.example}"]
    if explanation.causes:
        lines += ["", "causes, and what to do:" if more <= 0 else "most likely causes, and what to do:"]
        lines += cause_lines(explanation.causes[:shown])
    if remarks := explanation.remarks.splitlines():
        lines += ["", *(remarks if complete else remarks[:1])]
    if more > 0:
        others = f"{more} more cause{'s' if more > 1 else ''}"
        lines += ["", f"{others}: ddptrain explain {code} --all. The cause of a run: ddptrain explain RUN"]
    return lines

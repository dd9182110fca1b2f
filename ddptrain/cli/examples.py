"""Usage line and examples of `--help` of each command, and of the man page."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command_name
from typer.models import CommandInfo

# Command -> command lines, without `ddptrain` before them.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (
        "train petnames --ranks 2 --set params.epochs=3",
        "train train.yaml --cluster gpus --detach",
        "train train.yaml --resume auto",
        "train train.yaml --dry-run",
    ),
    "run": (
        "run --ranks 4 train.py --lr 0.1",
        "run --standalone --nproc-per-node 4 --max-restarts 3 train.py --lr 0.1",
        "run --cluster gpus -m package.train",
    ),
    "retrain": ("retrain nightly.yaml", 'retrain nightly.yaml --promote-anyway "new labels"'),
    "sweep": ("sweep petnames-sweep --set sweep.trials=16", "sweep sweep.yaml --resume"),
    "watch": ("watch latest", "watch s3://bucket/runs/petnames-20250101-120000-ab12"),
    "stop": ("stop latest", "stop latest --now"),
    "evaluate": ("evaluate latest", "evaluate pets@candidate --against pets@champion"),
    "generate": ("generate latest --count 3 --seed 1", "generate petnames@champion --prefix Mi"),
    "predict": ("predict latest photo.jpg", "predict pets@champion s3://bucket/new --top 3"),
    "doctor": ("doctor", "doctor --cluster lab"),
    "explain": ("explain 5", "explain latest"),
    "init": ("init demo", "init demo --workload images", "init --schema > ddptrain.schema.json"),
    "cluster up": ("cluster up --ranks 4", "cluster up --backend ssh --name lab --host a --host b"),
    "cluster status": ("cluster status", "cluster status lab"),
    "cluster logs": ("cluster logs lab --lines 50",),
    "cluster down": ("cluster down lab",),
    "results list": ("results list", 'results list --where "status == failed"', "results list --sweeps"),
    "results show": ("results show latest",),
    "results logs": ("results logs latest --follow", "results logs latest --rank 1 --lines 20"),
    "results compare": ("results compare pets-1 pets-2", "results compare latest --metric val/loss --plot loss.png"),
    "results edit": ('results edit latest +good -old --note "larger batches"',),
    "results export": (
        "results export latest --output metrics",
        "results export latest --format safetensors --output model",
    ),
    "results rm": ("results rm pets-1 pets-2",),
    "results prune": ("results prune --keep 20 --dry-run", "results prune --older-than 30d"),
    "results report": ("results report latest --output report.html",),
    "results sync": ("results sync latest", "results sync --all"),
    "models list": ("models list",),
    "models show": ("models show petnames", "models show petnames --history", "models show petnames@champion"),
    "models promote": ("models promote petnames 3", "models promote petnames latest"),
    "models rollback": ('models rollback petnames --reason "wrong labels"',),
    "models alias": ("models alias petnames@candidate 4",),
    "models rm": ("models rm petnames 2",),
    "models export": ("models export petnames@champion exported",),
    "notify test": ("notify test nightly.yaml",),
    "schedule add": ('schedule add nightly.yaml --at "0 3 * * 1" --as systemd',),
    "schedule list": ("schedule list",),
    "schedule remove": ("schedule remove petnames",),
    "schedule check": ("schedule check",),
}


class Command(TyperCommand):
    """A command whose usage line names a required argument as CONFIG, not {CONFIG}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


def command_name(info: CommandInfo) -> str:
    """Return the name of a command, which may be that of its function."""
    return info.name or get_command_name(getattr(info.callback, "__name__", ""))


def add_examples(app: typer.Typer, path: tuple[str, ...] = ()) -> None:
    """Show the examples at the end of each command's help, and required arguments without braces."""
    for command in app.registered_commands:
        command.cls = Command if command.cls in (None, TyperCommand) else command.cls
        name = command_name(command)
        lines = [f"  ddptrain {line}" for line in EXAMPLES.get(" ".join((*path, name)), ())]
        if lines:
            command.epilog = "\n".join(("\b", "Examples:", *lines))  # \b: the lines are not joined
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, (*path, group.name or ""))

"""`ddptrain run SCRIPT ARGS`: runs a torchrun script without a configuration file."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import CommandInfo

from ddptrain.cli import options as opt
from ddptrain.cli import torchrun
from ddptrain.cli.parser import Command
from ddptrain.cli.printing import say
from ddptrain.cli.train import TORCHRUN, reporting_of, start
from ddptrain.errors import UsageError

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig

_RANKS = "cluster.ranks"


class RunCommand(Command):
    """Takes the options of torchrun, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; the options of torchrun are in ctx.meta. Raises UsageError."""
        own = {
            name: "" if getattr(param, "is_flag", True) else param.metavar or "VALUE"
            for param in self.params
            for name in param.opts
        }
        ctx.meta[TORCHRUN], rest = torchrun.read(args, os.environ, own)
        return super().parse_args(ctx, rest)


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python file, or with -m a module.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments: all that follows it.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    ranks: opt.RanksOption = None,
    cluster: opt.ClusterOption = None,
    wait: opt.WaitOption = None,
    runs_dir: opt.RunsDirOption = None,
    run_id: opt.RunIdOption = None,
    overrides: Annotated[list[str] | None, opt.set_option("env.LEVEL=info")] = None,
    resume: opt.ResumeOption = None,
    allow_changes: opt.AllowChangesOption = False,
    dry_run: opt.DryRunOption = False,
    detach: opt.DetachOption = False,
    debug: opt.DebugOption = None,
    listen: opt.ListenOption = None,
    all_ranks: opt.AllRanksOption = False,
    verbose: opt.VerboseOption = False,
    output: opt.OutputOption = opt.OutputMode.AUTO,
    report: opt.ReportOption = None,
    ready: opt.ReadyOption = False,
) -> None:
    """Run an unmodified torchrun script: on this machine, or on a running cluster.

    All options of torchrun are taken, too, such as --nproc-per-node, --nnodes, --max-restarts and --standalone.

    Examples:
        ddptrain run --ranks 4 train.py --lr 0.1
        ddptrain run --standalone --nproc-per-node 4 --max-restarts 3 train.py --lr 0.1
        ddptrain run --cluster gpus -m package.train
    """
    given: torchrun.TorchrunOptions = ctx.meta[TORCHRUN]
    runs_dir = opt.PLACES.runs_dir = runs_dir or opt.PLACES.runs_dir
    own = args[1:] if args and args[0] == "--" else args or []
    with reporting_of(script, report) as reporting:
        is_module = module or given.on("--module")
        data = torchrun.program(script, own, given, module=is_module)
        if not is_module and script.lower().endswith((".yaml", ".yml")):  # Python would not run it
            raise UsageError(f"{script} is a configuration, not a script: ddptrain train {shlex.quote(script)}")
        resolved = _load(data, overrides or [], given, opt.field_options(ranks, cluster, runs_dir, wait))
        shown = given.shown()
        if ignored := given.ignored(ranks=ranks is not None, runs_dir=runs_dir is not None):
            say(f"options of torchrun that have no use here and are ignored: {', '.join(ignored)}")
        from ddptrain.driver.run import LaunchOptions

        launch = LaunchOptions(
            run_id, output.value, resume, allow_changes, opt.wants_full_traceback(), all_ranks, shown
        )
        launch = replace(launch, debug=opt.debug_rank(debug, listen, output, "--detach" if detach else ""))
        start(ctx, resolved, reporting, launch, ready=ready, dry_run=dry_run, detach=detach)


def _load(
    data: dict[str, Any], overrides: list[str], given: torchrun.TorchrunOptions, options: dict[str, str]
) -> ResolvedConfig:
    """Load the configuration. --set has precedence over PET_* variables, and an option over --set."""
    from ddptrain.config.load import load_mapping
    from ddptrain.config.workload_check import COMMAND_LINE

    def load(more: dict[str, str]) -> ResolvedConfig:
        of_mapping = partial(load_mapping, data, Path.cwd(), source=COMMAND_LINE)
        return opt.checked(lambda changes: of_mapping(overrides=changes), overrides, {**fields, **options, **more})

    own, changed = ({text.partition("=")[0] for text in texts} for texts in (options, overrides))
    fields = given.fields(own, changed)
    resolved = load({})
    if _RANKS in own and given.typed_ranks:
        raise UsageError(f"--ranks is the number of all ranks, and {given.typed_ranks} is given, too: leave one out")
    if _RANKS in own or (_RANKS in changed and not given.typed_ranks):
        return resolved
    ranks, notice = given.ranks(resolved.config.cluster)
    if notice:
        say(notice)
    return load(ranks) if ranks else resolved


# All arguments after the script belong to it, even if they look like our options.
COMMAND = CommandInfo("run", cls=RunCommand, callback=run, context_settings={"allow_interspersed_args": False})

"""`ddptrain run SCRIPT -- ARGS`: runs a torchrun script without a configuration file."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddptrain.cli import options as opt
from ddptrain.cli.examples import Command
from ddptrain.cli.train import reporting_of, start
from ddptrain.config.torchrun import REPLACEMENTS
from ddptrain.errors import UsageError

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig

# All arguments after the script belong to it, even if they look like our options.
SCRIPT_SETTINGS = {"allow_interspersed_args": False}


class RunCommand(Command):
    """Names the option of `ddptrain run` that takes the place of an option of torchrun."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError for an option of torchrun."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer has a copy of click's exceptions, which is private
            option = str(getattr(error, "option_name", ""))
            name = option.replace("_", "-")
            hint = REPLACEMENTS["--standalone"] if name.startswith("--rdzv-") else REPLACEMENTS.get(name)
            if hint is None:
                raise
            raise UsageError(f"{option} is an option of torchrun: {hint}") from None


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python file, or with -m a module.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments, after --.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    ranks: opt.RanksOption = None,
    cluster: opt.ClusterOption = None,
    runs_dir: opt.RunsDirOption = None,
    run_id: opt.RunIdOption = None,
    overrides: Annotated[list[str] | None, opt.set_option("failure.max_restarts=3")] = None,
    local_rank: Annotated[
        bool, typer.Option("--local-rank", help="Give the script --local-rank=N first, as torch.distributed.launch.")
    ] = False,
    resume: opt.ResumeOption = None,
    allow_changes: opt.AllowChangesOption = False,
    dry_run: opt.DryRunOption = False,
    detach: opt.DetachOption = False,
    full_traceback: opt.FullTracebackOption = False,
    all_ranks: opt.AllRanksOption = False,
    verbose: opt.VerboseOption = False,
    output: opt.OutputOption = opt.OutputMode.AUTO,
    report: opt.ReportOption = None,
    junit: opt.JunitOption = None,
    ready_fd: opt.ReadyFdOption = None,
) -> None:
    """Run an unmodified torchrun script on every GPU: on this machine, or on a running cluster."""
    given = args or []
    own = given[1:] if given[:1] == ["--"] else given
    workload = {"module" if module else "script": script, "args": own, "local_rank_arg": local_rank}
    with reporting_of(script, report, junit) as reporting:
        if not module and script.lower().endswith((".yaml", ".yml")):  # Python would not run it
            raise UsageError(f"{script} is a configuration, not a script: ddptrain train {shlex.quote(script)}")
        resolved = _load(workload, overrides or [], opt.field_options(ranks, cluster, runs_dir))
        from ddptrain.driver.run import LaunchOptions

        launch = LaunchOptions(run_id, output.value, resume, allow_changes, ready_fd, full_traceback, all_ranks)
        start(ctx, resolved, reporting, launch, dry_run=dry_run, detach=detach)


def _load(workload: dict[str, Any], overrides: list[str], options: dict[str, str]) -> ResolvedConfig:

    from ddptrain.config.load import COMMAND_LINE, load_mapping

    load = partial(load_mapping, {"workload": workload}, Path.cwd(), source=COMMAND_LINE)
    return opt.checked(lambda changes: load(overrides=changes), overrides, options)

"""`ddptrain run SCRIPT -- ARGS`: runs a torchrun script without a configuration file."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ddptrain.cli.options import (
    AllowChangesOption,
    AllRanksOption,
    ClusterOption,
    DetachOption,
    DryRunOption,
    FullTracebackOption,
    JunitOption,
    OutputMode,
    OutputOption,
    RanksOption,
    ReadyFdOption,
    ReportOption,
    ResumeOption,
    RunIdOption,
    RunsDirOption,
    VerboseOption,
    checked,
    field_options,
)
from ddptrain.cli.train import reporting_of, start
from ddptrain.config.torchrun import REPLACEMENTS
from ddptrain.errors import UsageError

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig

# All arguments after the script belong to it, even if they look like our options.
SCRIPT_SETTINGS = {"allow_interspersed_args": False}


class RunCommand(TyperCommand):
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
    ranks: RanksOption = None,
    cluster: ClusterOption = None,
    runs_dir: RunsDirOption = None,
    run_id: RunIdOption = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a field, as --set failure.max_restarts=3; repeatable."),
    ] = None,
    local_rank: Annotated[
        bool, typer.Option("--local-rank", help="Give the script --local-rank=N first, as torch.distributed.launch.")
    ] = False,
    resume: ResumeOption = None,
    allow_changes: AllowChangesOption = False,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    full_traceback: FullTracebackOption = False,
    all_ranks: AllRanksOption = False,
    verbose: VerboseOption = False,
    output: OutputOption = OutputMode.AUTO,
    report: ReportOption = None,
    junit: JunitOption = None,
    ready_fd: ReadyFdOption = None,
) -> None:
    """Run an unmodified torchrun script on every GPU: on this machine, or on a running cluster."""
    workload = {"module" if module else "script": script, "args": _own(args or []), "local_rank_arg": local_rank}
    with reporting_of(script, report, junit) as reporting:
        if not module:
            _refuse_configuration(script)
        start(
            ctx,
            _load(workload, overrides or [], field_options(ranks, cluster, runs_dir)),
            reporting,
            run_id=run_id,
            resume=resume,
            allow_changes=allow_changes,
            dry_run=dry_run,
            detach=detach,
            full_traceback=full_traceback,
            all_ranks=all_ranks,
            output=output,
            ready_fd=ready_fd,
        )


def _refuse_configuration(script: str) -> None:
    """Raise UsageError for a YAML file, which Python would not run."""
    import shlex

    if script.lower().endswith((".yaml", ".yml")):
        raise UsageError(f"{script} is a configuration, not a script: ddptrain train {shlex.quote(script)}")


def _own(args: list[str]) -> list[str]:
    """The arguments of the script, without the -- before them."""
    return args[1:] if args[:1] == ["--"] else args


def _load(workload: dict[str, Any], overrides: list[str], options: dict[str, str]) -> ResolvedConfig:
    from pathlib import Path

    from ddptrain.config.load import load_mapping

    load = partial(load_mapping, {"workload": workload}, Path.cwd(), source="ddptrain run")
    return checked(lambda changes: load(overrides=changes), overrides, options)

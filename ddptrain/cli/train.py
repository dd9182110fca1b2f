"""`ddptrain train CONFIG`: run a configuration."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli import options as opt
from ddptrain.cli.printing import print_json, say, write
from ddptrain.errors import UsageError

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig
    from ddptrain.driver.observers import RunObserver
    from ddptrain.driver.run import LaunchOptions
    from ddptrain.reports.destinations import Reporting

TORCHRUN = "ddptrain.torchrun"  # the key of torchrun's options in the context of `ddptrain run`


def train(
    ctx: typer.Context,
    config: opt.Config,
    overrides: Annotated[list[str] | None, opt.set_option("params.epochs=3")] = None,
    ranks: opt.RanksOption = None,
    cluster: opt.ClusterOption = None,
    wait: opt.WaitOption = None,
    run_id: opt.RunIdOption = None,
    resume: opt.ResumeOption = None,
    allow_changes: opt.AllowChangesOption = False,
    dry_run: opt.DryRunOption = False,
    detach: opt.DetachOption = False,
    submit: opt.SubmitOption = False,
    debug: opt.DebugOption = None,
    listen: opt.ListenOption = None,
    all_ranks: opt.AllRanksOption = False,
    output: opt.OutputOption = opt.OutputMode.AUTO,
    report: opt.ReportOption = None,
    ready: opt.ReadyOption = False,
    ordered: Annotated[bool, typer.Option("--ordered", hidden=True)] = False,
) -> None:
    """Train what a YAML file describes: on this machine, on a running cluster, or on one started for the run.

    Examples:
        ddptrain train petnames --ranks 2 --set params.epochs=3
        ddptrain train train.yaml --cluster gpus --detach
        ddptrain train train.yaml --resume auto
        ddptrain train train.yaml --dry-run
    """
    options = opt.field_options(ranks, cluster, opt.PLACES.runs_dir, wait)
    with reporting_of(config, report) as reporting:
        resolved = _ordered(config, options) if ordered else _load(config, overrides or [], options)
        from ddptrain.driver.run import LaunchOptions

        launch = LaunchOptions(run_id, output.value, resume, allow_changes, opt.wants_full_traceback(), all_ranks)
        unfit = "--detach" if detach else "--submit" if submit else ""
        launch = replace(launch, debug=opt.debug_rank(debug, listen, output, unfit))
        start(ctx, resolved, reporting, launch, ready=ready, dry_run=dry_run, detach=detach, submit=submit)


def reporting_of(source: str, files: Sequence[str] | None) -> Reporting:
    """Return what reports the end of the command, to the files and to CI; `source`: a configuration or a script.

    Raises UsageError if a file cannot be written.
    """
    from ddptrain.reports.destinations import Destinations, Reporting

    return Reporting(PurePath(source).stem, Destinations.chosen(files or ()))


def start(
    ctx: typer.Context,
    resolved: ResolvedConfig,
    reporting: Reporting,
    options: LaunchOptions,
    *,
    ready: bool,
    dry_run: bool,
    detach: bool,
    submit: bool = False,
) -> None:
    """Run a configuration for `train` and `run`. Raises typer.Exit with the exit code.

    ready: of a detached driver, which reports on stdout that the run has begun.
    """
    reporting.name, reporting.secrets = resolved.config.name, resolved.secrets
    if dry_run:
        from ddptrain.config.workload_check import check_workload
        from ddptrain.driver.cluster_session import check_cluster
        from ddptrain.driver.transfer.environment import environment_of

        check_workload(resolved)
        environment_of(resolved)
        start = check_cluster(resolved.config.cluster, say)
        write([f"# ok: would start {start}; fields that differ from their defaults:", *resolved.changes.splitlines()])
        reporting.checked()
        return
    from ddptrain.driver.run import train as launch

    if options.resume not in (None, "auto") and options.run_id is not None:
        raise UsageError(
            "--resume RUN continues a run that has its id: leave --run-id out, or give --resume auto, which starts "
            "the run with that id or continues it"
        )
    if submit and detach:
        raise UsageError("--submit and --detach: a job ends with its command; leave one of them out")
    if submit:
        raise typer.Exit(_submitted(ctx, resolved, options))
    if detach:
        raise typer.Exit(_detached(ctx, resolved.config.results.dir, as_json=options.output == "json"))
    observers: list[RunObserver] = [reporting]
    if ready:
        from ddptrain.driver.control.detach import ReportBegun

        observers.insert(0, ReportBegun())
    if urls := resolved.config.notify.urls:
        from ddptrain.notify.run_messages import RunMessages
        from ddptrain.notify.sender import missing_variables

        for problem in missing_variables(urls):
            say(f"warning: notify.urls: {problem}")
        observers.append(RunMessages(resolved, tells_end=True))
    raise typer.Exit(launch(resolved, replace(options, observers=observers)))


def _detached(ctx: typer.Context, runs_dir: str, *, as_json: bool) -> int:
    """Start the same command as a detached process; print its run id, and how to follow and stop it."""
    from ddptrain.driver.control.detach import EndedEarly, start_detached

    command = str(ctx.command.name)
    typed = _typed(ctx, leave_out={"detach", "output", "verbose", "runs_dir"})
    place = [] if opt.PLACES.runs_dir is None else ["--runs-dir", opt.PLACES.runs_dir]
    begun = start_detached([command, "--output", "plain", *place, *typed])
    if isinstance(begun, EndedEarly):
        say(begun.output.rstrip("\n"), raw=True)
        return begun.exit_code
    if as_json:
        print_json({"event": "run_detached", **dataclasses.asdict(begun)}, indent=None)
        return 0
    run = begun.run_id if runs_dir == "runs" else shlex.quote(begun.run_dir)
    lines = [
        f"run {begun.run_id} in {begun.run_dir} continues without this shell: process {begun.pid} on {begun.host}",
        *([begun.reason] if begun.reason else []),
        f"follow it with ddptrain watch {run}, stop it with ddptrain stop {run}",
    ]
    for line in [begun.reason] if begun.done else lines:
        say(line)
    write([begun.run_id])
    return 0


def _submitted(ctx: typer.Context, resolved: ResolvedConfig, options: LaunchOptions) -> int:
    """Send the same command to the queue of a batch system, for a run that is listed from now on."""
    from ddptrain.driver.submit import submit

    typed = _typed(ctx, leave_out={"submit", "output", "verbose", "runs_dir", "run_id", "resume"})
    run, reason = submit(
        resolved, [str(ctx.command.name), *typed], options.run_id, options.resume, options.allow_changes
    )
    job = run.record.jobs[-1].description if run.goes_on else ""
    if options.output == "json":
        print_json({"event": "run_submitted", "run_id": run.run_id, "run_dir": run.where, "job": job}, indent=None)
        return 0
    name = run.run_id if resolved.config.results.dir == "runs" else shlex.quote(run.where)
    following = f"follow it with ddptrain watch {name}, stop it with ddptrain stop {name}"
    for line in filter(None, (reason, job and f"run {run.run_id} is queued as {job}; {following}")):
        say(line)
    write([run.run_id])
    return 0


def _typed(ctx: typer.Context, leave_out: Container[str]) -> list[str]:
    """Return the options and arguments of this command as they were typed, except `leave_out`."""
    options = list(ctx.meta[TORCHRUN].words) if TORCHRUN in ctx.meta else []
    arguments: list[str] = []
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        if param.name in leave_out or source is None or source.name != "COMMANDLINE":
            continue
        value = ctx.params[param.name or ""]
        values = value if isinstance(value, list | tuple) else [value]
        if param.param_type_name == "argument":
            arguments += map(str, values)
        elif isinstance(value, bool):
            options.append(param.opts[0])
        else:
            options += [word for item in values for word in (param.opts[0], str(item))]
    return [*options, "--", *arguments]


def _load(config: str, overrides: list[str], options: dict[str, str]) -> ResolvedConfig:
    """Load the configuration and apply the options; errors name the option as it was typed."""
    from ddptrain.config.load import load_config

    return opt.checked(partial(load_config, opt.local_config(config)), overrides, options)


def _ordered(config: str, options: dict[str, str]) -> ResolvedConfig:
    """Load the configuration that ddptrain.launch sent by stdin, so that the command line shows no secrets."""
    from ddptrain.config.load import load_config, load_mapping
    from ddptrain.driver.control.detach import read_launch_request

    order = read_launch_request()
    if order.config is None:
        return opt.checked(partial(load_config, config), order.overrides, options)
    return opt.checked(partial(load_mapping, order.config, Path(order.folder)), order.overrides, options)

"""`ddptrain train CONFIG`: run a configuration."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Output(StrEnum):
    """How `train` shows what happens."""

    AUTO = "auto"
    LIVE = "live"
    PLAIN = "plain"
    JSON = "json"


def train(
    config: Annotated[str, typer.Argument(help="YAML file, or the name of an example that comes along (petnames).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a field, as --set params.epochs=3; repeatable."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Training processes (cluster.ranks).")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Scheduler of a Dask cluster that is up, as tcp://host:8786.")
    ] = None,
    runs_dir: Annotated[Path | None, typer.Option(help="Folder for run directories (results.dir).")] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run directory; by default one is made.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print what would run, start nothing.")
    ] = False,
    output: Annotated[Output, typer.Option(help="auto is live on a terminal and plain lines elsewhere.")] = Output.AUTO,
) -> None:
    """Train what a YAML file describes, on a local cluster or one that is up."""
    from ddptrain.configfile import dump_config, load_config

    loaded = load_config(config, [*(overrides or ()), *_options(ranks, cluster, runs_dir)])
    if dry_run:
        typer.echo(dump_config(loaded.config), nl=False)
        return
    from ddptrain.driver.launch import LaunchOptions
    from ddptrain.driver.launch import train as launch

    raise typer.Exit(launch(loaded, LaunchOptions(run_id=run_id, output=output.value)))


def _options(ranks: int | None, cluster: str | None, runs_dir: Path | None) -> list[str]:
    """Options that stand for configuration fields, as --set texts: they are checked the same way."""
    import json

    fields: dict[str, object] = {}
    if ranks is not None:
        fields["cluster.ranks"] = ranks
    if cluster is not None:
        fields |= {"cluster.backend": "address", "cluster.address": cluster}
    if runs_dir is not None:
        fields["results.dir"] = str(runs_dir)
    return [f"{key}={json.dumps(value)}" for key, value in fields.items()]

"""`ddptrain models`: the registry of trained models, their versions, aliases and history."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import PLACES, JsonOption
from ddptrain.cli.printing import print_json, print_result, say, write
from ddptrain.errors import UsageError
from ddptrain.model_registry.reference import ModelReference, check_model_name, parse_reference
from ddptrain.text_tables import clean_table, plain_sections

if TYPE_CHECKING:
    from ddptrain.model_registry.records import Change, VersionRecord
    from ddptrain.model_registry.registry import ModelRegistry

app = typer.Typer(help="Versions of trained models: list, promote, roll back.", no_args_is_help=False)

_NO_METRICS = "-"

Reason = Annotated[str, typer.Option("--reason", help="A text for the history.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=complete.models,
        help="A model's name.",
    ),
]
Reference = Annotated[
    str,
    typer.Argument(
        metavar="MODEL[@ALIAS|@VERSION]",
        autocompletion=complete.models,
        help="A version of a model; without @ its champion.",
    ),
]


@app.callback(invoke_without_command=True)
def models(ctx: typer.Context, json: JsonOption = False) -> None:
    """Versions of trained models: list, promote, roll back."""
    if ctx.invoked_subcommand is None:
        list_(json)


@app.command("list")
def list_(json: JsonOption = False) -> None:
    """List the models with their champions.

    Examples:
        ddptrain models list
    """
    registry = _registry()
    table = [("MODEL", "CHAMPION", "CREATED (UTC)", "METRICS", "OTHER ALIASES")]
    data: list[dict[str, Any]] = []
    for model in registry.models():
        state = registry.state(model)
        number = state.version_of("champion")
        champion = None if number is None else registry.version(model, number)
        created, metrics = (_time(champion.created_at), _metrics(champion)) if champion else ("-", _NO_METRICS)
        others = [f"{alias} {version}" for alias, version in sorted(state.aliases.items()) if alias != "champion"]
        table.append((model, str(number or "-"), created, metrics, ", ".join(others)))
        known = {"model": model, "aliases": dict(state.aliases)}
        data.append({**known, "champion": champion.as_dict() if champion else None})
    if data or json:
        print_result(data, [clean_table(table)], as_json=json)
    else:
        say(f"no models in {registry.where}; ddptrain models promote MODEL RUN adds one")


@app.command()
def show(
    model: Reference,
    history: Annotated[bool, typer.Option("--history", help="Show every change of the model, oldest first.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a version, or with a model's name alone all versions of it.

    Examples:
        ddptrain models show petnames
        ddptrain models show petnames --history
        ddptrain models show petnames@champion
    """
    registry = _registry()
    reference = parse_reference(model)
    if history:
        _show_history(registry, reference, as_json=json)
        return
    state = registry.state(reference.model)
    if "@" not in model:
        if not state.number:
            registry.resolve(reference)  # raises the error with the names that exist
        records, rejected = registry.versions(reference.model), registry.rejections(reference.model)
        header = ("VERSION", "ALIASES", "CREATED (UTC)", "RUN", "STEP", "METRICS", "REJECTED")
        table = clean_table([header, *((*_row(each, state), rejected.get(each.version, "-")) for each in records)])
        print_result([_as_dict(record, state, rejected) for record in records], [table], as_json=json)
        return
    record = registry.resolve(reference)
    rejected = registry.rejections(reference.model)
    where = f"{registry.where}/{record.model}/versions/{record.version}"
    about = [
        ("aliases", ", ".join(state.aliases_of(record.version))),
        ("rejected", rejected.get(record.version, "")),
        ("created", _time(record.created_at)),
        ("run", record.run_id),
        ("workload", record.workload),
        ("step", str(record.step)),
        ("epoch", "" if record.epoch is None else f"{record.epoch:g}"),
        ("metrics", _metrics(record)),
        ("parent", "" if record.parent is None else str(record.parent)),
        ("code", record.code),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items()))),
        ("directory", where),
    ]
    files = [(file.path, f"{file.size_bytes:,} bytes, SHA-256 {file.sha256[:16]}...") for file in record.files]
    title = f"model {record.model}, version {record.version}"
    text = plain_sections([(title, [(name, value) for name, value in about if value]), ("files", files)])
    print_result({**_as_dict(record, state, rejected), "url": where}, [text], as_json=json)


def _show_history(registry: ModelRegistry, reference: ModelReference, *, as_json: bool) -> None:
    changes = registry.history(reference.model)
    if not changes:
        registry.resolve(reference)  # raises the error with the names that exist
    table = [("TIME (UTC)", "ACTION", "VERSION", "CHAMPION", "BY", "REASON")]
    for change in changes:
        champion, user = str(change.aliases.get("champion", "-")), f"{change.user} on {change.host}"
        action = f"{change.action} {change.alias}".strip()
        table.append((_time(change.time), action, str(change.version), champion, user, change.reason))
    print_result([change.as_dict() for change in changes], [clean_table(table)], as_json=as_json)


@app.command()
def promote(
    model: Model,
    version: Annotated[
        str,
        typer.Argument(metavar="VERSION|RUN", help="A version's number, or a run: its id, latest, directory, or URL."),
    ],
    checkpoint: Annotated[str, typer.Option(help="Of a run: best, latest, or a name such as step-100.")] = "best",
    reason: Reason = "",
    json: JsonOption = False,
) -> None:
    """Make a version the champion. A run becomes a new version first. The old champion becomes `previous`.

    Examples:
        ddptrain models promote petnames 3
        ddptrain models promote petnames latest
    """
    check_model_name(model)
    registry = _registry()
    if version.isdecimal():
        number = int(version)
    else:
        from ddptrain.model_registry.add_run import add_run
        from ddptrain.results.runs import open_runs_dir, split_run

        place, name = split_run(version, PLACES.runs)
        view = open_runs_dir(place).find(name)
        number = add_run(registry, model, view, checkpoint).version
    change = registry.promote(model, number, reason)
    _report(registry, model, change, f"version {number} of {model} is the champion already", as_json=json)


@app.command(short_help="Make the previous champion the champion again.")
def rollback(
    model: Model,
    reason: Reason = "",
    json: JsonOption = False,
) -> None:
    """Make the previous champion the champion again, after a check of all its files; again: the one before it.

    Examples:
        ddptrain models rollback petnames --reason "wrong labels"
    """
    registry = _registry()
    change = registry.rollback(model, reason)
    _report(registry, model, change, "", as_json=json)


@app.command()
def alias(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL@ALIAS",
            autocompletion=complete.models,
            help="The alias, as petnames@staging.",
        ),
    ],
    version: Annotated[int | None, typer.Argument(metavar="VERSION", min=1, help="The version's number.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the alias.")] = False,
    reason: Reason = "",
    json: JsonOption = False,
) -> None:
    """Point an alias of your own to a version, or remove it.

    Examples:
        ddptrain models alias petnames@candidate 4
    """
    if (version is None) != delete:
        raise UsageError("give a version, or --delete")
    reference = parse_reference(name)
    if not reference.alias or "@" not in name:
        raise UsageError(f"{name} contains no alias: write MODEL@ALIAS")
    registry = _registry()
    change = registry.set_alias(reference.model, reference.alias, version, reason)
    unchanged = f"{name} is version {version} already" if version else f"there is no alias {name}"
    _report(registry, reference.model, change, unchanged, as_json=json)


@app.command("rm")
def remove(
    model: Model,
    version: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="The version's number.")],
    reason: Reason = "",
    json: JsonOption = False,
) -> None:
    """Delete a version that has no alias.

    Examples:
        ddptrain models rm petnames 2
    """
    registry = _registry()
    _report(registry, model, registry.remove(model, version, reason), "", as_json=json)


@app.command()
def export(
    model: Reference,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder for the exported model.")],
    json: JsonOption = False,
) -> None:
    """Write the weights of a version into a new folder.

    They work without ddptrain. All files of the version are compared with their hashes.

    Examples:
        ddptrain models export petnames@champion exported
    """
    from ddptrain.model_registry.registry import open_version

    registry = _registry()
    record = registry.resolve(parse_reference(model))
    run_dir = open_version(registry, record)

    from ddptrain.workloads.export import export_model

    source = {"model": record.model, "version": record.version, "run_id": record.run_id, "step": record.step}
    target = Path(folder).expanduser().absolute()
    files = export_model(run_dir, record.workload, target, source)
    data = {**source, "folder": str(target), "files": files}
    text = f"{record.model}: version {record.version} exported to {target}: {', '.join(files)}"
    print_result(data, [text], as_json=json)


def _registry() -> ModelRegistry:
    from ddptrain.model_registry.registry import ModelRegistry

    return ModelRegistry.open(PLACES.models)


def _report(registry: ModelRegistry, model: str, change: Change | None, unchanged: str, *, as_json: bool) -> None:
    if as_json:
        aliases = dict(registry.state(model).aliases)
        print_json({"change": change.as_dict() if change else None, "aliases": aliases})
    elif change is None:
        write([unchanged])
    else:
        shown = ", ".join(f"{alias} {version}" for alias, version in sorted(change.aliases.items())) or "none"
        what = f"{change.action} {change.alias}".strip()
        write([f"{model}: version {change.version} {what}; aliases: {shown}"])


def _row(record: VersionRecord, state: Change) -> tuple[str, ...]:
    aliases = ", ".join(state.aliases_of(record.version))
    version, created = str(record.version), _time(record.created_at)
    return version, aliases or "-", created, record.run_id, str(record.step), _metrics(record)


def _metrics(record: VersionRecord) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(record.metrics.items())) or _NO_METRICS


def _time(text: str) -> str:
    return text[:19].replace("T", " ")


def _as_dict(record: VersionRecord, state: Change, rejected: Mapping[int, str]) -> dict[str, Any]:
    number = record.version
    about = {"aliases": state.aliases_of(number), "rejected": rejected.get(number)}
    return {**record.as_dict(), **about}

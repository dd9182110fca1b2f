"""`ddptrain evaluate`: scores a run or a model, alone or against another one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddptrain.cli import complete
from ddptrain.cli.models.models import RunOrModel, open_trained
from ddptrain.cli.options import (
    ClusterOption,
    JsonOption,
    RanksOption,
    checked,
    field_options,
    set_option,
)
from ddptrain.cli.printing import print_result, say
from ddptrain.errors import UsageError
from ddptrain.redact import LEFT_OUT, hide_credentials
from ddptrain.text_tables import clean_line, plain_table

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig
    from ddptrain.retrain.evaluation import Evaluation, EvaluationTarget

_NO_SCORE = "-"


def evaluate(
    run: RunOrModel,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|MODEL",
            autocompletion=complete.runs_or_models,
            help="Score this one as well, on the same data: a run, or a model.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Score on these data: a list of names, a folder or URL of images; a function gets it as "
            "checkpoint.data.  [default: the held-out data of RUN]",
        ),
    ] = None,
    overrides: Annotated[list[str] | None, set_option("params.batch_size=64")] = None,
    ranks: RanksOption = None,
    cluster: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score the best checkpoint of a run, or a model, on the data that its training held out."""
    from ddptrain.retrain.evaluation import evaluate as score

    first = _target(run)
    targets = [first, *([_target(against)] if against is not None else [])]
    resolved = _configuration(first.folder, overrides or [], field_options(ranks, cluster))
    found = score(resolved, targets, output="plain", data=data, to_stderr=True)
    for note in found.notes:
        say(f"evaluate: {note}")
    print_result(_as_dict(found, data), _table(found, [target.name for target in targets]), as_json=as_json)


def _target(source: str) -> EvaluationTarget:
    """Return the run or model of that name. Raises UsageError."""
    from ddptrain.retrain.evaluation import EvaluationTarget

    folder, about = open_trained(source)
    name = f"{about['model']}@{about['version']}" if "model" in about else str(about["run_id"])
    return EvaluationTarget(name, folder)


def _configuration(folder: Path, overrides: list[str], options: dict[str, str]) -> ResolvedConfig:
    """Return the configuration of a run or version, from its config.yaml, without the secrets. Raises ConfigError."""
    from ddptrain.config.load import load_data, load_mapping
    from ddptrain.file_ops import read_regular
    from ddptrain.results.recorded_config import is_own_record, of_the_model

    path = folder / "config.yaml"
    try:
        recorded = load_data(read_regular(path), str(path))
    except OSError as error:
        raise UsageError(f"can't read the configuration {path}: {error.strerror}") from error
    if not isinstance(recorded, dict):
        raise UsageError(f"{path} is not a configuration of a run")
    kept, secret = _without_secrets(recorded)
    if not is_own_record(path):
        kept = of_the_model(kept)
        say(
            f"evaluate: {path} is of a store or another user: its cluster, env, evaluate and options of stores are not "
            "used; give your own with --cluster and --set"
        )
    if secret:
        say(
            f"evaluate: {path} does not contain the secrets {', '.join(secret)}: if they are needed, give them in the "
            "environment or with --set"
        )
    return checked(partial(load_mapping, kept, Path.cwd(), source=str(path)), overrides, options)


def _without_secrets(data: dict[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return the data without the values that were left out of config.yaml, and the keys of these values."""
    kept: dict[str, Any] = {}
    secret: list[str] = []
    for key, value in data.items():
        if isinstance(value, dict):
            kept[key], below = _without_secrets(value, f"{prefix}{key}.")
            secret += below
        elif isinstance(value, str) and LEFT_OUT in value:
            secret.append(f"{prefix}{key}")
        else:
            kept[key] = value
    return kept, secret


def _table(found: Evaluation, names: list[str]) -> list[str]:

    metrics = sorted({metric for scores in found.scores.values() for metric in scores})
    rows = [(metric, *(_figure(found.scores.get(name, {}).get(metric)) for name in names)) for metric in metrics]
    cells = [tuple(clean_line(cell) for cell in row) for row in [("METRIC", *names), *rows]]
    data = f"on {found.n:,} {found.noun}, SHA-256 {found.held_out[:16]}..." if found.held_out else ""
    return [plain_table(cells), *([data] if data else [])]


def _figure(value: float | None) -> str:
    return _NO_SCORE if value is None else f"{value:.6g}"


def _as_dict(found: Evaluation, data: str | None) -> dict[str, Any]:

    return {
        "scores": {name: dict(scores) for name, scores in found.scores.items()},
        "failures": dict(found.failures),
        "held_out": {"sha256": found.held_out or None, "n": found.n},
        "data": None if data is None else hide_credentials(data),
        "notes": list(found.notes),
    }

"""`ddptrain evaluate`, `predict` and `generate`: what uses the checkpoint of a trained run, or a model."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddptrain.cli import complete
from ddptrain.cli import options as opt
from ddptrain.cli.printing import print_result, say, write
from ddptrain.config.wording import counted
from ddptrain.errors import RunNotFound, UsageError
from ddptrain.model_registry.reference import is_model_reference, parse_reference
from ddptrain.redact import LEFT_OUT, hide_credentials
from ddptrain.text_tables import clean, clean_line, plain_table

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig
    from ddptrain.retrain.evaluation import Evaluation, EvaluationTarget
    from ddptrain.workloads.images.predict import ImageResult

_NO_SCORE = "-"
_SOME_FAILED = 1
_WIDEST_NAME = 40


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def evaluate(
    run: opt.RunOrModel,
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
    overrides: Annotated[list[str] | None, opt.set_option("params.batch_size=64")] = None,
    ranks: opt.RanksOption = None,
    cluster: opt.ClusterOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Score the best checkpoint of a run, or a model, on the data that its training held out.

    Examples:
        ddptrain evaluate latest
        ddptrain evaluate pets@candidate --against pets@champion
    """
    from ddptrain.retrain.evaluation import evaluate as score

    first = _target(run)
    targets = [first, *([_target(against)] if against is not None else [])]
    resolved = _configuration(first.folder, overrides or [], opt.field_options(ranks, cluster))
    found = score(resolved, targets, output="plain", data=data, to_stderr=True)
    for note in found.notes:
        say(note)
    print_result(_as_dict(found, data), _table(found, [target.name for target in targets]), as_json=as_json)


def _target(source: str) -> EvaluationTarget:
    """Return the run or model of that name. Raises UsageError."""
    from ddptrain.retrain.evaluation import EvaluationTarget

    folder, about = open_trained(source)
    name = f"{about['model']}@{about['version']}" if "model" in about else str(about["run_id"])
    return EvaluationTarget(name, folder)


def _configuration(folder: Path, overrides: list[str], options: dict[str, str]) -> ResolvedConfig:
    """Return the configuration of a run or version, from its config.yaml, without the secrets. Raises ConfigError."""
    from ddptrain.config.load import load_data, load_mapping, without_unknown
    from ddptrain.file_ops import read_regular
    from ddptrain.results.recorded_config import is_own_record, of_the_model

    path = folder / "config.yaml"
    try:
        recorded = load_data(read_regular(path), str(path))
    except OSError as error:
        raise UsageError(f"can't read the configuration {path}: {error.strerror}") from error
    if not isinstance(recorded, dict):
        raise UsageError(f"{path} is not a configuration of a run")
    kept, secret = _without_secrets(without_unknown(recorded))
    kept.pop("notify", None)  # an evaluation sends nothing
    if not is_own_record(path):
        kept = of_the_model(kept)
        say(
            f"{path} is of a store or another user: its cluster, env, evaluate and options of stores are not "
            "used; give your own with --cluster and --set"
        )
    if secret:
        say(
            f"{path} does not contain the secrets {', '.join(secret)}: if they are needed, give them in the "
            "environment or with --set"
        )
    return opt.checked(partial(load_mapping, kept, Path.cwd(), source=str(path)), overrides, options)


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


def predict(
    run: opt.RunOrModel,
    images: Annotated[list[str], typer.Argument(metavar="PATH", help="Images, and folders of any layout.")],
    top: Annotated[
        int, typer.Option(min=1, help="Number of classes to print for each image, the most probable first.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with a line for each image.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with a line for each image.")] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=65536, help="Images in a batch. Default: 128 on a GPU, else 16.")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto is a GPU where there is one.")] = Device.AUTO,
) -> int:
    """Classify images with the best checkpoint of an image run.

    Files that can't be read are reported, the others are classified; the exit code is then 1.

    Examples:
        ddptrain predict latest photo.jpg
        ddptrain predict pets@champion s3://bucket/new --top 3
    """
    from ddptrain.workloads.images.listing import find_images

    if as_json and as_csv:
        raise UsageError("give --json or --csv, not both")
    run_dir, source = open_trained(run, "images")
    given = find_images(images)  # before torch is imported: most mistakes are in the paths

    from ddptrain.workloads.images.model import load_model
    from ddptrain.workloads.images.predict import Classifier, choose_device, default_batch_size

    where = choose_device(device)
    saved = load_model(run_dir)
    count: Counter[bool] = Counter()
    results = _counted(Classifier(saved, top, where).results(given, batch_size or default_batch_size(where)), count)
    if as_json:
        write(_json({**source, "checkpoint": saved.checkpoint}, results))
    elif as_csv:
        write(_csv(results, min(top, len(saved.names))))
    else:
        write(_text(results, max(map(len, saved.names))))
    if count[True]:
        say(f"{count[True]:,} of {count.total():,} could not be classified")
    return _SOME_FAILED if count[True] else 0


def _counted(results: Iterable[ImageResult], count: Counter[bool]) -> Iterator[ImageResult]:
    """Yield the results, and count by whether they are errors."""
    for result in results:
        count[bool(result.error)] += 1
        yield result


def _json(head: dict[str, str], results: Iterable[ImageResult]) -> Iterator[str]:
    """Yield one JSON object line by line, so that not all results are in memory."""
    yield json.dumps(head).removesuffix("}") + ', "results": ['
    pending = ""
    for result in results:
        if pending:
            yield f"{pending},"
        found = [{"class": one.name, "probability": one.probability} for one in result.predictions]
        what = {"error": result.error} if result.error else {"predictions": found}
        pending = json.dumps({"file": result.file, **what})
    yield f"{pending}]}}"


def _csv(results: Iterable[ImageResult], top: int) -> Iterator[str]:
    import csv
    import io

    columns = [name for place in range(1, top + 1) for name in _columns(place)]

    def line(cells: Iterable[object]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)  # other terminators leave line breaks unquoted
        return text.getvalue().removesuffix("\n")

    yield line(["file", *columns, "error"])
    for result in results:
        found = [cell for one in result.predictions for cell in (one.name, f"{one.probability:.6g}")]
        yield line([result.file, *(found or [""] * len(columns)), result.error])


def _columns(place: int) -> tuple[str, str]:
    return ("class", "probability") if place == 1 else (f"class_{place}", f"probability_{place}")


def _text(results: Iterable[ImageResult], width: int) -> Iterator[str]:
    """Yield one line with file and best class, then one for each other class; errors go to stderr."""
    width = min(width, _WIDEST_NAME)
    for result in results:
        if result.error:
            say(f"{clean_line(result.file)}: {clean(result.error)}")
        for place, one in enumerate(result.predictions):
            cells = f"{100 * one.probability:5.1f} %  {clean_line(one.name):{width}}"
            yield f"{cells}    {clean_line(result.file)}" if place == 0 else f"  {cells}".rstrip()


def generate(
    run: opt.RunOrModel,
    count: Annotated[int, typer.Option(help="Number of names to generate.")] = 50,
    prefix: Annotated[str, typer.Option(help="Text that each name begins with.")] = "",
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature: below 1 more usual names, above 1 more unusual ones.")
    ] = 0.8,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same names.", min=0)] = None,
    keep_known: Annotated[bool, typer.Option("--keep-known", help="Keep names that are in the training list.")] = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Make new pet names with a trained run, one per line; none of them is in the run's own list.

    Examples:
        ddptrain generate latest --count 3 --seed 1
        ddptrain generate petnames@champion --prefix Mi
    """
    from ddptrain.workloads.petnames.generate import generate_names

    run_dir, source = open_trained(run, "petnames")
    made = generate_names(run_dir, count, prefix, temperature, seed, keep_known)
    print_result({**source, **dataclasses.asdict(made)}, made.names, as_json=as_json, indent=None)
    dropped, were = made.dropped_known, "was" if made.dropped_known == 1 else "were"
    remarks = [
        f"the seed was {made.seed}" if seed is None else "",
        f"{counted(dropped, 'name')} of the training list {were} replaced" if dropped else "",
        f"only {len(made.names):,} of {count:,} names: gave up after {made.attempts:,} attempts; "
        "try a higher --temperature, a shorter --prefix, or --keep-known"
        if made.limit_reached
        else "",
    ]
    for remark in filter(None, remarks):
        say(remark)


def open_trained(source: str, workload: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a run, or of a verified version of a model, and what names it in JSON output.

    source: RUN, MODEL@ALIAS, or if there is no such run MODEL. workload: `latest` is then the newest run of this
    workload that has a checkpoint; a line on stderr names it if it is not the newest of all. Raises DdptrainError.
    """
    from ddptrain.results.layout import LATEST

    try:
        return _open_run_or_version(source, workload)
    except RunNotFound as error:
        if is_model_reference(source) or "/" in source or source == LATEST:
            raise
        try:
            return _open_run_or_version(f"{source}@champion", workload)
        except UsageError:
            raise RunNotFound(f"{error}; there is no model of that name either") from None


def _open_run_or_version(source: str, workload: str | None) -> tuple[Path, dict[str, Any]]:
    if is_model_reference(source):
        from ddptrain.model_registry.registry import ModelRegistry, open_version

        registry = ModelRegistry.open(opt.PLACES.models)
        record = registry.resolve(parse_reference(source))
        about = {"run_id": record.run_id, "model": record.model, "version": record.version}
        return open_version(registry, record), about
    from ddptrain.results.layout import BEST, LATEST
    from ddptrain.results.run import MODEL, newest_trained

    runs, name = opt.place_of(source)
    if name == LATEST and workload is not None and (views := runs.list()):
        chosen = newest_trained(views, workload)
        name = chosen.run_id
        if chosen is not views[0]:
            say(f"using run {name}: the newest of {workload} with a checkpoint")
    found = runs.find(name).fetch(*MODEL)
    found.checkpoint(BEST)
    folder = found.root
    return folder, {"run_id": folder.name}

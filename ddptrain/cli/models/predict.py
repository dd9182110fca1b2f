"""`ddptrain predict`: classifies images with a trained run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli.models.models import RunOrModel, open_trained
from ddptrain.cli.printing import say, write
from ddptrain.text_tables import clean, clean_line

if TYPE_CHECKING:
    from ddptrain.workloads.images.predict import ImageResult

_SOME_FAILED = 1
_WIDEST_NAME = 40


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def predict(
    run: RunOrModel,
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
    """
    from ddptrain.workloads.images.data.predict_inputs import find_images

    if as_json and as_csv:
        raise typer.BadParameter("give --json or --csv, not both")
    run_dir, source = open_trained(run, "images")
    given = find_images(images)  # before torch is imported: most mistakes are in the paths

    from ddptrain.workloads.images.model.saved_classifier import load_model
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
        say(f"predict: {count[True]:,} of {count.total():,} could not be classified")
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
            say(f"predict: {clean_line(result.file)}: {clean(result.error)}")
        for place, one in enumerate(result.predictions):
            cells = f"{100 * one.probability:5.1f} %  {clean_line(one.name):{width}}"
            yield f"{cells}    {clean_line(result.file)}" if place == 0 else f"  {cells}".rstrip()

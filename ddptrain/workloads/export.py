"""Writes the model of a run, or of a version of a model, into a folder that works without ddptrain."""

from __future__ import annotations

import json
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError, one_line
from ddptrain.file_ops import hash_file, publish
from ddptrain.optional_packages import install_command
from ddptrain.workloads.petnames.alphabet import BLANK, STOP, SYMBOLS
from ddptrain.workloads.saved_model import checkpoint_folder

FORMATS = {"safetensors": "model.safetensors", "torch-export": "model.pt2", "onnx": "model.onnx"}
DESCRIPTION = "model.json"
_BATCH = "batch"
_EXAMPLES = 2  # rows of the batch with which a model is traced
_NAME_SYMBOLS = 65  # length of the input of a model that reads whole names: a blank, and 64 characters


@dataclass(frozen=True, slots=True)
class Exported:
    """A model to export: `module` maps `example` to its outputs; `about` describes both for users, as JSON data.

    module: None if only its weights are known. strict: whether torch.export reads the Python code; the recurrent
    layers of torch need that, or the batch size becomes a constant.
    """

    about: Mapping[str, Any]
    module: torch.nn.Module | None = None
    example: torch.Tensor | None = None
    strict: bool = False


def export_model(run_dir: Path, workload: str, target: Path, form: str, source: Mapping[str, Any]) -> list[str]:
    """Write a model into the new folder `target`; return the names of the files. Nothing is left if this fails.

    form: a key of FORMATS. source: what names the model, for the description.

    Raises UsageError if the folder exists or cannot be written, the model cannot be read, the workload has no such
    format, or packages are missing.
    """
    if form not in FORMATS:
        raise UsageError(f"there is no format {form}: choose {', '.join(FORMATS)}")
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists already: name a new folder")
    model = exported(run_dir, workload)
    if form != "safetensors" and model.module is None:
        raise UsageError(
            f"only the code of {workload} can build its model, so it can be exported as safetensors only, not as {form}"
        )
    incoming = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        incoming.mkdir()
        _write_model(run_dir, model, form, incoming / FORMATS[form])
        _describe(incoming, model, form, source)
        publish(incoming, target)
    except OSError as error:
        raise UsageError(f"can't write the model to {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return sorted(path.name for path in target.iterdir())


def exported(run_dir: Path, workload: str) -> Exported:
    """Return the model of a run directory, with its inputs and outputs. Raises UsageError."""
    if workload == "petnames":
        return _petnames(run_dir)
    if workload == "images":
        return _images(run_dir)
    path = checkpoint_folder(run_dir) / FORMATS["safetensors"]
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # damaged files raise arbitrary errors
        raise UsageError(f"can't read the weights {path}: {type(error).__name__}: {error}") from error
    return Exported({"workload": workload, "tensors": tensors})


class _PixelsToScores(torch.nn.Module):
    """An image classifier that takes pixels of 0 to 255, because its normalisation is part of it."""

    def __init__(self, model: torch.nn.Module, pixels: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.pixels = model, pixels

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores [n, outputs] of images [n, 3, size, size] of uint8."""
        scores: torch.Tensor = self.model(self.pixels(images))
        return scores


def _images(run_dir: Path) -> Exported:
    from ddptrain.workloads.images.loader.decode import CENTRE
    from ddptrain.workloads.images.model.build_model import PixelNormalizer
    from ddptrain.workloads.images.model.saved_classifier import load_model

    saved = load_model(run_dir)
    config, size = saved.config.model_dump(), saved.config.image_size
    about = {
        "workload": "images",
        "input": {"name": "images", "dtype": "uint8", "shape": [_BATCH, 3, size, size], "channels": "RGB, 0 to 255"},
        "output": {"name": "scores", "dtype": "float32", "shape": [_BATCH, len(saved.names)], "softmax": False},
        "outputs": list(saved.names),
        "preprocessing": {
            "crop": f"the square in the centre whose side is {CENTRE:g} of the shorter side",
            "resize": [size, size],
            "interpolation": "bilinear, antialiased",
            "normalisation": {"mean": config["mean"], "std": config["std"], "of": "pixels / 255"},
        },
        "architecture": {"name": config["architecture"], "options": config["options"], "n_outputs": len(saved.names)},
    }
    module = _PixelsToScores(saved.model, PixelNormalizer(config, torch.device("cpu"))).eval()
    example = torch.randint(0, 256, (_EXAMPLES, 3, size, size), dtype=torch.uint8)
    return Exported(about, module, example)


def _petnames(run_dir: Path) -> Exported:
    from ddptrain.workloads.petnames.generate import load_model

    model, _ = load_model(run_dir)
    windowed = model.config.context == "window"
    length = model.config.window if windowed else _NAME_SYMBOLS
    reads = (
        f"the last {length} symbols, with blanks before the first character"
        if windowed
        else "a blank, then the name, then any symbols: an output depends only on the symbols up to its position"
    )
    about = {
        "workload": "petnames",
        "input": {"name": "symbols", "dtype": "uint8", "shape": [_BATCH, length], "content": reads},
        "output": {
            "name": "scores",
            "dtype": "float32",
            "shape": [_BATCH, 1 if windowed else length, len(SYMBOLS)],
            "content": "of each next symbol",
            "softmax": False,
        },
        "alphabet": {"symbols": SYMBOLS, "blank": BLANK, "stop": STOP},
        "architecture": model.config.plain(),
    }
    return Exported(about, model, torch.randint(0, len(SYMBOLS), (_EXAMPLES, length), dtype=torch.uint8), strict=True)


def _write_model(run_dir: Path, model: Exported, form: str, path: Path) -> None:
    if form == "safetensors":
        shutil.copyfile(checkpoint_folder(run_dir) / FORMATS[form], path)
        return
    if form == "onnx":
        _require_onnx()
    try:
        _trace(model, form, path)
    except OSError:
        raise
    except Exception as error:  # torch raises arbitrary errors for operations that it cannot export
        why = f"{type(error).__name__}: {shorten(one_line(error), 300)}"
        raise UsageError(f"torch cannot export this model as {form}: {why}; --format safetensors works") from error


def _trace(model: Exported, form: str, path: Path) -> None:
    assert model.module is not None and model.example is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about torch
        shapes = ({0: torch.export.Dim(_BATCH)},)
        program = torch.export.export(model.module, (model.example,), dynamic_shapes=shapes, strict=model.strict)
        if form == "torch-export":
            torch.export.save(program, path)
            return
        names = {"input_names": [model.about["input"]["name"]], "output_names": [model.about["output"]["name"]]}
        onnx_program = torch.onnx.export(program, (), verbose=False, **names)  # type: ignore[arg-type]
        assert onnx_program is not None
        onnx_program.save(path)


def _require_onnx() -> None:
    """Raise UsageError if a package that exports to ONNX is missing."""
    from importlib.util import find_spec

    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise UsageError(f"the format onnx needs {' and '.join(missing)}: {install_command('onnx')}")


def _describe(folder: Path, model: Exported, form: str, source: Mapping[str, Any]) -> None:
    """Write model.json and README.md beside the model."""
    files = {path.name: hash_file(path) for path in sorted(folder.iterdir())}
    about = {
        **source,
        "format": form,
        "torch": torch.__version__,
        "files": {name: {"size_bytes": size_bytes, "sha256": digest} for name, (size_bytes, digest) in files.items()},
        **(model.about if form != "safetensors" else _of_weights(model.about)),
    }
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_readme(about, form), encoding="utf-8")


def _of_weights(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of the weights alone: the model that they are loaded into does not normalise pixels."""
    description = dict(about)
    if description["workload"] == "images":
        description["input"] = {
            **description["input"],
            "dtype": "float32",
            "channels": "RGB, normalised: see preprocessing",
        }
    return description


_LOADING = {
    "safetensors": """weights = safetensors.torch.load_file("model.safetensors")  # a tensor for each name
model.load_state_dict(weights)                                 # into a model of the architecture in model.json""",
    "torch-export": """model = torch.export.load("model.pt2").module()
{output} = model({input})""",
    "onnx": """session = onnxruntime.InferenceSession("model.onnx")
{output}, = session.run(None, {{"{input}": {input}}})""",
}


def _readme(about: Mapping[str, Any], form: str) -> str:
    names = {"input": about.get("input", {}).get("name", ""), "output": about.get("output", {}).get("name", "")}
    loading = _LOADING[form].format(**names)
    lines = [f"# {about.get('model', about.get('run_id', 'model'))}", "", f"```python\n{loading}\n```", ""]
    for title in ("input", "output"):
        if title in about:
            tensor = about[title]
            shape = ", ".join(map(str, tensor["shape"]))
            lines.append(f"- {title}: `{tensor['name']}`, {tensor['dtype']} [{shape}]; the batch has any size")
    lines += ["", f"`{DESCRIPTION}` has all details: where the model comes from, its outputs, what its input must be."]
    return "\n".join(lines) + "\n"

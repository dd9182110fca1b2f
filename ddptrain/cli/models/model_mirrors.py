"""Options of commands that change aliases: the other registries that are brought up to date too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli.printing import say

if TYPE_CHECKING:
    from ddptrain.model_registry.mirrors.mirrors import ModelMirrors
    from ddptrain.model_registry.registry import ModelRegistry

Mirrors = Annotated[
    list[str],
    typer.Option(
        "--mirror",
        metavar="NAME",
        envvar="DDPTRAIN_MODEL_MIRRORS",
        show_envvar=False,
        help="Bring another registry up to date too: wandb, mlflow, or package.module:function. May be repeated; "
        "also DDPTRAIN_MODEL_MIRRORS, with spaces between.",
    ),
]
MirrorTimeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="How long the mirrors may take together, with all uploads.")
]


def named_mirrors(names: list[str], timeout_s: float) -> ModelMirrors:
    """Return the mirrors of these names. Raises UsageError before anything is changed."""
    from ddptrain.config.plugin_names import mirror_target
    from ddptrain.config.sections.retraining import MirrorSettings
    from ddptrain.model_registry.mirrors.mirrors import ModelMirrors

    for name in names:
        mirror_target(name)
    return ModelMirrors([MirrorSettings(name=name) for name in names], timeout_s)


def update_mirrors(
    mirrors: ModelMirrors, registry: ModelRegistry, model: str, reason: str, removed_alias: str = ""
) -> None:
    """Bring the mirrors up to date; what fails is a warning on stderr."""
    for result in mirrors.update(registry, model, reason=reason, removed_alias=removed_alias):
        for line in (*result.notes, *([f"warning: {result.warning}"] if result.problem else [])):
            say(line)

"""The models and weights of torchvision, read from its source files: importing it would import torch in the driver."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

SMALL_CNN = "small_cnn"  # our own model
N_OUTPUTS = 1000  # of all classification weights in torchvision: the classes of ImageNet
_BUILDER = re.compile(
    r"^@register_model\(\)\n(?:@.*\n)*def (?P<name>\w+)\([^)]*?weights: (?:Optional\[)?(?P<weights>\w+)", re.MULTILINE
)
_WEIGHTS = re.compile(r"^class (?P<name>\w+)\(WeightsEnum\):\n(?P<body>(?:[ \t].*\n|\n)+)", re.MULTILINE)
_MEMBER = re.compile(r"^    ([A-Z][A-Z0-9_]*) = ", re.MULTILINE)


def architectures() -> list[str]:
    """Return the names of all classification models; an empty list if torchvision is not installed."""
    names = sorted(match["name"] for text in _sources() for match in _BUILDER.finditer(text))
    return [SMALL_CNN, *names] if names else []


def weight_names(architecture: str) -> list[str]:
    """Return the names of torchvision's weights for a model, as DEFAULT and IMAGENET1K_V1; empty if unknown."""
    for text in _sources():
        kinds = {match["name"]: match["weights"] for match in _BUILDER.finditer(text)}
        bodies = {match["name"]: match["body"] for match in _WEIGHTS.finditer(text)}
        if architecture in kinds:
            return sorted(set(_MEMBER.findall(bodies.get(kinds[architecture], ""))))
    return []


def _sources() -> Iterator[str]:
    spec = find_spec("torchvision")
    if spec is not None and spec.origin is not None:
        for path in sorted((Path(spec.origin).parent / "models").glob("*.py")):
            yield path.read_text(encoding="utf-8")

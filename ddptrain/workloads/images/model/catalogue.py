"""Which models and weights torchvision has, read from its files: importing it would bring torch into the driver."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

SMALL_CNN = "small_cnn"  # ours
N_OUTPUTS = 1000  # of all weights that torchvision has for classification: they know ImageNet's classes
_BUILDER = re.compile(
    r"^@register_model\(\)\n(?:@.*\n)*def (?P<name>\w+)\([^)]*?weights: (?:Optional\[)?(?P<weights>\w+)", re.MULTILINE
)
_WEIGHTS = re.compile(r"^class (?P<name>\w+)\(WeightsEnum\):\n(?P<body>(?:[ \t].*\n|\n)+)", re.MULTILINE)
_MEMBER = re.compile(r"^    ([A-Z][A-Z0-9_]*) = ", re.MULTILINE)


def architectures() -> list[str]:
    """Names of all classification models; none where torchvision is not installed, and nothing can be said."""
    found = sorted(match["name"] for text in _sources() for match in _BUILDER.finditer(text))
    return [SMALL_CNN, *found] if found else []


def weight_names(architecture: str) -> list[str]:
    """Names of the weights that torchvision has for a model, as DEFAULT and IMAGENET1K_V1; none where unknown."""
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

"""What files of weights do not keep: the versions of the modules that they are of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def versioned(model: torch.nn.Module, weights: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The weights, under this model's names, as its load_state_dict wants them: with its own modules' versions.

    Without one a module takes them for those of its first version, or refuses them, as torchvision's MNASNet does.
    """
    found = OrderedDict(weights)
    if versions := getattr(model.state_dict(), "_metadata", None):
        vars(found)["_metadata"] = versions
    return found

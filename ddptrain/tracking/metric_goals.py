"""Whether a higher or a lower value of a metric is better, by its name."""

from __future__ import annotations

_LOWER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse")
_HIGHER_IS_BETTER = ("accuracy", "acc", "top1", "top5", "f1", "auc", "precision", "recall", "score")


def goal_of(name: str, metric: str = "", mode: str = "min") -> str:
    """Return "min" or "max", the best value of a metric; "" if unknown.

    `metric` and `mode` are those of the configuration's section `checkpoint`.
    """
    if name == metric:
        return mode
    last = name.lower().rpartition("/")[2]
    words = last.replace("-", "_").split("_")
    if any(word in words or last.endswith(word) for word in _LOWER_IS_BETTER):
        return "min"
    return "max" if any(word in words for word in _HIGHER_IS_BETTER) else ""

"""Models that are exported as ONNX give the same scores; importing onnx takes too long for `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's and onnx' own
def test_exported_model_gives_the_scores_of_the_model(tmp_path: Path) -> None:
    from tests.unit.workloads.test_export import check_scores  # imports torch

    for kind in ("images", "window"):
        (tmp_path / kind).mkdir()
        check_scores(kind, "onnx", tmp_path / kind)

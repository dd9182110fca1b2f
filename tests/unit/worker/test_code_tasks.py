"""What a worker says of the modules that a workload imports."""

from __future__ import annotations

import asyncio
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ddptrain.worker.code_tasks import missing_modules


class EditableFinder:
    """What an editable install by setuptools puts into sys.meta_path."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "editable" else None


def test_only_what_no_import_could_find_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").touch()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder])
    asked = ["os", "sys", "numpy", "__main__", "beside", "editable", "no_such_package"]
    assert asyncio.run(missing_modules(asked, [str(tmp_path)])) == ["no_such_package"]

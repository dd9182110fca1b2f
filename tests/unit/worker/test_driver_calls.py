"""A worker reports which modules of a workload are missing."""

from __future__ import annotations

import asyncio
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ddptrain.worker.driver_calls import missing_modules


class EditableFinder:
    """A finder as an editable install by setuptools puts it into sys.meta_path."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "editable" else None


def test_only_modules_that_no_import_could_find_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").touch()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder])
    asked = ["os", "sys", "numpy", "__main__", "beside", "editable", "no_such_package"]
    assert asyncio.run(missing_modules(asked, [str(tmp_path)])) == ["no_such_package"]

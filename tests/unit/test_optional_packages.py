"""The command that installs the packages of an extra."""

from __future__ import annotations

import importlib.metadata

import pytest

from ddptrain.optional_packages import install_command


def test_packages_of_an_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=2.6", 'onnx>=1.17; extra == "onnx"', "onnxscript; extra == 'onnx'", 'onnx2; extra == "onnx2"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: required)
    assert install_command("onnx") == "pip install 'onnx>=1.17' onnxscript"
    assert install_command("missing") == "pip install 'ddptrain[missing]'"


def test_package_without_metadata_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert install_command("s3") == "pip install 'ddptrain[s3]'"

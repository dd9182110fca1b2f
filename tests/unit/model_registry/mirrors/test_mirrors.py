"""Mirrors in their own processes: results, secrets, the time limit, a stop; which ones a configuration has."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ddptrain.config.load import load_mapping
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.retraining import MirrorSettings
from ddptrain.model_registry.mirrors.mirrors import MirrorResult, ModelMirrors
from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.registry import ModelRegistry

MIRRORS = """
import os, pathlib, sys, time


def good(model):
    print("nobody reads this")
    (version,) = model.versions
    model.tell(f"{version.number} {version.aliases} {(version.open() / 'weights').read_text()} {model.removed_alias}")


def fails(model):
    raise ValueError("no access with hush-hush\\nsecond line")


def leaves(model):
    sys.exit(3)


def dies(model):
    print("the last words", file=sys.stderr)
    os._exit(4)


def hangs(model):
    pathlib.Path(model.options["folder"], "pid").write_text(str(os.getpid()))
    model.tell("begun")
    time.sleep(600)
"""


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    (tmp_path / "mine.py").write_text(MIRRORS)
    found = ModelRegistry.open(str(tmp_path / "models"))
    found.add_version("names", {"weights": b"1234"}, VersionRecord("", 0, "", "run", "petnames", 1, {}, ()))
    found.promote("names", 1)
    return found


def update(
    registry: ModelRegistry, tmp_path: Path, *names: str, timeout_s: float = 60.0, **given: str
) -> list[MirrorResult]:
    options = {"api_token": "hush-hush", "folder": str(tmp_path)}
    chosen = [MirrorSettings(name=f"mine:{name}", options=options) for name in names]
    return ModelMirrors(chosen, timeout_s, [str(tmp_path)]).update(registry, "names", **given)  # type: ignore[arg-type]


def test_each_mirror_has_its_own_result(registry: ModelRegistry, tmp_path: Path) -> None:
    results = update(registry, tmp_path, "good", "fails", "leaves", "dies", removed_alias="old")
    assert results == [
        MirrorResult("mine:good", ("1 ('champion',) 1234 old",)),
        MirrorResult("mine:fails", (), "ValueError: no access with <left out>"),
        MirrorResult("mine:leaves", (), "SystemExit: 3"),
        MirrorResult("mine:dies", (), "its process ended with 4: the last words"),
    ]
    assert results[0].warning == ""
    assert results[2].warning == "mirror mine:leaves is not up to date: SystemExit: 3"
    assert registry.state("names").aliases == {"champion": 1}


def test_damaged_version_is_named(registry: ModelRegistry, tmp_path: Path) -> None:
    (tmp_path / "models/names/versions/1/weights").write_bytes(b"1235")
    (result,) = update(registry, tmp_path, "good")
    assert "names/versions/1/weights has another SHA-256" in result.problem


def test_mirror_that_hangs_is_killed_at_the_time_limit(registry: ModelRegistry, tmp_path: Path) -> None:
    good, hangs = update(registry, tmp_path, "good", "hangs", timeout_s=6.0)
    assert good.problem == ""
    assert hangs == MirrorResult("mine:hangs", ("begun",), "it was stopped, 6 s is the time limit")
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_stop_ends_a_mirror_before_its_time(registry: ModelRegistry, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path)}
    mirrors = ModelMirrors([MirrorSettings(name="mine:hangs", options=options)], 600.0, [str(tmp_path)])
    started = time.monotonic()
    (result,) = mirrors.update(registry, "names", should_stop=(tmp_path / "pid").exists)
    assert result.problem and time.monotonic() - started < 300
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_no_mirrors_start_no_process(registry: ModelRegistry, tmp_path: Path) -> None:
    assert update(registry, tmp_path) == []


# --- which mirrors a configuration has ---


def config(**fields: object) -> RunConfig:
    return load_mapping({"workload": "petnames", "name": "pets", **fields}, Path()).config


OFF: dict[str, object] = {}
WANDB: dict[str, object] = {"wandb": {"project": "animals", "entity": "zoo"}}


@pytest.mark.parametrize(
    ("tracking", "models", "mirrors"),
    [
        (OFF, {}, []),
        (WANDB, {}, [("wandb", {"project": "animals", "entity": "zoo"})]),
        ({"wandb": {}}, {}, [("wandb", {"project": "pets", "entity": None})]),
        ({"wandb": {"mode": "off"}}, {}, []),
        (WANDB, {"mirrors": []}, []),
        (WANDB, {"mirrors": ["mlflow"]}, [("mlflow", {})]),
        (OFF, {"mirrors": ["wandb"]}, [("wandb", {})]),
        (
            WANDB,
            {"mirrors": [{"name": "wandb", "options": {"project": "other"}}, "a.b:c"]},
            [("wandb", {"project": "other", "entity": "zoo"}), ("a.b:c", {})],
        ),
    ],
)
def test_mirrors_of_a_configuration(
    tracking: dict[str, object], models: dict[str, object], mirrors: list[tuple[str, dict[str, object]]]
) -> None:
    found = ModelMirrors.of_config(config(tracking=tracking, models=models), ["/project"])
    assert [(each.name, each.options) for each in found.mirrors] == mirrors
    assert (found.timeout_s, found.folders) == (60.0, ["/project"])


def test_mirrors_have_the_environment_of_the_runs() -> None:
    given = config(env={"WANDB_API_KEY": "k" * 40}, models={"mirrors": ["wandb"], "mirror_timeout_s": 5})
    found = ModelMirrors.of_config(given, [])
    assert found.environ["WANDB_API_KEY"] == "k" * 40 and "PATH" in found.environ
    assert found.timeout_s == 5.0
    assert "kkkk" not in repr(found)

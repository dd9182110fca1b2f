"""The registry in a folder: versions, aliases, history, damage, and what survives a kill between two steps."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import UserDict
from collections.abc import Callable, ItemsView
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.model_registry.records import Change, RegistryDamaged, VersionRecord
from ddptrain.model_registry.reference import ModelReference, is_model_reference, parse_reference
from ddptrain.model_registry.registry import RECORD, ModelRegistry, open_version
from ddptrain.storage.store import StoreError
from tests.unit.results.stores import serve_folder

FILES = ("run.json", "checkpoints/step-5/model.safetensors")


def record(run_id: str = "names-1", step: int = 5, **fields: object) -> VersionRecord:
    base = VersionRecord(
        model="",
        version=0,
        created_at="",
        run_id=run_id,
        workload="petnames",
        step=step,
        metrics={"val/loss": 2.5},
        files=(),
    )
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-5").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "checkpoints/step-5/model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    return ModelRegistry.open(str(tmp_path / "models"))


def add(registry: ModelRegistry, run: Path, run_id: str) -> int:
    return registry.add_version("names", {path: run / path for path in FILES}, record(run_id)).version


def champion(registry: ModelRegistry) -> int | None:
    return registry.state("names").version_of("champion")


# --- References ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("names", ModelReference("names", alias="champion")),
        ("names@3", ModelReference("names", version=3)),
        ("names@previous", ModelReference("names", alias="previous")),
        ("a.b-c_1@x", ModelReference("a.b-c_1", alias="x")),
    ],
)
def test_reference_is_read(text: str, expected: ModelReference) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "@champion", "names@", "names@0", "names@-1", "names@A", "../x@1", "a..b@1", "Names@1", "a/b@1", ".x@1"),
        *("names@1x", "names@a@b", "a" * 65 + "@1", "names\n@1", "names@\u0663"),
    ],
)
def test_malformed_reference_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_reference(text)


@pytest.mark.parametrize(
    ("text", "is_model"),
    [("names@champion", True), ("names-20261122-101010-ab12", False), ("runs/a@b", False), ("s3://user@host/x", False)],
)
def test_names_and_paths_of_runs_are_no_models(text: str, is_model: bool) -> None:
    assert is_model_reference(text) is is_model


# --- Versions ---


def test_version_has_the_files_with_their_hashes(registry: ModelRegistry, run: Path) -> None:
    added = registry.add_version("names", {"run.json": b"{}", FILES[1]: run / FILES[1]}, record())
    assert added.version == 1
    assert [(file.path, file.size_bytes, file.sha256[:8]) for file in added.files] == [
        ("run.json", 2, "44136fa3"),
        ("checkpoints/step-5/model.safetensors", 7, "9a129038"),
    ]
    assert registry.version("names", 1) == added
    registry.verify(added)


def test_same_run_and_step_is_added_once(registry: ModelRegistry, run: Path) -> None:
    assert [add(registry, run, "names-1"), add(registry, run, "names-2"), add(registry, run, "names-1")] == [1, 2, 1]


class Meanwhile(UserDict[str, Path | bytes]):
    """The files of a version; another process adds the same run before the first of them is copied."""

    def __init__(self, files: dict[str, Path | bytes], other: Callable[[], object]) -> None:
        super().__init__(files)
        self.other = other

    def items(self) -> ItemsView[str, Path | bytes]:
        self.other()
        return super().items()


def test_same_run_is_added_once_by_two_processes_at_a_time(registry: ModelRegistry, run: Path) -> None:
    other = ModelRegistry(registry.folder)
    files = Meanwhile({path: run / path for path in FILES}, lambda: add(other, run, "names-1"))
    assert registry.add_version("names", files, record("names-1")).version == 2
    assert [each.version for each in registry.versions("names")] == [2]
    assert [change.version for change in registry.history("names")] == [2]


def test_copy_of_a_version_that_another_process_reads_stays(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    add(ModelRegistry.open(str(tmp_path / "models")), run, "names-1")
    copies: list[int] = []

    class Slow(ModelRegistry):
        def fetch(self, record: VersionRecord, target: Path) -> None:
            super().fetch(record, target)
            copies.append(open_version(stored, record).stat().st_ino)

    place = serve_folder(tmp_path, monkeypatch) + "/models"
    stored = ModelRegistry.open(place)
    copy = open_version(Slow.open(place), stored.version("names", 1))
    assert [copy.stat().st_ino] == copies
    (copy / FILES[1]).write_bytes(b"damaged")
    assert (open_version(stored, stored.version("names", 1)) / FILES[1]).read_bytes() == b"weights"


def test_version_without_its_record_does_not_exist(registry: ModelRegistry, run: Path, tmp_path: Path) -> None:
    add(registry, run, "names-1")
    (tmp_path / "models/names/versions/1" / RECORD).unlink()  # as if the process had been killed before the last write
    assert registry.versions("names") == []
    assert add(registry, run, "names-1") == 2
    with pytest.raises(UsageError, match="no version 1; it has 2"):
        registry.version("names", 1)


def test_number_of_a_removed_version_is_not_used_again(registry: ModelRegistry, run: Path, tmp_path: Path) -> None:
    add(registry, run, "names-1")
    assert registry.remove("names", 1) is not None
    assert not (tmp_path / "models/names/versions").exists()
    assert add(registry, run, "names-2") == 2


@pytest.mark.parametrize(
    ("content", "what"), [(b"weightz", "has another SHA-256"), (b"weight", "has 6 bytes instead of 7")]
)
def test_damaged_file_is_named(registry: ModelRegistry, run: Path, tmp_path: Path, content: bytes, what: str) -> None:
    add(registry, run, "names-1")
    file = tmp_path / "models/names/versions/1/checkpoints/step-5/model.safetensors"
    file.write_bytes(content)
    with pytest.raises(RegistryDamaged, match=rf"model\.safetensors {what}"):
        registry.promote("names", 1)
    file.unlink()
    with pytest.raises(RegistryDamaged, match=r"model\.safetensors is missing"):
        registry.verify(registry.version("names", 1))
    with pytest.raises(RegistryDamaged, match=r"model\.safetensors is missing"):
        registry.fetch(registry.version("names", 1), tmp_path / "copy")


def test_fetch_copies_the_files(registry: ModelRegistry, run: Path, tmp_path: Path) -> None:
    add(registry, run, "names-1")
    registry.fetch(registry.version("names", 1), tmp_path / "copy")
    assert (tmp_path / "copy/checkpoints/step-5/model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("files", [{"path": "../x", "size_bytes": 1, "sha256": "0" * 64}]),
        ("files", [{"path": "/etc/passwd", "size_bytes": 1, "sha256": "0" * 64}]),
        ("files", [{"path": "a/../../x", "size_bytes": 1, "sha256": "0" * 64}]),
        ("files", [{"path": "x", "size_bytes": -1, "sha256": "0" * 64}]),
        ("files", [{"path": "x", "size_bytes": 1, "sha256": "?"}]),
        ("files", []),
        ("version", 7),
        ("version", True),
        ("metrics", ["val/loss"]),
        ("metrics", {"val/loss": 10**400}),
        ("step", -1),
        ("model", "other"),
        ("run_id", None),
    ],
)
def test_malformed_record_is_refused(
    registry: ModelRegistry, run: Path, tmp_path: Path, field: str, value: object
) -> None:
    add(registry, run, "names-1")
    path = tmp_path / "models/names/versions/1" / RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(RegistryDamaged, match=r"versions/1/version\.json is damaged"):
        registry.version("names", 1)


# --- Aliases and history ---


def test_promotion_moves_the_champion_and_keeps_the_previous(registry: ModelRegistry, run: Path) -> None:
    for each in ("a", "b", "c"):
        add(registry, run, each)
    registry.promote("names", 1)
    assert registry.state("names").aliases == {"champion": 1}
    registry.promote("names", 3, reason="better")
    assert registry.state("names").aliases == {"champion": 3, "previous": 1}
    assert registry.promote("names", 3) is None
    assert [(change.action, change.version, change.reason) for change in registry.history("names")] == [
        ("created", 1, ""),
        ("created", 2, ""),
        ("created", 3, ""),
        ("promoted", 1, ""),
        ("promoted", 3, "better"),
    ]
    assert registry.resolve(parse_reference("names")).version == 3
    assert registry.resolve(parse_reference("names@previous")).version == 1


def test_rollback_to_a_damaged_version_changes_nothing(registry: ModelRegistry, run: Path, tmp_path: Path) -> None:
    for number, each in enumerate(("a", "b"), 1):
        add(registry, run, each)
        registry.promote("names", number)
    (tmp_path / "models/names/versions/1/run.json").write_text("[]")
    before = registry.state("names")
    with pytest.raises(RegistryDamaged, match=r"versions/1/run\.json has another SHA-256"):
        registry.rollback("names")
    assert registry.state("names") == before


def test_promotion_that_expects_another_champion_is_refused(registry: ModelRegistry, run: Path) -> None:
    for each in ("a", "b", "c"):
        add(registry, run, each)
    registry.promote("names", 1, expected=None)
    registry.promote("names", 2, expected=1)
    with pytest.raises(UsageError, match="its champion is version 2, not 1"):
        registry.promote("names", 3, expected=1)
    assert champion(registry) == 2


def test_alias_is_set_moved_and_removed(registry: ModelRegistry, run: Path) -> None:
    for each in ("a", "b"):
        add(registry, run, each)
    registry.set_alias("names", "test", 1)
    registry.set_alias("names", "test", 2)
    assert registry.set_alias("names", "test", 2) is None
    assert registry.resolve(parse_reference("names@test")).version == 2
    registry.set_alias("names", "test", None)
    with pytest.raises(UsageError, match="no alias test"):
        registry.resolve(parse_reference("names@test"))
    for reserved in ("champion", "previous"):
        with pytest.raises(UsageError, match="promote and rollback"):
            registry.set_alias("names", reserved, 1)


def test_version_in_use_is_not_removed(registry: ModelRegistry, run: Path) -> None:
    for each in ("a", "b", "c"):
        add(registry, run, each)
    registry.promote("names", 1)
    with pytest.raises(UsageError, match="version 1 of names is champion"):
        registry.remove("names", 1)
    registry.remove("names", 3)
    registry.remove("names", 2)
    assert [version.version for version in registry.versions("names")] == [1]


def test_concurrent_changes_all_happen_one_after_the_other(registry: ModelRegistry, run: Path, tmp_path: Path) -> None:
    add(registry, run, "a")
    before = registry.state("names").number

    def change(number: int) -> Change | None:
        def add(state: Change) -> Change:
            return replace(state, action="alias", version=1, aliases={**state.aliases, f"a{number}": 1})

        return ModelRegistry.open(str(tmp_path / "models")).change("names", add)

    with ThreadPoolExecutor(8) as pool:
        changes = list(pool.map(change, range(24)))
    assert sorted(each.number for each in changes if each) == list(range(before + 1, before + 25))
    assert set(registry.state("names").aliases) == {f"a{number}" for number in range(24)}


def test_torn_entry_of_the_history_is_told(registry: ModelRegistry, run: Path, tmp_path: Path) -> None:
    add(registry, run, "a")
    entry = tmp_path / "models/names/history/000001.json"
    entry.write_text(entry.read_text()[:20])
    with pytest.raises(RegistryDamaged, match=r"history/000001\.json is damaged: it is not JSON"):
        registry.state("names")


# --- Other users ---


def test_linked_file_is_neither_read_nor_written(registry: ModelRegistry, run: Path, tmp_path: Path) -> None:
    add(registry, run, "a")
    path = tmp_path / "models/names/versions/1/run.json"
    (tmp_path / "outside").write_text("{}")
    path.unlink()
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match=r"run\.json can't be read"):
        registry.verify(registry.version("names", 1))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_registry_of_another_user_is_read_and_not_written(registry: ModelRegistry, run: Path, tmp_path: Path) -> None:
    add(registry, run, "a")
    for path in [tmp_path / "models", *(tmp_path / "models").rglob("*")]:
        os.chown(path, 65534, 65534)
    assert registry.resolve(parse_reference("names@1")).version == 1
    with pytest.raises(StoreError, match=r"belongs to another user \(nobody\).*"):
        registry.promote("names", 1)
    assert champion(registry) is None

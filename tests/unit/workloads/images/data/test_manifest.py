"""The list of a run's images: written once, read by many, believed by nobody."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddptrain.workloads.images.data.manifest import FILE, DamagedManifest, Manifest
from ddptrain.workloads.images.params import ImagesParams

MANIFEST = Manifest(
    url="s3://bucket/dogs",
    classes=("a b", "ü"),
    keys=("a b/1+%.jpg", "a b/2.jpg", "ü/犬/3.png"),
    labels=(0, 0, 1),
    sizes=(10, -1, 30),
    versions=("x", "", "z"),
    train=(0, 2),
    val=(1,),
    made_of={"source": "s3://bucket/dogs", "subset": None, "seed": 0},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    assert Manifest.read(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_manifest_that_can_not_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            MANIFEST.write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert Manifest.read(tmp_path) == MANIFEST
    assert os.listdir(tmp_path) == [FILE]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m.update(extra=1), "extra: Unexpected keyword argument"),
        (lambda m: m.update(schema=2), "schema: Input should be 1"),
        (lambda m: m.pop("keys"), "keys: Field required"),
        (lambda m: m.update(keys="a/b.jpg"), "keys: Input should be a valid"),
        (lambda m: m["keys"].__setitem__(0, 7), "keys.0: Input should be a valid string"),
        (lambda m: m["keys"].__setitem__(0, "a b/../../etc/passwd"), "leads out of the source"),
        (lambda m: m["keys"].__setitem__(0, "/etc/passwd"), "leads out of the source"),
        (lambda m: m["keys"].__setitem__(0, "a b//x.jpg"), "leads out of the source"),
        (lambda m: m["keys"].__setitem__(0, "a b/x\0.jpg"), "leads out of the source"),
        (lambda m: m["keys"].__setitem__(0, "ü/1.jpg"), "does not belong to class 0"),
        (lambda m: m["keys"].__setitem__(0, "a b/2.jpg"), "a key is repeated"),
        (lambda m: m["labels"].__setitem__(0, 2), "does not belong to class 2"),
        (lambda m: m["labels"].__setitem__(0, -1), "labels.0: Input should be greater than or equal to 0"),
        (lambda m: m["labels"].__setitem__(0, True), "labels.0: Input should be a valid integer"),
        (lambda m: m["labels"].pop(), "2 labels for 3 keys"),
        (lambda m: m["sizes"].__setitem__(0, -2), "sizes.0"),
        (lambda m: m["classes"].reverse(), "its classes are not in order"),
        (lambda m: m.update(classes=[]), "classes"),
        (lambda m: m.update(train=[]), "train"),
        (lambda m: m.update(train=[2, 0]), "train is not a list of images in order"),
        (lambda m: m.update(val=[3]), "val is not a list of images in order"),
        (lambda m: m.update(val=[0]), "an image is in train and in val"),
        (lambda m: m.update(train=[10**30]), "train"),
    ],
)
def test_hostile_content_is_a_clear_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    MANIFEST.write(tmp_path)
    content = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    change(content)
    (tmp_path / FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DamagedManifest) as caught:
        Manifest.read(tmp_path)
    assert complaint in str(caught.value)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1}'])
def test_a_file_that_is_no_manifest_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(DamagedManifest, match="is damaged"):
        Manifest.read(tmp_path)


def test_a_missing_manifest_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(DamagedManifest, match=f"{tmp_path}/{FILE} can't be read"):
        Manifest.read(tmp_path)


def test_ranks_read_a_folder_where_the_driver_has_found_it() -> None:
    manifest = Manifest(**{name: getattr(MANIFEST, name) for name in MANIFEST.__slots__} | {"url": "/data/dogs"})
    assert manifest.location(ImagesParams(source="dogs")).url == "/data/dogs"


def test_ranks_read_a_url_with_the_credentials_of_the_parameters() -> None:
    params = ImagesParams(source="https://me:pass@host/dogs/", source_options={"a": 1})
    location = MANIFEST.location(params)
    assert location.url == "https://me:pass@host/dogs" and location.options == {"a": 1}
    assert "pass" not in repr(location)

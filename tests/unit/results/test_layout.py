"""The layout of a run directory, and what trackers have recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.results.errors import UnsafePath
from ddptrain.results.layout import safe_relative, valid_run_id
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunRecord

# --- layout ---


@pytest.mark.parametrize(
    "run_id",
    ["", "..", "a/b", "-a", ".a", "a\n", "Latest", "x" * 129, "é"],
)
def test_run_ids_that_lead_elsewhere_or_mean_something_are_not_valid(run_id: str) -> None:
    assert not valid_run_id(run_id)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (".", "names a folder"),
        ("//host/share", "absolute"),
        ("a/../../b", "leaves"),
        ("a/", "folder"),
        ("a\x1b[2Jb", "printed"),
        (".incoming-x", "begins with"),
        ("folder/" + "x" * 201, "too long"),
        ("/".join(["abcdefgh"] * 200), "too long"),
    ],
)
def test_paths_that_leave_the_folder_or_fit_no_disk_are_refused(path: str, why: str) -> None:
    with pytest.raises(UnsafePath, match=why):
        safe_relative(path)


@given(st.text(alphabet=st.sampled_from("ab./\\: \0é~-")) | st.text())
def test_whatever_is_taken_stays_below_the_folder(path: str) -> None:
    try:
        clean = safe_relative(path)
    except UnsafePath:
        return
    root = Path("/root-of/run")
    target = Path(str(root / clean))
    assert target.is_relative_to(root) and target != root
    assert ".." not in target.parts
    assert safe_relative(str(clean)) == clean


def test_artifacts_are_listed_without_links_and_half_files(tmp_path: Path) -> None:
    layout = Run(tmp_path)
    (layout.artifacts_dir / "deep").mkdir(parents=True)
    (layout.artifacts_dir / "deep" / "b.bin").write_bytes(b"12")
    (layout.artifacts_dir / "a.txt").write_bytes(b"1")
    (layout.artifacts_dir / ".incoming-00").touch()
    (layout.artifacts_dir / "link").symlink_to("/etc/passwd")
    assert layout.artifacts() == {"a.txt": 1, "deep/b.bin": 2}


# --- What trackers have created: links of runs that were sent later, parts in other folders, and names for ---


def part(folder: Path, run_id: str) -> Path:
    made = folder / f"offline-run-20250101_000000-{run_id}"
    made.mkdir(parents=True)
    (made / f"run-{run_id}.wandb").touch()
    return made


def test_parts_in_a_folder_of_the_users_are_found_by_their_id(tmp_path: Path) -> None:
    layout, elsewhere = Run(tmp_path / "run"), tmp_path / "elsewhere"
    inside = part(layout.tracking_dir / "wandb", "w1")
    outside, _ = part(elsewhere, "w2"), part(elsewhere, "of-another-run")
    tracking = {
        "wandb": {"id": "w1", "folder": str(elsewhere / "x")},
        "wandb/rank_1": {"id": "w2", "folder": str(outside)},
    }
    found = Run(layout.root, RunRecord(run_id="r", tracking=tracking)).wandb_parts()
    assert [each.folder for each in found] == [inside, outside]

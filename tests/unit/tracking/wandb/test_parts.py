"""W&B: credentials, media, rows and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddptrain.tracking import protocol as items
from ddptrain.tracking.wandb import RowFilter, WandbRow
from ddptrain.tracking.wandb_files import (
    OPEN,
    SENT,
    UNSENT,
    Access,
    RunPart,
    access_to,
    links_in,
    parts_below,
    unsent_parts,
)
from ddptrain.tracking.wandb_run import to_table

# --- To which server the key of W&B goes: the user says it, never a run directory ---


KEY, OTHER = "k" * 40, "n" * 40
OWN, FOREIGN = "https://w.example", "https://foreign.example"


@pytest.mark.parametrize(
    ("named", "environ", "netrc", "settings", "expected"),
    [
        # The run names no server, or the user's own one.
        ("", {"WANDB_API_KEY": KEY}, "", "", Access(KEY)),
        ("", {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": OWN}, "", "", Access(KEY, OWN)),
        (f"{OWN}/", {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": OWN}, "", "", Access(KEY, OWN)),
        ("https://W.example:443", {"WANDB_API_KEY": KEY}, "", f"base_url = {OWN}", Access(KEY, OWN)),
        ("https://api.wandb.ai", {"WANDB_API_KEY": KEY}, "", "", Access(KEY)),
        # The user says where it is to go.
        (FOREIGN, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": OWN}, "", "", Access(KEY, OWN)),
        # The run names another server.
        (FOREIGN, {"WANDB_API_KEY": KEY}, "", "", None),
        (FOREIGN, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": ""}, "", "", None),
        (FOREIGN, {"WANDB_API_KEY": KEY}, "", f"base_url = {OWN}", None),
        (FOREIGN, {"WANDB_IDENTITY_TOKEN_FILE": "/token"}, "", "", None),
        (FOREIGN, {}, "", f"api_key = {KEY}", None),
        (FOREIGN, {}, f"machine api.wandb.ai password {KEY}", "", None),
        (FOREIGN, {}, f"default login user password {KEY}", "", None),
        ("https://api.wandb.ai.foreign.example", {"WANDB_API_KEY": KEY}, "", "", None),
        ("https://api.wandb.ai@foreign.example", {"WANDB_API_KEY": KEY}, "", "", None),
        ("http://w.example", {"WANDB_API_KEY": KEY}, "", f"base_url = {OWN}", None),
        ("https://w.example:8443", {"WANDB_API_KEY": KEY}, "", f"base_url = {OWN}", None),
        ("https://[", {"WANDB_API_KEY": KEY}, "", "", None),
        ("https://w.example:port", {"WANDB_API_KEY": KEY}, "", "", None),
        # A key of ~/.netrc is for its server alone, and is not sent in clear over a network.
        (OWN, {}, f"machine w.example password {OTHER}\ndefault password {KEY}", "", Access(OTHER, OWN)),
        (OWN, {"WANDB_API_KEY": KEY}, f"machine w.example password {OTHER}", "", None),
        ("http://w.example", {}, f"machine w.example password {OTHER}\nmachine api.wandb.ai password {KEY}", "", None),
        ("http://127.0.0.1:80", {}, f"machine 127.0.0.1:80 password {OTHER}", "", Access(OTHER, "http://127.0.0.1:80")),
        # There is no key at all.
        (FOREIGN, {}, "", "", Access()),
    ],
)
def test_credentials_go_only_to_a_server_that_the_user_has_chosen(
    named: str, environ: dict[str, str], netrc: str, settings: str, expected: Access | None, tmp_path: Path
) -> None:
    (tmp_path / ".config/wandb").mkdir(parents=True)
    (tmp_path / ".config/wandb/settings").write_text(f"[default]\n{settings}\n")
    (tmp_path / ".netrc").write_text(netrc)
    assert access_to(named, {"HOME": str(tmp_path), **environ}) == expected


# --- Names and tables, as W&B takes them ---


def test_table_has_its_first_rows_and_plain_numbers() -> None:
    rows: Any = ((np.float32(0.5), "a"), (2, None), (3, "c"))
    table = to_table(items.Table(0, "t", ("x", "y"), rows), 2)
    assert (table.columns, table.data) == (["x", "y"], [[0.5, "a"], [2, None]])
    assert type(table.data[0][0]) is float


def test_name_of_a_table_is_safe(tmp_path: Path) -> None:
    from ddptrain.tracking.wandb_run import to_table_artifact

    artifact = to_table_artifact(items.Table(0, "val/worst", ("x",), ((1,),), 7), 10, "run-1", 1)
    assert (artifact.name, artifact.type, artifact.metadata) == ("val_worst_run-1_rank_1", "val_worst", {"step": 7})


# --- Which numbers go to W&B, and in which rows ---


def test_every_tenth_step_goes_and_every_value_of_an_epochs_end() -> None:
    row_filter = RowFilter(10)
    gone: list[tuple[str, int]] = []
    for step in range(25):
        gone += [(name, step) for name in row_filter.take({"train/loss": 1.0}, step, None, 0.0)]
        if step % 7 == 6:
            gone += [(name, step) for name in row_filter.take({"val/loss": 1.0}, step, None, 0.0)]
    assert [step for name, step in gone if name == "train/loss"] == [0, 10, 20]
    assert [step for name, step in gone if name == "val/loss"] == [6, 13, 20]


def test_what_is_logged_once_an_epoch_goes_however_few_steps_it_has() -> None:
    once = RowFilter(10)
    assert all(once.take({"loss": 1.0}, 3 * epoch, epoch, 0.0) for epoch in range(1, 6))
    steps = RowFilter(10)
    sent = [step for step in range(20) if steps.take({"loss": 1.0}, step, step // 6, 0.0)]
    assert sent == [0, 6, 12, 18]


def test_last_values_come_at_the_end_with_their_own_steps() -> None:
    row_filter = RowFilter(10)
    for step in range(13):
        row_filter.take({"loss": float(step), **({"lr": 0.1} if step < 5 else {})}, step, step / 10, float(step))
    rest = row_filter.rest()
    assert [(step, {name: held.value for name, held in row.items()}) for step, row in rest.items()] == [
        (4, {"lr": 0.1}),
        (12, {"loss": 12.0}),
    ]
    assert (rest[12]["loss"].epoch, rest[12]["loss"].time_s) == (1.2, 12.0)
    assert row_filter.rest() == {}


def test_steps_that_begin_again_are_logged_at_once() -> None:
    row_filter = RowFilter(10)
    assert row_filter.take({"loss": 1.0}, 1000, None, 0.0) == ["loss"]
    assert row_filter.take({"loss": 1.0}, 3, None, 0.0) == ["loss"]


def test_row_takes_what_belongs_to_its_step_and_nothing_twice() -> None:
    row = WandbRow(3)
    row.add({"train/loss": 1.0}, 0.5, 7.0)
    assert row.fits(3, {"val/loss": 1.0})
    assert not row.fits(3, {"train/loss": 1.0})
    assert not row.fits(4, {"val/loss": 1.0})
    assert not WandbRow(None).fits(None, {"val/loss": 1.0})
    row.add({"val/loss": 2.0}, None, 8.0)
    numbers = {"train/loss": 1.0, "val/loss": 2.0}
    assert row.as_logged("", 2) == {**numbers, "step": 3, "epoch": 0.5, "attempt": 2, "_timestamp": 8.0}
    assert row.as_logged("rank_1/", 1)["rank_1/step"] == 3


def test_metric_called_step_is_not_overwritten() -> None:
    row = WandbRow(3)
    row.add({"step": 99.0}, None, 0.0)
    assert row.as_logged("", 1)["step"] == 99.0


# --- The parts of a W&B run on the disk, and which of them have to be sent ---


def make(folder: Path, time: str, run_id: str = "w1", *, offline: bool = False, mark: str | None = None) -> None:
    part = folder / f"{'offline-' if offline else ''}run-20250101_{time}-{run_id}"
    part.mkdir(parents=True)
    (part / f"run-{run_id.partition('-')[0]}.wandb").touch()
    if mark is not None:
        (part / UNSENT).write_text(mark)


def times(parts: list[RunPart]) -> list[str]:
    return [part.began.partition("_")[2] for part in parts]


@pytest.mark.parametrize(
    ("offline", "mark", "is_sent"),
    [(True, None, False), (False, None, True), (False, SENT, True), (False, OPEN, False), (False, "", False)],
)
def test_part_is_sent_by_its_mark(tmp_path: Path, offline: bool, mark: str | None, is_sent: bool) -> None:
    make(tmp_path, "000001", offline=offline, mark=mark)
    (part,) = parts_below(tmp_path)
    assert part.sent is is_sent
    part.log.with_suffix(".wandb.synced").touch()
    assert part.sent


def test_killed_part_is_not_sent_again_if_the_run_continued_online(tmp_path: Path) -> None:
    make(tmp_path, "000001", mark=OPEN)
    assert times(unsent_parts(parts_below(tmp_path))) == ["000001"]
    make(tmp_path, "000002", mark=SENT)
    assert unsent_parts(parts_below(tmp_path)) == []
    make(tmp_path, "000003", mark=OPEN)
    assert times(unsent_parts(parts_below(tmp_path))) == ["000003"], "nothing came after it"


def test_part_that_ended_without_being_sent_waits_whatever_came_after_it(tmp_path: Path) -> None:
    make(tmp_path, "000001", mark="")
    make(tmp_path, "000002", mark=SENT)
    assert times(unsent_parts(parts_below(tmp_path))) == ["000001"]


def test_rank_of_a_shared_run_is_sent_as_a_run_of_its_own(tmp_path: Path) -> None:
    make(tmp_path, "000001", "w1-rank_2", mark=OPEN)
    make(tmp_path, "000002", "w1", mark=SENT)
    shared, whole = parts_below(tmp_path)
    assert (shared.run_id, shared.rank, shared.target) == ("w1", "rank_2", "w1-rank_2")
    assert (whole.run_id, whole.rank, whole.target) == ("w1", "", "w1")
    assert unsent_parts([shared, whole]) == [shared], "the other run continued, this one did not"


def test_other_folders_and_links_are_no_parts(tmp_path: Path) -> None:
    make(tmp_path / "below", "000001")
    (tmp_path / "run-20250101_000002-w2").mkdir()
    (tmp_path / "run-20250101_000002-w2" / "run-w2.wandb").symlink_to(tmp_path / "elsewhere")
    make(tmp_path / "two" / "deep", "000003")
    assert times(parts_below(tmp_path)) == ["000001"]
    assert parts_below(tmp_path / "missing") == []


def test_damaged_links_are_none(tmp_path: Path) -> None:
    assert links_in(tmp_path) == {}
    (tmp_path / "links.json").write_text('{"w1": "http://x"}')
    assert links_in(tmp_path) == {"w1": "http://x"}
    for damaged in ("[1]", "{", "3"):
        (tmp_path / "links.json").write_text(damaged)
        assert links_in(tmp_path) == {}

"""Which numbers go to W&B, and in which rows."""

from __future__ import annotations

from ddptrain.tracking.wandb.tracker import RowFilter, WandbRow


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


def test_value_that_went_is_not_sent_again_at_the_end() -> None:
    row_filter = RowFilter(10)
    row_filter.take({"loss": 1.0}, 10, None, 0.0)
    assert row_filter.rest() == {}


def test_numbers_without_a_step_always_go() -> None:
    row_filter = RowFilter(10)
    assert [row_filter.take({"loss": 1.0}, None, None, 0.0) for _ in range(3)] == [["loss"]] * 3


def test_steps_that_begin_again_are_logged_at_once() -> None:
    row_filter = RowFilter(10)
    assert row_filter.take({"loss": 1.0}, 1000, None, 0.0) == ["loss"]
    assert row_filter.take({"loss": 1.0}, 3, None, 0.0) == ["loss"]


def test_every_step_goes_where_log_every_is_one() -> None:
    row_filter = RowFilter(1)
    assert all(row_filter.take({"loss": 1.0}, step, None, 0.0) for step in range(5))


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

"""Creates and locks the directory of a new run, or locks the directory of a run to resume."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ddptrain.config.wording import shorten
from ddptrain.errors import RunLocked, UsageError
from ddptrain.results.errors import results_errors
from ddptrain.results.layout import RunLayout, new_run_id, valid_run_id
from ddptrain.results.lookup import RunView, load_run
from ddptrain.results.ownership import run_lock
from ddptrain.results.run_record import DriverRecord
from ddptrain.results.secure_files import require_own_folder

# The files that a driver creates before run.json. If it is killed in between, the same run id can be used again.
_BEFORE_RECORD = re.compile(
    r"run\.lock|config\.yaml|logs|checkpoints|artifacts|(events|metrics)\.jsonl|\.heartbeat|\..+\.tmp"
)


def check_run_id(run_id: str) -> None:
    """Check that a run's folder can have that name. Raises UsageError otherwise."""
    if not valid_run_id(run_id):
        raise UsageError(
            f'"{shorten(run_id)}" is not a run id: use up to 128 letters, digits, dots, dashes and underscores, '
            "not a reserved word such as latest"
        )


def claim(runs_dir: Path, run_id: str | None, name: str) -> tuple[RunLayout, int]:
    """Create the directory of a new run and take its lock; return its layout and the descriptor that holds the lock.

    run_id: None for a new id that begins with `name`. Raises UsageError, RunLocked, ResultsError.
    """
    if run_id is not None:
        check_run_id(run_id)
    _make_runs_dir(runs_dir)
    while True:
        layout = RunLayout(runs_dir / (run_id or new_run_id(name)))
        with results_errors(layout.root):
            try:
                layout.root.mkdir(mode=0o755)
            except FileExistsError:
                if run_id is None:
                    continue
                _refuse_unless_free(layout)
        require_own_folder(layout.root)
        descriptor = run_lock.take(layout.lock_file)
        try:
            _refuse_unless_free(layout)
        except BaseException:
            os.close(descriptor)
            raise
        return layout, descriptor


def continue_run(folder: Path, expected_driver: DriverRecord | None) -> tuple[RunView, int]:
    """Take the lock of a run that has ended; return the run, and the descriptor that holds the lock.

    expected_driver: the last driver of the run when the caller chose it; None: any.

    Raises RunLocked if another process runs it, or has run it since it was chosen; UsageError, ResultsError.
    """
    layout = RunLayout(folder)
    require_own_folder(layout.root)
    descriptor = run_lock.take(layout.lock_file)
    try:
        view = load_run(layout.root, is_ours=True)
        _refuse_unless_ended(view, expected_driver)
        with results_errors(layout.stop_json):
            layout.stop_json.unlink(missing_ok=True)  # a request to the previous driver
    except BaseException:
        os.close(descriptor)
        raise
    return view, descriptor


def _make_runs_dir(runs_dir: Path) -> None:
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"make the folder {runs_dir}: {error.strerror}"
        if isinstance(error, FileExistsError | NotADirectoryError):
            why = f"keep runs in {runs_dir}: it is not a folder"
        raise UsageError(f"cannot {why}; choose another with --runs-dir") from error


def _refuse_unless_free(layout: RunLayout) -> None:
    """Raise if the folder has a run, or files other than those of a driver that was killed before it wrote run.json."""
    try:
        names = os.listdir(layout.root)
    except NotADirectoryError:
        names = [layout.root.name]
    taken = bool(names) and not (layout.lock_file.name in names and all(map(_BEFORE_RECORD.fullmatch, names)))
    if taken and not layout.run_json.exists():
        raise UsageError(f"{layout.root} exists and is not a run's folder; choose another --run-id")
    if taken and run_lock.is_held(layout.lock_file):
        raise RunLocked(f"run {layout.root.name} is running; wait for it, or choose another --run-id")
    if taken:
        raise UsageError(f"run {layout.root.name} exists already in {layout.root.parent}; choose another --run-id")


def _refuse_unless_ended(view: RunView, expected_driver: DriverRecord | None) -> None:
    driver = view.record.driver
    if view.problem:
        raise UsageError(f"run {view.run_id} can't be resumed: {view.problem}")
    if view.is_running and view.layout.is_original:
        raise RunLocked(
            f"run {view.run_id} is running on another host: {driver.description} still writes to it; "
            "wait for it to end, or "
            f"stop it with ddptrain stop {view.run_id}"
        )
    if expected_driver is not None and driver != expected_driver:
        raise RunLocked(f"run {view.run_id} was resumed by {driver.description} in the meantime; run the command again")

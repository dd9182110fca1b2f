"""Where reports are written, and what happens if that fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddptrain.errors import ClusterError, UsageError
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord
from ddptrain.reports.destinations import Destinations, Reporting, write_reports
from ddptrain.reports.facts import RunReport
from tests.unit.reports.runs import failed_run, run


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def github(folder: Path) -> dict[str, str]:
    return {
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(folder),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }


def chosen(report: str | None = None, junit: str | None = None, **environ: str) -> Destinations:
    return Destinations.chosen([file for file in (report, junit) if file is not None], environ)


def test_without_ci_and_options_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not chosen().are_wanted
    write_reports(RunReport("a", "failed", 1, "x"), chosen())
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_lines_of_ranks_are_no_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = failed_run(tmp_path, logs={1: "::error::a\n::endgroup::\nx\r::stop-commands::t\n##[error]b\n\x1b]0;x\x07\n"})
    write_reports(RunReport.of_run(view), chosen(**github(tmp_path)))
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("::")] == [lines[-1]]


def test_rejection_is_a_warning_with_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = [GateOutcome("loss", False, "loss 2 is not < 1"), GateOutcome("accuracy", True, "fine")]
    retraining = RetrainRecord(1, "m", "", gate=tuple(gate))
    write_reports(RunReport("m", "rejected", 7, retraining=retraining), chosen(**github(tmp_path)))
    assert capsys.readouterr().err == "::warning title=ddptrain%3A m rejected::loss 2 is not < 1\n"


def test_gitlab_gets_the_last_lines_and_a_plain_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_reports(RunReport.of_run(failed_run(tmp_path)), chosen(GITLAB_CI="true", CI_PROJECT_DIR=str(tmp_path)))
    lines = capsys.readouterr().err.split("\n")
    assert lines[:3] == ["last lines of rank 1:", "[rank 1] step 1", "[rank 1] ValueError: wrong shape"]
    assert lines[3] == "ddptrain: error at train.py:4: rank 1 on node-1: ValueError: wrong shape"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy-1", "train.py"]


def test_report_that_is_the_summary_is_written_once(tmp_path: Path) -> None:
    (tmp_path / "summary.md").write_text("from the step\n")
    write_reports(RunReport("a", "succeeded", 0), chosen("summary.md", **github(tmp_path)))
    assert (tmp_path / "summary.md").read_text() == "from the step\n\n## ✅ `a`: succeeded\n\nexit code 0\n"


def test_switch_turns_it_off_but_not_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {**github(tmp_path), "DDPTRAIN_CI": "off"}
    assert not chosen(**environ).are_wanted
    write_reports(RunReport.of_run(failed_run(tmp_path)), chosen("r.md", **environ))
    assert (tmp_path / "r.md").exists()
    assert not (tmp_path / "summary.md").exists()
    assert capsys.readouterr() == ("", "")


def test_summary_never_exceeds_the_limit_of_github(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("x" * ((1 << 20) - 600))
    view = failed_run(tmp_path)
    write_reports(RunReport.of_run(view), chosen(**github(tmp_path)))
    assert (1 << 20) - 600 < summary.stat().st_size <= 1 << 20
    assert "_The rest was left out" in summary.read_text()
    summary.write_text("x" * (1 << 20))
    write_reports(RunReport.of_run(view), chosen(**github(tmp_path)))
    assert summary.stat().st_size == 1 << 20
    warning = f"ddptrain: warning: the step summary {summary} could not be written: it has no room left; "
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--report : this is a folder; name a file in it"),
        ("folder", "--report folder: this is a folder; name a file in it"),
        ("new/", "--report new/: this is a folder; name a file in it"),
        ("fifo", "--report fifo: this is not a regular file; name another one"),
        ("/dev/stdout", "--report /dev/stdout: this is not a regular file; name another one"),
        ("file/r.md", "--report file/r.md cannot be written: "),
        ("a\0b", "--report a\\\\u0000b cannot be written: "),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=message):
        chosen(name)
    assert sorted(tmp_path.iterdir()) == before


def test_one_file_for_both_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one Markdown file"):
        chosen("r.md", "./r.md")


def test_link_is_kept_and_its_file_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.md").write_text("old")
    (tmp_path / "link.md").symlink_to("real.md")
    write_reports(RunReport("a", "succeeded", 0), chosen("link.md"))
    assert (tmp_path / "link.md").is_symlink()
    assert (tmp_path / "real.md").read_text().startswith("## ✅ `a`")


def test_failure_of_one_file_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    destinations = chosen("gone/r.md", "j.xml")
    (tmp_path / "gone").rmdir()
    write_reports(RunReport("a", "succeeded", 0), destinations)
    assert capsys.readouterr().err == (
        f"ddptrain: warning: the report {tmp_path}/gone/r.md could not be written: No such file or directory; the "
        "result of the run is not affected\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j.xml"]


def test_error_that_prevents_a_run_is_reported_and_raised(tmp_path: Path) -> None:
    with pytest.raises(ClusterError), Reporting("toy", chosen("r.md")):
        raise ClusterError("no cluster")
    assert (tmp_path / "r.md").read_text() == "## ❌ `toy`: failed\n\n`no cluster`\n\nexit code 4\n"


def test_report_of_a_run_is_not_replaced_by_a_later_error(tmp_path: Path) -> None:
    reporting = Reporting("toy", chosen("r.md"))
    reporting.on_end(run(tmp_path))
    with pytest.raises(ClusterError), reporting:
        raise ClusterError("the lock is lost")
    assert (tmp_path / "r.md").read_text().startswith("## ✅ `toy`: succeeded\n")


def test_check_that_starts_nothing_is_reported(tmp_path: Path) -> None:
    with Reporting("toy", chosen("r.md")) as reporting:
        reporting.checked()
    assert (tmp_path / "r.md").read_text() == "## ✅ `toy`: checked\n\nexit code 0\n"

"""Where reports go: the files that the user asked for, and the CI service that runs the command."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ddptrain import ci
from ddptrain.ci import CiService, ci_service
from ddptrain.config.wording import shorten
from ddptrain.errors import DdptrainError, ExitCode, UsageError, one_line
from ddptrain.file_ops import open_append, write_all, write_atomic
from ddptrain.redact import hide_credentials
from ddptrain.sanitize import sanitized

if TYPE_CHECKING:
    from ddptrain.reports.facts import RunReport
    from ddptrain.results.run import Run

_SUMMARY_BYTES = 1 << 20  # of one step; GitHub refuses all of it if it is longer
_MOST_ANNOTATIONS = 10  # of one step that GitHub keeps
_MESSAGE_CHARACTERS = 2000
_DEVICES = ("/dev/", "/proc/")
_WORKSPACES = ("GITHUB_WORKSPACE", "CI_PROJECT_DIR")


@dataclass(frozen=True, slots=True)
class Destinations:
    """report: a Markdown file. junit: a JUnit XML file. summary: the file of GitHub's step summary.

    workspace: the checkout of the job; files are named relative to it. environ: names the job and its commit.
    """

    report: Path | None
    junit: Path | None
    service: CiService
    summary: Path | None
    workspace: Path
    environ: Mapping[str, str]

    @classmethod
    def chosen(cls, files: Sequence[str], environ: Mapping[str, str] = os.environ) -> Self:
        """Return the destinations for the files of --report (.xml is JUnit, others are Markdown), and for the CI job.

        Missing folders of the files are created. Raises UsageError if a file could not be written.
        """
        service = ci_service(environ)
        found = {file.endswith(".xml"): writable_file("--report", file) for file in files}
        markdown, xml = found.get(False), found.get(True)
        if len(found) < len(files):
            raise UsageError("--report: give one Markdown file and one .xml file at most")
        named = environ.get("GITHUB_STEP_SUMMARY", "") if service is CiService.GITHUB else ""
        summary = Path(os.path.realpath(named)) if named else None
        if markdown == summary:
            markdown = None  # the summary has the same text, and other programs append to it
        workspace = next((Path(environ[name]) for name in _WORKSPACES if environ.get(name)), Path.cwd())
        return cls(markdown, xml, service, summary, workspace, environ)

    @property
    def are_wanted(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.report or self.junit or self.service)


def writable_file(option: str, name: str) -> Path:
    """Return the file, whose folder exists afterwards. Raises UsageError if it cannot be written."""
    given = f"{option} {shorten(name, 300)}"
    try:
        path = Path(os.path.realpath(name))
        if not name or name.endswith("/") or path.is_dir():
            raise UsageError(f"{given}: this is a folder; name a file in it")
        is_device = os.path.abspath(name).startswith(_DEVICES)  # /dev/stdout may lead to a file that is in use
        if is_device or (path.exists() and not stat.S_ISREG(path.stat().st_mode)):
            raise UsageError(f"{given}: this is not a regular file; name another one")
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        raise UsageError(f"{given} cannot be written: {_reason(error)}; name another file") from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{given} cannot be written: no permission for its folder; name another file")
    return path


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or one_line(error)


def write_reports(report: RunReport, destinations: Destinations) -> None:
    """Write the report to all destinations. A destination that fails has one warning on stderr; nothing is raised."""
    if not destinations.are_wanted:
        return
    try:
        from ddptrain.reports.junit import junit_xml
        from ddptrain.reports.markdown import COMMENT_CHARACTERS, markdown

        report = replace(report, workspace=destinations.workspace)
        if destinations.service:  # on stderr: with --output json, stdout has JSON lines only, and CI services read both
            _write_stderr(_job_log(report, destinations))
    except Exception as error:  # a report must not change the result of a run
        _warn(f"the report could not be made: {type(error).__name__}: {one_line(error)}")
        return

    def text(most_bytes: int = COMMENT_CHARACTERS) -> bytes:
        return markdown(report, destinations.environ, most_bytes).encode()

    files: tuple[tuple[str, Path | None, Callable[[Path], None]], ...] = (
        ("the step summary", destinations.summary, lambda path: _append_summary(path, text)),
        ("the report", destinations.report, lambda path: write_atomic(path, text(), durable=False)),
        ("the JUnit file", destinations.junit, lambda path: write_atomic(path, junit_xml(report), durable=False)),
    )
    for what, path, write in files:
        try:
            if path is not None:
                write(path)
        except Exception as error:  # a report must not change the result of a run
            _warn(f"{what} {path} could not be written: {_reason(error)}; the result of the run is not affected")


def _append_summary(path: Path, text_of: Callable[[int], bytes]) -> None:
    descriptor = open_append(path, create_mode=0o644)
    try:
        size = os.fstat(descriptor).st_size
        text = text_of(max(0, _SUMMARY_BYTES - size - 1))
        if not text:
            raise OSError("it has no room left")
        write_all(descriptor, b"\n" * bool(size) + text)
    finally:
        os.close(descriptor)


def _warn(text: str) -> None:
    _write_stderr(f"ddptrain: warning: {sanitized(text)}\n")


def _write_stderr(text: str) -> None:
    if sys.stderr is not None and text:
        with suppress(OSError, ValueError):  # nobody reads it
            if sys.stdout is not None:
                sys.stdout.flush()
            sys.stderr.write(text)
            sys.stderr.flush()


def _job_log(report: RunReport, destinations: Destinations) -> str:
    """Return the lines for the log of the job: the last lines of ranks, and annotations at the user's lines."""
    found: list[str] = []
    for rank, lines in report.tails.items():
        found.append(f"last lines of rank {rank}:\n")
        found += [f"[rank {rank}] {sanitized(line)}\n" for line in lines]
    if destinations.service is CiService.GITHUB:
        found += [f"{line}\n" for line in _annotations(report, destinations.workspace)]
    elif report.source is not None:
        found.append(f"ddptrain: error at {report.source}: {_message(report)}\n")
    return "".join(found)


def _annotations(report: RunReport, workspace: Path) -> Iterator[str]:
    from ddptrain.reports.facts import line_of_problem

    for problem in report.problems[:_MOST_ANNOTATIONS]:
        place = line_of_problem(problem, workspace, Path.cwd())
        text = f"{problem.key}: {problem.message}" if problem.key else problem.message
        title = "ddptrain: the configuration is wrong"
        if place is not None:
            yield ci.annotation("error", _safe(text), title=title, file=place.file, line=place.line)
        else:
            yield ci.annotation("error", _safe(f"{problem.where}: {text}"), title=title)
    if not report.problems and report.level:
        title = _safe(f"ddptrain: {report.model or report.name} {report.status}")
        file, line = (report.source.file, report.source.line) if report.source is not None else ("", 0)
        yield ci.annotation(report.level, _message(report), title=title, file=file, line=line)


def _message(report: RunReport) -> str:
    return _safe(report.cause or f"exit code {report.exit_code}")


def _safe(text: str) -> str:
    return shorten(sanitized(hide_credentials(one_line(text))), _MESSAGE_CHARACTERS)


class Reporting:
    """Reports the end of one command: that of its run, which it observes, or the error that prevented the run.

    with Reporting(name, destinations) as reporting:
        ...  # calls reporting.ended(report)
    """

    def __init__(self, name: str, destinations: Destinations) -> None:
        """`name` is for reports without a run, as "petnames"; `secrets` are those of the configuration, once known."""
        self.name, self.destinations = name, destinations
        self.secrets: Sequence[str] = ()
        self._done = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DdptrainError) and not self._done:
            self._report(lambda report: report.of_error(self.name, error))

    def ended(self, report: RunReport) -> None:
        """Write the report to all destinations."""
        self._done = True
        write_reports(report, self.destinations)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Do nothing: a report is about the end of a run."""

    def on_end(self, run: Run) -> None:
        """Write the report of a run."""
        self._report(lambda report: report.of_run(run, secrets=self.secrets))

    def checked(self) -> None:
        """Write the report of a check that started nothing."""
        self._report(lambda report: report(self.name, "checked", ExitCode.SUCCEEDED))

    def _report(self, make: Callable[[type[RunReport]], RunReport]) -> None:
        if self.destinations.are_wanted:  # otherwise nothing is imported
            from ddptrain.reports.facts import RunReport

            self.ended(make(RunReport))

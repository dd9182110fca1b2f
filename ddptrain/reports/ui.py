"""`ddptrain ui`: pages about the runs, sweeps and models of a place, for a browser on this machine. It writes nothing.

A request needs the token, which is the first part of its path, and the name of this machine as its host, so that a
web site whose name leads to 127.0.0.1 gets nothing. One user asks for a page every two seconds: the standard library's
server does that in 60 lines, without a dependency.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ddptrain.errors import DdptrainError, RunNotFound, UsageError, one_line
from ddptrain.file_ops import sha256
from ddptrain.log import Log
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.reports.page import FILES, MOST_RUNS, Page, RunCard, body_html, page_html, page_json, policy, runs_page
from ddptrain.results.layout import valid_run_id
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunStatus
from ddptrain.results.runs import open_runs_dir
from ddptrain.results.show.render import rows
from ddptrain.results.sweep_record import FoundSweep, find_sweep, list_sweeps
from ddptrain.sanitize import sanitized

_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # a tunnel of ssh may have another port
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/\d{1,9})?")
_HEADERS = {
    "Content-Security-Policy": f"{policy()}; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_log = Log(__name__)


class Site:
    """The pages of a place, by the query of their address.

    They are ?run=RUN, ?compare=RUN&compare=RUN, ?sweep=SWEEP, ?models, and the list of runs without a query. Each is
    HTML; with &json=VERSION it is what has changed since that version.
    """

    def __init__(self, runs_dir: str, models_dir: str) -> None:
        """Raises UsageError, StoreError if the place of the runs cannot be read."""
        self._runs_dir, self._models_dir = runs_dir, models_dir
        self._runs = open_runs_dir(runs_dir)

    def answer(self, query: Mapping[str, Sequence[str]]) -> tuple[str, bytes]:
        """Return the type and the content of a page. Raises RunNotFound and other errors of the results."""
        if "curves" in query:
            card = RunCard(self._run(query["curves"][0]), of=max(1, int(query.get("of", ["1"])[0])))
            return "application/json", _json({"curves": card.curves})
        page, is_live = self._page(query)
        if "json" not in query:
            return "text/html; charset=utf-8", page_html(page)
        body, curves = body_html(page), page_json(page.data.get("curves"))
        now = [sha256(part.encode("utf-8", "replace")).hexdigest()[:16] for part in (body, curves)]
        seen = query["json"][0].split(".")
        news: dict[str, object] = {"version": ".".join(now), "ended": not is_live}
        news |= {} if seen[:1] == now[:1] else {"body": body}
        news |= {} if seen[1:] == now[1:] else page.data
        return "application/json", _json(news)

    def _page(self, query: Mapping[str, Sequence[str]]) -> tuple[Page, bool]:
        """Return a page, and whether it may change."""
        if "run" in query:
            view = self._run(query["run"][0])
            return self._live(runs_page([view], is_served=True), view.goes_on)
        if "compare" in query:
            views = [self._run(name) for name in dict.fromkeys(query["compare"])][:MOST_RUNS]
            page = runs_page(views, is_served=True, with_curves=False)
            for name, run in zip(dict.fromkeys(query["compare"]), page.data["runs"], strict=False):
                run["query"] = f"?curves={name}&of={len(views)}"
            return self._live(page, any(view.goes_on for view in views))
        if "sweep" in query:
            sweep = self._sweep(query["sweep"][0]).record
            return self._live(runs_page([], sweep, is_served=True), sweep.status == RunStatus.RUNNING)
        if "models" in query:
            models = ModelRegistry.open(self._models_dir)
            found = [(name, models.state(name), models.versions(name)[::-1]) for name in models.models()]
            return self._live(Page("models", "Models", models.where, rows=found, is_served=True), True)
        views = self._runs.list()
        shown = [(view, row[2], row[4], row[5]) for view, row in zip(views, rows(views), strict=True)]
        sweeps = [found.record for found in list_sweeps(self._runs_dir)]
        return self._live(Page("list", "Runs", self._runs.where, rows=shown, sweeps=sweeps, is_served=True), True)

    def _live(self, page: Page, is_live: bool) -> tuple[Page, bool]:
        return replace(page, data={"runs": [], "curves": [], **page.data, "live": is_live}), is_live

    def _run(self, name: str) -> Run:
        """Return a run by its id, or a trial as SWEEP/7; a name never is a path. Raises RunNotFound."""
        view = None
        if _NAME.fullmatch(name):
            sweep, _, number = name.partition("/")
            runs, run_id = self._runs, name
            if number:
                found = self._sweep(sweep)
                ids = [trial.run_ids for trial in found.record.trials if trial.number == int(number)]
                runs, run_id = found.trials, next((own[-1] for own in ids if own), "-")
            view = runs.get(run_id) if valid_run_id(run_id) else None
        if view is None:
            raise RunNotFound(f"there is no run {name} in {self._runs.where}")
        return view.fetch(*FILES)

    def _sweep(self, name: str) -> FoundSweep:
        found = find_sweep(self._runs_dir, name) if _NAME.fullmatch(name) else None
        if found is None:
            raise RunNotFound(f"there is no sweep {name} in {self._runs.where}")
        return found


def _json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8", "replace")


class _Server(ThreadingHTTPServer):
    """Serves a site on 127.0.0.1; pages are made one after the other."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, site: Site, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.site, self.token, self.lock = site, secrets.token_urlsafe(24), threading.Lock()

    @property
    def url(self) -> str:
        """The address of the list of runs."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what went wrong: most often the browser has closed the connection."""
        _log.info("request failed", error=one_line(sys.exception() or ""))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: _Server

    def do_GET(self) -> None:
        """Answer a request."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        parts = urlsplit(self.path)
        token = parts.path.split("/")[1]
        if host.rpartition(":")[0] not in _HOSTS and host not in _HOSTS:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"This server answers to 127.0.0.1 and localhost only.\n")
        elif origin not in (None, f"http://{host}") or not hmac.compare_digest(
            token.encode("utf-8", "replace"), self.server.token.encode()
        ):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"Open the address that ddptrain ui has printed.\n")
        elif parts.path != f"/{token}/":
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is no such page.\n")
        else:
            try:
                with self.server.lock:
                    kind, content = self.server.site.answer(parse_qs(parts.query, keep_blank_values=True))
                self._send(HTTPStatus.OK, kind, content)
            except ConnectionError:  # the browser has left the page
                self.close_connection = True
            except Exception as error:  # of files that anyone may have written; the server goes on
                is_missing = isinstance(error, DdptrainError | ValueError)
                if not is_missing:
                    _log.warning("page not made", path=self.path, error=error)
                text = sanitized(one_line(error))
                self._send(
                    HTTPStatus.NOT_FOUND if is_missing else HTTPStatus.INTERNAL_SERVER_ERROR,
                    "text/plain; charset=utf-8",
                    f"{text}\n".encode("utf-8", "replace"),
                )

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name of the base class
        """Print nothing."""


def serve(runs_dir: str, models_dir: str, port: int, *, opens_browser: bool) -> None:
    """Serve the pages until Ctrl-C; print their address. Raises UsageError if the port is taken; StoreError."""
    site = Site(runs_dir, models_dir)
    try:
        server = _Server(site, port)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}; choose another, or leave it out for a free one") from error
    with ExitStack() as ending:
        ending.callback(server.server_close)
        print(f"runs in {runs_dir}: {server.url} (Ctrl-C ends this)", flush=True)
        if opens_browser:
            # The browser gets a file of this user: other users see the arguments of programs.
            folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="ddptrain-ui-")))
            (folder / "open.html").write_text(f'<meta http-equiv="refresh" content="0;url={server.url}">\n')
            threading.Thread(target=webbrowser.open, args=((folder / "open.html").as_uri(),), daemon=True).start()
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)

"""Calls to Saturn Cloud through dask-saturn, with errors of one line each.

SaturnCluster 0.4 is used without its constructor, for three reasons. The constructor returns the id only when the
cluster is ready, so an interrupted start could not be ended. It registers a worker plugin by a method that Dask no
longer has. Dask's destructor requests the status of a cluster that was never opened here. Ranks don't need the plugin:
it resolves the scheduler's name, and puts the working directory on the workers' sys.path.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit

from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import ClusterError, UsageError
from ddptrain.optional_packages import install_command
from ddptrain.redact import hide_credentials

if TYPE_CHECKING:
    from distributed import Security
    from requests import Response

CLOSED = ("closed", "stopped", "")
_TIMEOUT_S = (5.0, 30.0)  # to connect, to answer
_CALL_S = 60.0
_MOST_OF_A_MESSAGE = 300
_T = TypeVar("_T")


class NotTaken(ClusterError):
    """The request has not reached Saturn or was refused: nothing has changed there."""


class Saturn:
    """The API of one Saturn installation for one user."""

    def __init__(self, url: str | None) -> None:
        """Raise UsageError where dask-saturn, the URL or the token is missing."""
        # Otherwise the import of dask_saturn configures logging for the whole process, with lines for each step.
        logging.getLogger("dask-saturn").setLevel(logging.WARNING)
        try:
            import dask_saturn  # noqa: F401
        except ImportError as error:
            raise UsageError(
                f"cluster.backend saturn needs dask-saturn ({error}): {install_command('saturn')}"
            ) from error
        self.url = url or os.environ.get("SATURN_BASE_URL", "")
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            got = f', got "{shorten(hide_credentials(self.url))}"' if self.url else ""
            raise UsageError(
                f"SATURN_BASE_URL or cluster.saturn.url must be the address of Saturn, as https://...{got}"
            )
        token = os.environ.get("SATURN_TOKEN", "")
        if not token:
            raise UsageError("SATURN_TOKEN is not set: it must contain a token of Saturn (its user settings show it)")
        self._settings = _settings(self.url, token)
        self._place = shorten(hide_credentials(self.url))

    @property
    def is_external(self) -> bool:
        """Whether this machine is outside of Saturn; its clusters require TLS then."""
        return bool(self._settings.is_external)

    def check_sizes(self, sizes: Sequence[str]) -> None:
        """Raise UsageError for machine sizes that Saturn does not have, ClusterError if Saturn can't be asked."""
        if not sizes:
            return
        known = [str(size["name"]) for size in self._data("GET", "info")["server_options"]["size"]]
        for size in sizes:
            if size not in known:
                raise UsageError(f'Saturn has no machines of size "{shorten(size)}" ({did_you_mean(size, known)})')

    def order(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Request the cluster, maybe again; returns its "status", "id" if known. Raises UsageError, ClusterError."""
        query = "?is_external=true" if self.is_external else ""
        answer: Mapping[str, Any] = self._data("POST", query, json.dumps(config))
        return answer

    def status(self, cluster_id: str) -> str:
        """Return the status as Saturn calls it, "" if the cluster does not exist. Raises UsageError, ClusterError."""
        for path in (f"{cluster_id}/status", cluster_id):
            response = self._response("GET", path)
            if response.ok:
                return str(self._parsed(response)["status"])
        if response.status_code == HTTPStatus.NOT_FOUND:
            return ""
        raise self._refusal(response)

    def scheduler(self, cluster_id: str) -> tuple[str, str]:
        """Return the scheduler's address and the dashboard's link. Raises ClusterError."""
        info = self._called("give the address", lambda: self._cluster(cluster_id)._get_info())  # noqa: SLF001
        return str(info["scheduler_address"]), str(info["dashboard_link"] or "")

    def workers(self, cluster_id: str) -> int:
        """Return how many workers have joined. Raises ClusterError."""
        return len(self._called("list the workers", lambda: self._cluster(cluster_id).scheduler_info)["workers"])

    def scale(self, cluster_id: str, machines: int) -> None:
        """Scale to that many worker machines. Raises ClusterError."""
        self._called("scale the cluster", lambda: self._cluster(cluster_id).scale(machines))

    def close(self, cluster_id: str) -> None:
        """End the cluster. Raises ClusterError."""
        self._called("close the cluster", lambda: self._cluster(cluster_id).close())

    def security(self, cluster_id: str) -> Security:
        """Return a new key, and a certificate for it that Saturn has signed. Raises ClusterError."""
        from dask_saturn.external import _security

        signed: Security = self._called("sign a certificate", lambda: _security(self._settings, cluster_id))
        return signed

    def _cluster(self, cluster_id: str) -> Any:
        return _cluster_class()(self._settings, urljoin(self.url, f"api/dask_clusters/{cluster_id}/"))

    def _called(self, what: str, call: Callable[[], _T]) -> _T:
        """Return what dask-saturn returns, which sets no time limit for its requests."""
        import requests

        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="ddptrain-saturn", daemon=True).start()
        try:
            return answer.result(_CALL_S)
        except TimeoutError as error:
            raise ClusterError(f"Saturn at {self._place} could not {what}: no answer within {_CALL_S:g} s") from error
        except requests.JSONDecodeError as error:
            raise ClusterError(f"Saturn at {self._place} could not {what}: its answer is not JSON") from error
        except requests.ConnectionError as error:
            raise self._unreachable(error) from error
        except (requests.RequestException, ValueError, KeyError) as error:
            raise ClusterError(f"Saturn at {self._place} could not {what}: {_line(str(error))}") from error

    def _data(self, method: str, path: str, body: str | None = None) -> Any:
        response = self._response(method, path, body)
        if not response.ok:
            raise self._refusal(response)
        return self._parsed(response)

    def _response(self, method: str, path: str, body: str | None = None) -> Response:
        """Send a request; returns any answer except a refused token. Raises UsageError, ClusterError."""
        import requests

        url = urljoin(self.url, "api/dask_clusters") + (path if path.startswith("?") or not path else f"/{path}")
        try:
            response = requests.request(method, url, data=body, headers=self._settings.headers, timeout=_TIMEOUT_S)
        except requests.ConnectionError as error:
            raise self._unreachable(error) from error
        except requests.RequestException as error:
            raise ClusterError(f"Saturn at {self._place} does not answer: {_line(str(error))}") from error
        if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise UsageError(
                f"Saturn at {self._place} refuses the token in SATURN_TOKEN ({response.status_code}{_said(response)})"
            )
        return response

    def _parsed(self, response: Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            kind = response.headers.get("Content-Type", "something")
            raise ClusterError(
                f"{self._place} answers with {_line(kind)} instead of JSON: is SATURN_BASE_URL that of Saturn?"
            ) from error

    def _refusal(self, response: Response) -> NotTaken:
        return NotTaken(f"Saturn at {self._place} refuses: {response.status_code}{_said(response)}")

    def _unreachable(self, error: BaseException) -> ClusterError:
        cause = _innermost(error)
        if isinstance(cause, ConnectionResetError | BrokenPipeError):  # the request may have arrived
            return ClusterError(f"Saturn at {self._place} has hung up without an answer")
        return NotTaken(f"Saturn can't be reached at {self._place}: {cause.strerror or _line(str(error))}")


def _settings(url: str, token: str) -> Any:
    """Return settings of dask-saturn with a URL that does not come from the environment."""
    from dask_saturn.settings import Settings

    class At(Settings):  # type: ignore[misc]  # it has no types
        def __init__(self) -> None:
            self.SATURN_BASE_URL = url
            self.SATURN_TOKEN = token

    return At()


def _cluster_class() -> type[Any]:
    from dask_saturn import SaturnCluster

    class Attached(SaturnCluster):  # type: ignore[misc]  # it has no types
        """An existing cluster, identified by its URL; see the docstring of the module."""

        def __init__(self, settings: Any, cluster_url: str) -> None:
            self.settings = settings
            self.cluster_url = cluster_url
            self.periodic_callbacks: dict[str, Any] = {}

        def __del__(self) -> None:
            """Do nothing: nothing was opened."""

    return Attached


def _said(response: Response) -> str:
    """Return the error message in an answer."""
    try:
        message = str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        message = response.reason or ""
    return f": {_line(message)}" if message else ""


def _innermost(error: BaseException) -> OSError:
    """Return the error message of the operating system, which `requests` wraps in several exceptions."""
    found = OSError()
    layer: BaseException | None = error
    while layer is not None:
        if isinstance(layer, OSError) and (layer.strerror or isinstance(layer, ConnectionResetError)):
            found = layer
        layer = layer.__cause__ or layer.__context__
    return found


def _line(text: str) -> str:
    return shorten(" ".join(text.split()), _MOST_OF_A_MESSAGE)

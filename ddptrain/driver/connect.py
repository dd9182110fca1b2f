"""Connects the driver to a scheduler, and explains why a connection fails."""

from __future__ import annotations

import concurrent.futures
import errno
import logging
import os
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import dask
from distributed import Client, Security
from distributed.comm.addressing import parse_host_port
from distributed.versions import VersionMismatchWarning

from ddptrain.clusters.provider import Cluster
from ddptrain.clusters.resolve import Target
from ddptrain.config.rank_settings import LOST_AFTER_S
from ddptrain.config.run_config import RunConfig
from ddptrain.driver.workers import ClusterNews
from ddptrain.errors import ClusterError
from ddptrain.log import Log
from ddptrain.worker.tcp_timeouts import tcp_timeout

_log = Log(__name__)
_TRY_S = 3.0  # time limit of the first attempt; it is doubled for each later one
_NAMED_S = 30.0  # for clusters of `cluster up`, which are running or dead; a busy machine answers late
_PROBE_S = 3.0
_NO_LISTENER = frozenset(os.strerror(code).lower() for code in (errno.ECONNREFUSED, errno.ENOENT))
_MARGIN_S = 2.0  # added to Dask's own time limit
_SILENT_S = 7.0  # a starting scheduler does not accept connections silently for so long
_SILENT = "something accepts the connection, but does not answer as a Dask scheduler"


@dataclass(frozen=True, slots=True)
class Session:
    """A connected client, its scheduler, and the scheduler's messages about workers."""

    client: Client
    target: Target
    news: ClusterNews


@contextmanager
def open_session(cluster: Cluster, config: RunConfig, tell: Callable[[str], None]) -> Iterator[Session]:
    """Connect to the cluster, and disconnect at the end of the block. Raises ClusterError."""
    target = cluster.connect()
    client = connected(target, config.cluster.start_timeout_s, tell, config.failure.lost_after_s)
    try:
        yield Session(client, target, ClusterNews(client))
    finally:
        with suppress(Exception):  # Dask raises any type while a connection breaks; the run has its own end
            client.close()


def connected(
    target: Target, timeout_s: float, tell: Callable[[str], None], lost_after_s: float = LOST_AFTER_S
) -> Client:
    """Connect to the scheduler; wait for it up to `timeout_s` seconds, unless waiting cannot help.

    The connection survives a network failure of less than `lost_after_s` seconds. Raises ClusterError if there is no
    scheduler, or it does not accept the driver.
    """
    for logger in ("distributed", "distributed.client"):  # Dask sets the level of the second one itself
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # the driver reports errors itself
    if target.foreign:  # clusters/compatibility.py reports incompatible versions
        warnings.filterwarnings("ignore", category=VersionMismatchWarning)
    dask.config.set(tcp_timeout(lost_after_s))
    _tls_context(target)
    began, try_s = time.monotonic(), _TRY_S
    deadline = began + (min(timeout_s, _NAMED_S) if target.name else timeout_s)
    while True:
        try:
            return _try_connect(target, max(0.1, min(try_s, deadline - time.monotonic())))
        except (TypeError, MemoryError) as error:  # Dask reads the first bytes of another protocol as a length
            raise ClusterError(
                f"what listens at {target.address} is not a Dask scheduler, or one of a version that cannot talk "
                f"to this one ({error}): distributed 2025.7 or newer is needed there"
            ) from error
        except (OSError, ValueError) as error:
            reason = _connection_problem(target) or str(error)
        left_s = deadline - time.monotonic()
        if (target.name and reason in _NO_LISTENER) or left_s <= 0:
            raise ClusterError(_no_answer_text(target, timeout_s, reason))
        silent_s = time.monotonic() - began
        if reason == _SILENT and not target.name and silent_s > _SILENT_S:
            raise ClusterError(_no_answer_text(target, round(silent_s), reason))
        _log.info("scheduler did not answer", address=target.address, reason=reason, left_s=left_s)
        tell(f"waiting for the Dask scheduler at {target.address}: {reason}")
        time.sleep(min(1.0, left_s))
        try_s *= 2


class DriverClient(Client):
    """A client that, if it could not connect, ends its thread at once; Dask waits for an answer that does not come."""

    def __del__(self) -> None:
        if self.status in ("newly-created", "connecting"):
            self.status = "closed"
            self._loop_runner.stop()
        else:
            super().__del__()  # type: ignore[no-untyped-call]


def _try_connect(target: Target, timeout_s: float) -> Client:
    """Try to connect once. Raises OSError, or TimeoutError if the peer accepts the connection but never answers."""
    outcome: concurrent.futures.Future[Client] = concurrent.futures.Future()

    def connect() -> None:
        try:
            outcome.set_result(
                DriverClient(  # type: ignore[no-untyped-call]
                    target.address,
                    timeout=timeout_s,
                    security=target.security,
                    set_as_default=False,
                    name="ddptrain",
                )
            )
        except BaseException as error:  # re-raised in the thread that waits
            outcome.set_exception(error)

    # Dask's own time limit does not apply while it waits for the first message.
    threading.Thread(target=connect, name="ddptrain-connect", daemon=True).start()
    try:
        return outcome.result(timeout_s + _MARGIN_S)
    except concurrent.futures.TimeoutError:
        if not outcome.done():
            raise TimeoutError(_SILENT) from None
        return outcome.result()


def _no_answer_text(target: Target, timeout_s: float, reason: str) -> str:
    if target.name:
        return (
            f"the scheduler of the cluster {target.name} does not answer at {target.address}: {reason}; clear it up "
            f"with `ddptrain cluster down {target.name}`, then start it again with `ddptrain cluster up`"
        )
    firewall = "" if reason in _NO_LISTENER else ", or is a firewall in the way"
    if reason == _SILENT and target.address.startswith("tcp://"):
        firewall = f"? If it uses TLS, write {target.address.replace('tcp', 'tls', 1)} and set distributed.comm.tls"
    question = f"is it up, and the port right{firewall}"
    return f"no Dask scheduler answers at {target.address} within {timeout_s:g} s: {reason}; {question}?"


def _connection_problem(target: Target) -> str:
    """Connect once, without Dask; return why a client cannot connect, or "" if it can.

    Raises ClusterError if waiting cannot help: the host is unknown, or the certificates do not fit.
    """
    scheme, _, location = target.address.partition("://")
    try:
        if scheme in ("tcp", "tls"):
            host, port = parse_host_port(location)
            with socket.create_connection((host, int(port)), timeout=_PROBE_S) as plain:
                context = _tls_context(target)
                with context.wrap_socket(plain) if context else nullcontext(plain) as connection:
                    connection.recv(1)  # a scheduler sends the first message; it refuses a certificate at this point
    except TimeoutError:
        return _SILENT
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or error
        raise ClusterError(
            f"no TLS connection to {target.address} is possible ({reason}): it belongs to another cluster or is no "
            "Dask scheduler with TLS, or the files of distributed.comm.tls are the wrong ones"
        ) from error
    except socket.gaierror as error:
        raise ClusterError(f"the host of {target.address} is unknown: {error.strerror}") from error
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _tls_context(target: Target) -> ssl.SSLContext | None:
    """Return the TLS context, None if the address does not use TLS. Raises ClusterError if there is no certificate."""
    if not target.address.startswith("tls://"):
        return None
    security = target.security or Security()
    try:
        context: ssl.SSLContext | None = security.get_connection_args("client").get("ssl_context")
    except OSError as error:
        files = security.get_tls_config_for_role("client")
        named = ", ".join(str(files[name]) for name in ("ca_file", "cert", "key"))
        raise ClusterError(f"the TLS files of Dask's configuration can't be used ({named}): {error}") from error
    if context is None:
        raise ClusterError(
            f"the scheduler at {target.address} wants a certificate, and none was given: set distributed.comm.tls "
            "in Dask's configuration, or name a cluster that `ddptrain cluster up` has started"
        )
    return context

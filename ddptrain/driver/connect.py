"""Connects the driver to a scheduler, and explains why a connection fails."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import logging
import os
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import dask
from distributed import Client, Security
from distributed.comm.addressing import parse_host_port
from distributed.versions import VersionMismatchWarning

from ddptrain.clusters.provider import Cluster
from ddptrain.clusters.resolve import Target
from ddptrain.config.run_config import RunConfig
from ddptrain.driver.cluster_session import Session
from ddptrain.driver.workers import ClusterNews
from ddptrain.errors import ClusterError
from ddptrain.log import Log
from ddptrain.protocol.rank_spec import LOST_AFTER_S
from ddptrain.worker.tcp_timeouts import tcp_timeout

_log = Log(__name__)
_TRY_S = 3.0  # time limit of the first attempt; it is doubled for each later one
_NAMED_S = 30.0  # for clusters of `cluster up`, which are running or dead; a busy machine answers late
_PROBE_S = 3.0
_NO_LISTENER = frozenset(os.strerror(code).lower() for code in (errno.ECONNREFUSED, errno.ENOENT))
_MARGIN_S = 2.0  # added to Dask's own time limit
_SPEAKS_FIRST_S = 1.5
_SILENT_S = 7.0  # a starting scheduler does not accept connections silently for so long
_SILENT = "something accepts the connection, but does not answer as a Dask scheduler"
_ALERT = "ALERT"  # part of the reason of a TLS error that the peer sent


@contextlib.contextmanager
def open_session(cluster: Cluster, config: RunConfig, tell: Callable[[str], None]) -> Iterator[Session]:
    """Connect to the cluster, and disconnect at the end of the block. Raises ClusterError."""
    target = cluster.connect()
    with connected(target, config.cluster.start_timeout_s, tell, config.failure.lost_after_s) as client:
        yield Session(client, target, ClusterNews(client))


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
        except TypeError as error:  # the scheduler does not understand the request
            raise ClusterError(
                f"the scheduler at {target.address} runs a version of Dask that this one can't talk to ({error}): "
                "distributed 2025.7 or newer is needed there"
            ) from error
        except MemoryError as error:  # Dask reads the first bytes of another protocol as a length
            raise ClusterError(f"what listens at {target.address} is not a Dask scheduler ({error})") from error
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
        name = target.name
        return (
            f"the scheduler of the cluster {name} does not answer at {target.address}: {reason}; "
            f"clear it up with `ddptrain cluster down {name}`, then start it again with `ddptrain cluster up`"
        )
    firewall = "" if reason in _NO_LISTENER else ", or is a firewall in the way"
    question = f"is it up, and the port right{firewall}?"
    return f"no Dask scheduler answers at {target.address} within {timeout_s:g} s: {reason}; {question}"


def _connection_problem(target: Target) -> str:
    """Return why a client cannot connect, or "" if a connection is possible.

    Raises ClusterError if waiting cannot help: the certificate is wrong or missing, or the host is unknown.
    """
    scheme, _, location = target.address.partition("://")
    if scheme == "unix":
        return _socket_problem(target.address)
    if scheme not in {"tcp", "tls"}:
        return ""
    host, port = parse_host_port(location)
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_S) as plain:
            if scheme == "tls":
                return _tls_problem(target, plain)
            return _refuse_tls(target, plain)
    except socket.gaierror as error:
        raise ClusterError(f"the host of {target.address} is unknown: {error.strerror}") from error
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _socket_problem(address: str) -> str:
    """Return why the socket of a local cluster can't be opened, or "". Raises ClusterError if it is another user's."""
    from ddptrain.protocol.unix_comm import connect_plain

    try:
        connect_plain(address, _PROBE_S).close()
    except PermissionError as error:
        raise ClusterError(f"{address} belongs to a cluster of another user: {error.strerror or error}") from error
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


def _tls_problem(target: Target, plain: socket.socket) -> str:
    """Try Dask's TLS handshake. Return a temporary problem, or "". Raises ClusterError for a permanent problem."""
    context = _tls_context(target)
    assert context is not None
    try:
        with context.wrap_socket(plain, server_hostname=None) as secured:
            secured.recv(1)
    except ssl.SSLCertVerificationError as error:
        raise ClusterError(
            f"the scheduler at {target.address} shows a certificate that our CA has not signed "
            f"({error.verify_message}): it belongs to another cluster, or distributed.comm.tls.ca-file is wrong"
        ) from error
    except TimeoutError:
        return _SILENT
    except ssl.SSLError as error:
        if _ALERT not in str(error.reason):
            raise ClusterError(
                f"what listens at {target.address} does not speak TLS ({error.reason or error}): it is not a Dask "
                "scheduler, or one without TLS, whose address begins with tcp://"
            ) from error
        raise ClusterError(
            f"the scheduler at {target.address} refuses our certificate ({error.reason or error}): it belongs to "
            "another cluster, or cert and key of distributed.comm.tls are the wrong ones"
        ) from error
    return ""


def _refuse_tls(target: Target, plain: socket.socket) -> str:
    """Check whether the peer of a tcp:// address uses TLS. A scheduler without TLS sends the first message.

    Return _SILENT if the peer sends nothing, else "". Raises ClusterError if it uses TLS.
    """
    plain.settimeout(_SPEAKS_FIRST_S)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with contextlib.suppress(TimeoutError):
            plain.recv(1)
            return ""
        with context.wrap_socket(plain):
            pass
    except OSError:
        return _SILENT
    address = target.address.replace("tcp", "tls", 1)
    raise ClusterError(
        f"the scheduler at {target.address} uses TLS: write the address as {address}, and set distributed.comm.tls "
        "in Dask's configuration"
    )

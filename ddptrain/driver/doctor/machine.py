"""Reads this machine: facts of the host, torch, ports, servers. All run at the same time, each with a time limit."""

from __future__ import annotations

import dataclasses
import platform
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from ddptrain.driver.doctor.judge import Check, Result, TorchFacts, judge_host, judge_torch
from ddptrain.errors import ClusterError, DdptrainError, one_line
from ddptrain.gpus import default_slots, visible_gpus
from ddptrain.redact import hide_credentials
from ddptrain.storage.object_store import open_folder
from ddptrain.storage.store import is_url
from ddptrain.tracking.wandb_files import find_access
from ddptrain.worker.host_facts import HostFacts

Facts = TypeVar("Facts")

_PROCESS_S = 30.0  # torch from a cold disk, or the facts of a GPU that hangs
_SERVER_S = 3.0
_WANDB = "https://api.wandb.ai"


def check_machine(runs_dir: str, environ: Mapping[str, str]) -> list[Check]:
    """Check this machine for runs in `runs_dir`, a folder or a URL."""
    folder = Path.cwd() if is_url(runs_dir) else _existing(Path(runs_dir))
    with ThreadPoolExecutor() as pool:
        facts = pool.submit(_facts, HostFacts, "ddptrain.worker.host_facts", [str(folder)], environ)
        torch = pool.submit(_facts, TorchFacts, "ddptrain.rank.probes", [], environ)
        store = pool.submit(_store, runs_dir)
        servers = list(pool.map(check_server, _servers(environ)))
        checks = [Check("Python", Result.OK, f"{platform.python_version()}, {sys.executable}")]
        (host, problem), (tried, failed) = facts.result(), torch.result()
        tried = tried or TorchFacts(problems={"torch": failed})
        gpus: tuple[str, ...] = ()
        try:
            gpus = visible_gpus(environ)
        except ClusterError as error:
            tried = dataclasses.replace(tried, problems={**tried.problems, "GPUs": one_line(error)})
        present, driver = (len(host.gpus), host.versions.get("driver", "")) if host is not None else (0, "")
        checks += judge_torch(tried, len(gpus), driver, max(0, present - len(gpus)))
        if host is None:
            checks.append(Check("host", Result.BAD, f"its facts can't be read: {problem}"))
        else:
            checks += judge_host(host, default_slots(gpus))
        return [*checks, check_ports(), *store.result(), *servers]


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))


def _facts(
    kind: type[Facts], module: str, arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[Facts | None, str]:
    """Run a module with this Python; return the facts that it prints, and why there are none, or ""."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_PROCESS_S, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            return None, last[0]
        return TypeAdapter(kind).validate_json(done.stdout.strip().splitlines()[-1]), ""
    except subprocess.TimeoutExpired:
        return None, f"it does not answer within {_PROCESS_S:g} s"
    except (ValueError, IndexError) as wrong:
        return None, one_line(wrong)


def check_ports() -> Check:
    """Check that a process can listen on a port of the loopback interface, and that a connection to it works."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=_SERVER_S):
                return Check("ports", Result.OK, "a connection to 127.0.0.1 works")
    except OSError as error:
        hint = "is the loopback interface up (ip addr), and is no firewall in the way?"
        return Check("ports", Result.BAD, f"no connection to 127.0.0.1: {error.strerror or error}", hint)


def _store(runs_dir: str) -> list[Check]:
    """Check that the object store of the runs can be listed; [] for a folder."""
    if not is_url(runs_dir):
        return []
    try:
        open_folder(runs_dir).check()
    except DdptrainError as error:
        return [Check("store", Result.BAD, one_line(error))]
    return [Check("store", Result.OK, f"{hide_credentials(runs_dir)} can be listed")]


def _servers(environ: Mapping[str, str]) -> list[str]:
    """Return the URLs of the configured servers: W&B if there is an API key, and the S3 endpoint."""
    access = find_access(environ)
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", "")
    offline = environ.get("WANDB_MODE", "") in ("offline", "disabled", "dryrun")
    wandb = (access.base_url or _WANDB) if access.has_credentials and not offline else ""
    return [url for url in (wandb, endpoint) if url]


def check_server(url: str) -> Check:
    """Check that a server answers; each HTTP status is an answer."""
    shown, parts, error = hide_credentials(url), urlsplit(url), ""
    if parts.scheme not in ("http", "https"):
        error = "it is not a URL with http:// or https://"
    else:
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # urllib reads a password as a host
        try:
            urllib.request.urlopen(urllib.request.Request(bare, method="HEAD"), timeout=_SERVER_S).close()
        except urllib.error.HTTPError as answer:
            answer.close()
        except (OSError, ValueError, HTTPException) as raised:
            reason = getattr(raised, "reason", raised)
            error = getattr(reason, "strerror", "") or one_line(str(reason))
    if error:
        hint = "check the network, the proxy (HTTPS_PROXY) and the URL"
        return Check("server", Result.BAD, f"{shown} can't be reached: {error}", hint)
    return Check("server", Result.OK, f"{shown} answers")

"""Finds the scheduler for a cluster name, an address or a scheduler file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.clusters import record as records
from ddptrain.clusters.processes import Relation
from ddptrain.clusters.record import ClusterRecord
from ddptrain.clusters.security import own_security
from ddptrain.config.sections.clusters import provider_class
from ddptrain.config.types import is_scheduler_file
from ddptrain.errors import ClusterError
from ddptrain.version import __version__

if TYPE_CHECKING:
    from distributed import Security


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a scheduler; `name` is the name of the user's own cluster, "" for any other cluster.

    Without `security`, the configuration of Dask decides. The workers of a `foreign` cluster may lack packages.
    A `fixed` cluster has one worker, which has all its slots.
    """

    address: str
    security: Security | None = None
    name: str = ""
    foreign: bool = True
    fixed: bool = False


def by_name(name: str) -> Target:
    """Return the user's cluster of that name. Raises ClusterNotFound, ClusterError."""
    return of_cluster(records.find(name))


def of_cluster(cluster: ClusterRecord) -> Target:
    """Return the scheduler of one of the user's clusters.

    Raises ClusterError if it has no address, runs on another host, or was started before a restart of this host or by
    another version of ddptrain.
    """
    cluster.check_here()
    name = cluster.name
    again = f"end what is left with `ddptrain cluster down {name}`, and start it again"
    if not cluster.address:
        raise ClusterError(f"the cluster {name} has no scheduler yet: see ddptrain cluster status {name}")
    if cluster.relation == Relation.RESTARTED:
        raise ClusterError(f"{cluster.host.name} was restarted after the cluster {name} was started: {again}")
    if cluster.version != __version__:
        version = cluster.version
        raise ClusterError(f"the cluster {name} was started by ddptrain {version}, this is {__version__}: {again}")
    folder = cluster.tls_dir
    tls = own_security(folder) if folder else None
    in_containers = cluster.config.slurm is not None and cluster.config.slurm.container_image is not None
    foreign = in_containers or not provider_class(cluster.backend).own_workers
    return Target(cluster.address, tls, name, foreign, fixed=cluster.backend == "local")


def by_address(address: str) -> Target:
    """Return the scheduler at an address or in its file; for the user's own cluster with its certificate.

    Raises ClusterError, also if the file contains no address.
    """
    if is_scheduler_file(address):
        address = _address_in(Path(address).expanduser())
    known = {address, _complete(address, "tcp"), _complete(address, "tls")}
    for cluster in records.every():
        if cluster.address in known and cluster.relation == Relation.SAME:
            return of_cluster(cluster)
    return Target(_complete(address, "tcp"))


def _address_in(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["address"])
    except OSError as error:
        raise ClusterError(f"the scheduler file {path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f'the scheduler file {path} contains no "address": is it the file of `dask scheduler --scheduler-file`?'
        ) from error


def _complete(address: str, scheme: str) -> str:
    return address if "://" in address else f"{scheme}://{address}"

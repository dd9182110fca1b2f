"""The ranks and GPUs of an embedded cluster on this machine."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass

from ddptrain.config.sections.clusters import ClusterConfig, RankRange
from ddptrain.errors import ClusterError
from ddptrain.gpus import default_slots, visible_gpus


@dataclass(frozen=True, slots=True)
class LocalResources:
    """The number of slots; `gpus` has an entry for CUDA_VISIBLE_DEVICES for each slot, none on the CPU."""

    ranks: int
    gpus: tuple[str, ...]


def local_resources(cluster: ClusterConfig, environ: Mapping[str, str]) -> LocalResources:
    """Return ranks and GPUs for a configuration. Raises ClusterError if there are fewer GPUs than it asks for."""
    present = () if cluster.gpus == 0 else visible_gpus(environ)
    wanted = len(present) if cluster.gpus == "auto" else int(cluster.gpus)
    if wanted > len(present):
        raise ClusterError(
            f"cluster.gpus is {wanted}, but this machine has {len(present)}: set it to auto, or to 0 for the CPU"
        )
    if cluster.ranks == "auto":
        return LocalResources(default_slots(present[:wanted]), present[:wanted])
    if isinstance(cluster.ranks, RankRange):
        most = min(cluster.ranks.max, wanted) if wanted else cluster.ranks.max
        return LocalResources(max(cluster.ranks.min, most), present[:most] if wanted else ())
    ranks = int(cluster.ranks)
    if wanted and ranks > wanted:
        raise ClusterError(
            f"cluster.ranks is {ranks}, but there are {wanted} GPUs, one a rank: ask for fewer ranks, or set "
            "cluster.gpus to 0 to train on the CPU"
        )
    return LocalResources(ranks, present[: ranks if wanted else 0])


def resource_warnings(resources: LocalResources, cores: int) -> list[str]:
    """Return warnings about resources that may be too small for the run."""
    return [warning for warning in (crowding(resources, cores), file_limit()) if warning]


def file_limit() -> str:
    """Return a warning about a limit on the size of files, which checkpoints and logs may reach, or ""."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"files may have at most {limit:,} bytes (ulimit -f): larger logs and checkpoints fail; raise the limit"


def crowding(resources: LocalResources, cores: int) -> str:
    """Return a warning about more ranks on the CPU than the default and than cores, or ""."""
    most = max(default_slots(()), cores)
    if resources.gpus or resources.ranks <= most:
        return ""
    shared = "share 1 core" if cores == 1 else f"share {cores} cores"
    return f"{resources.ranks} ranks {shared}: their start and each step take longer; --ranks {most} may be faster"

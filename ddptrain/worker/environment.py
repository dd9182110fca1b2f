"""The environment of a rank, built explicitly; nobody changes that of the driver or of the worker.

Layers, later ones win: the worker's own environment (less what Dask's nanny put there), our defaults where the user
has set nothing, the configuration's `env`, and the variables of the torchrun contract.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from ddptrain.protocol.exec_env import without_working_directory
from ddptrain.protocol.rank_spec import ERROR_FILE, HostSettings, RankSpec
from ddptrain.worker.diagnostics import FLIGHT_RECORD

# glibc gives pages back to the kernel after every training step and faults them in again for the next: a third of a
# CPU step is spent there. Only both settings together keep the pages; either one alone makes it worse.
MALLOC_DEFAULTS = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def tuned_defaults() -> dict[str, str]:
    """What makes CPU ranks faster on this C library, for programs that are about to start."""
    return dict(MALLOC_DEFAULTS) if platform.libc_ver()[0] == "glibc" else {}


def server_environment(environ: Mapping[str, str], nanny: Mapping[str, object] | None = None) -> dict[str, str]:
    """The rank server's: the user's, our defaults below it, and one BLAS thread, for it must fork with no other."""
    env = without_working_directory({**tuned_defaults(), **without_nanny(environ, nanny or {})})
    env.setdefault("OPENBLAS_NUM_THREADS", "1")
    return env


def without_nanny(environ: Mapping[str, str], nanny: Mapping[str, object]) -> dict[str, str]:
    """`environ` less the values that Dask's nanny exported (OMP_NUM_THREADS=1 and its like) and Dask's hand-over."""
    ours = {key: value for key, value in environ.items() if key not in nanny or str(nanny[key]) != value}
    ours.pop("DASK_INTERNAL_INHERIT_CONFIG", None)
    return ours


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank gets from its worker.

    `gpu` is the entry for CUDA_VISIBLE_DEVICES, None on the CPU; `cpus` how many cores the host's ranks share;
    `interface` the network interface that carries the worker's address, None where there is none.
    """

    gpu: str | None
    cpus: int
    interface: str | None
    staging: str


def complete(spec: RankSpec, environ: Mapping[str, str], place: Place) -> RankSpec:
    """The spec with its full environment, device, threads and staging folder, ready for the rank server.

    `environ` is the worker's, without the nanny's additions.
    """
    chosen = {**environ, **spec.env}
    gpu = place.gpu if spec.placement.use_gpu else None
    threads = max(1, place.cpus // spec.placement.local_world_size)
    tuned = {**tuned_defaults(), "OMP_NUM_THREADS": str(threads)}
    if place.interface is not None:
        tuned["GLOO_SOCKET_IFNAME"] = place.interface  # gloo asks the host's name otherwise: often a wrong address
    if "nccl" in spec.group.backend:
        tuned |= _flight_recorder(place.staging)
    env = {**tuned, **chosen, **_contract(spec, gpu, place.staging)}
    if spec.code.built_in:
        env = without_working_directory(env)
    report = {
        name: {"value": env[name], "source": "user" if name in chosen else "ddptrain"}
        for name in (*tuned, *_THREAD_VARIABLES)
        if name in env
    }
    if env["OMP_NUM_THREADS"].isdigit():
        threads = max(1, int(env["OMP_NUM_THREADS"]))
    return dataclasses.replace(spec, env=env, host=HostSettings(gpu, place.staging, threads, report))


def _flight_recorder(staging: str) -> dict[str, str]:
    """NCCL writes down its last collective operations when one has timed out; newer torch reads these names, too."""
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{staging}/{FLIGHT_RECORD}",
    }


def interface_of(host: str) -> str | None:
    """The network interface that carries an IP address of this machine; None where none does."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return str(name)
    return "lo" if host.startswith("127.") and "lo" in psutil.net_if_addrs() else None


def _script_contract(spec: RankSpec, staging: str) -> dict[str, str | int]:
    """What else torchrun's own scripts may ask for: all ranks have one role, and a file for their error."""
    return {
        "GROUP_WORLD_SIZE": spec.placement.hosts,
        "ROLE_NAME": "default",
        "ROLE_RANK": spec.rank,
        "ROLE_WORLD_SIZE": spec.placement.world_size,
        "TORCHELASTIC_ERROR_FILE": f"{staging}/{ERROR_FILE}",
    }


def _contract(spec: RankSpec, gpu: str | None, staging: str) -> dict[str, str]:
    """What torchrun promises to a rank, and the device that this one sees."""
    variables: dict[str, str | int] = {
        "RANK": spec.rank,
        "WORLD_SIZE": spec.placement.world_size,
        "LOCAL_RANK": spec.placement.local_rank,
        "LOCAL_WORLD_SIZE": spec.placement.local_world_size,
        "GROUP_RANK": spec.placement.node_rank,
        "MASTER_ADDR": spec.group.master_addr,
        "MASTER_PORT": spec.group.master_port,
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": spec.attempt - 1,
        "TORCHELASTIC_MAX_RESTARTS": spec.supervision.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the store as a client, too: it has a process of its own
        "DDPTRAIN_RUN_ID": spec.run_id,
        "CUDA_VISIBLE_DEVICES": gpu if gpu is not None else "",
    }
    if spec.code.is_script:
        variables |= _script_contract(spec, staging)
        if gpu is not None and spec.placement.local_gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(spec.placement.local_gpus)  # LOCAL_RANK is an index into these
    return {name: str(value) for name, value in variables.items()}

"""Builds the environment of a rank. The environments of the driver and the worker are never changed.

Layers, from lowest to highest priority: ddptrain's defaults, the worker's environment without the variables of Dask's
nanny, the configuration's `env`, and the variables that torchrun sets.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from ddptrain.protocol.exec_env import without_working_directory
from ddptrain.protocol.rank_spec import ERROR_FILE, HostSettings, RankSpec

FLIGHT_RECORD = "flight-record-"  # prefix of a file's name in the rank's staging folder; the rank's number follows
# By default glibc returns memory pages to the kernel after each training step and requests them again in the next one:
# a third of the time of a CPU step. Only both settings together avoid this; one alone is slower than none.
MALLOC_DEFAULTS = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def tuned_defaults() -> dict[str, str]:
    """Return variables that make CPU ranks faster with this C library; they must be set before a program starts."""
    return dict(MALLOC_DEFAULTS) if platform.libc_ver()[0] == "glibc" else {}


def server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the rank server's environment: with one BLAS thread, because a process with threads must not fork."""
    env = without_working_directory({**tuned_defaults(), **without_nanny(environ, {})})
    env.setdefault("OPENBLAS_NUM_THREADS", "1")
    return env


def without_nanny(environ: Mapping[str, str], nanny: Mapping[str, object]) -> dict[str, str]:
    """Return `environ` without the values that Dask's nanny exported, and without Dask's own configuration."""
    kept = {key: value for key, value in environ.items() if key not in nanny or str(nanny[key]) != value}
    kept.pop("DASK_INTERNAL_INHERIT_CONFIG", None)
    return kept


@dataclass(frozen=True, slots=True)
class HostResources:
    """What the ranks of a worker share: cores, slots, and the network interface of its address (None if unknown).

    uploaded: folders and archives of modules that Client.upload_file has put there.
    """

    cores: int
    slots: int
    interface: str | None
    uploaded: tuple[str, ...] = ()


def complete(
    spec: RankSpec, environ: Mapping[str, str], host: HostResources, gpu: str | None, staging: str
) -> RankSpec:
    """Return the spec with environment, device, threads and staging folder.

    environ: the worker's, without the nanny's variables. gpu: that of the slot, as in CUDA_VISIBLE_DEVICES, or None.
    """
    chosen = {**environ, **spec.env}
    gpu = gpu if spec.placement.use_gpu else None
    # Each slot gets its share of the cores, even if it is free now: a rank of another run may use it later.
    threads = max(1, host.cores // max(spec.placement.local_world_size, host.slots))
    tuned = {**tuned_defaults(), "OMP_NUM_THREADS": str(threads)}
    if host.interface is not None:
        # Otherwise gloo resolves the host name, which often gives a wrong address.
        tuned["GLOO_SOCKET_IFNAME"] = host.interface
    if "nccl" in spec.group.backend:
        tuned |= {  # NCCL writes its last operations to a file after a time-out; newer torch reads these names, too
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{staging}/{FLIGHT_RECORD}",
        }
    if spec.code.is_script:
        tuned["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun
    env = {**tuned, **chosen, **_torchrun_variables(spec, gpu, staging)}
    if spec.code.built_in:
        env = without_working_directory(env)
    report = {
        name: {"value": env[name], "source": "user" if name in chosen else "ddptrain"}
        for name in (*tuned, *_THREAD_VARIABLES)
        if name in env
    }
    if env["OMP_NUM_THREADS"].isdigit():
        threads = max(1, int(env["OMP_NUM_THREADS"]))
    path = tuple(dict.fromkeys((*spec.code.sys_path, *host.uploaded)))
    code = dataclasses.replace(spec.code, sys_path=path)
    return dataclasses.replace(spec, env=env, code=code, host=HostSettings(gpu, staging, threads, report))


def interface_of(host: str) -> str | None:
    """Return the network interface that has an IP address of this machine; None if none has it."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return str(name)
    return "lo" if host.startswith("127.") and "lo" in psutil.net_if_addrs() else None


def _torchrun_variables(spec: RankSpec, gpu: str | None, staging: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and the devices that the rank sees."""
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
        "TORCHELASTIC_MAX_RESTARTS": spec.config.failure.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # a separate process hosts the store, so rank 0 is a client, too
        "DDPTRAIN_RUN_ID": spec.run_id,
        "CUDA_VISIBLE_DEVICES": gpu if gpu is not None else "",
    }
    if gpu is not None:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML counts; by default CUDA counts the fastest GPU first
    if spec.code.is_script:
        variables |= {  # all ranks have one role, which `env` of the configuration may name
            "GROUP_WORLD_SIZE": spec.placement.hosts,
            "ROLE_NAME": spec.env.get("ROLE_NAME", "default"),
            "ROLE_RANK": spec.rank,
            "ROLE_WORLD_SIZE": spec.placement.world_size,
            "TORCHELASTIC_ERROR_FILE": f"{staging}/{ERROR_FILE}",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        }
        if spec.env.get("LOCAL_RANK") == "0":  # each rank sees only its own GPU: torchrun's --virtual-local-rank
            variables["LOCAL_RANK"] = 0
        elif gpu is not None and spec.placement.local_gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(spec.placement.local_gpus)  # LOCAL_RANK is an index into these
    return {name: str(value) for name, value in variables.items()}

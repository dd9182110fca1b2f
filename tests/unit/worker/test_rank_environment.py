"""A rank's environment: the user's values win, tuned values are reported, and torchrun's variables are set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.worker import rank_environment
from tests.unit.specs import make_spec


def completed(
    environ: Mapping[str, str],
    *,
    gpu: str | None = None,
    cores: int = 8,
    slots: int = 2,
    interface: str | None = "eth7",
    **changes: Any,
) -> RankSpec:
    spec = make_spec(**{"rank": 3, "local_rank": 1, "node_rank": 1, "slot": 1, **changes})
    host = rank_environment.HostResources(cores, slots, interface)
    return rank_environment.complete(spec, environ, rank_environment.RankResources(gpu, host, staging="/s"))


def test_torchruns_variables_are_set() -> None:
    env = completed({}).env
    assert {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["TORCHELASTIC_RUN_ID"]) == ("10.0.0.1", "1234", "r-1")


@pytest.mark.parametrize(
    ("cores", "ranks", "slots", "threads"),
    [
        (8, 2, 2, 4),
        (8, 2, 1, 4),  # two workers with a slot each
        (8, 1, 4, 2),  # the other slots may get ranks of other runs
        (8, 1, 1, 8),
        (1, 2, 2, 1),
    ],
)
def test_cores_are_shared_by_the_ranks_and_slots_of_a_host(cores: int, ranks: int, slots: int, threads: int) -> None:
    spec = completed({}, cores=cores, slots=slots, local_world_size=ranks)
    assert (spec.env["OMP_NUM_THREADS"], spec.host.cpu_threads) == (str(threads), threads)


def test_users_environment_wins_over_tuned_values() -> None:
    spec = completed({"OMP_NUM_THREADS": "3", "MALLOC_TRIM_THRESHOLD_": "1"})
    assert (spec.env["OMP_NUM_THREADS"], spec.host.cpu_threads, spec.env["MALLOC_TRIM_THRESHOLD_"]) == ("3", 3, "1")
    assert spec.host.environment["OMP_NUM_THREADS"] == {"value": "3", "source": "user"}


def test_tuned_values_are_reported_as_ours() -> None:
    assert completed({}).host.environment["OMP_NUM_THREADS"]["source"] == "ddptrain"


def test_configuration_wins_over_the_workers_environment() -> None:
    assert completed({"A": "worker"}, env={"A": "config"}).env["A"] == "config"


def test_torchruns_variables_win_over_everything() -> None:
    assert completed({"RANK": "9"}, env={"WORLD_SIZE": "9"}).env["RANK"] == "3"


def test_rank_sees_its_one_gpu_or_none() -> None:
    assert completed({"CUDA_VISIBLE_DEVICES": "0,1"}, gpu="1").env["CUDA_VISIBLE_DEVICES"] == "1"
    assert completed({"CUDA_VISIBLE_DEVICES": "0,1"}).env["CUDA_VISIBLE_DEVICES"] == ""


def test_rank_that_must_not_use_a_gpu_sees_none() -> None:
    spec = completed({}, gpu="GPU-1", use_gpu=False)
    assert (spec.host.gpu, spec.env["CUDA_VISIBLE_DEVICES"]) == (None, "")


def test_gloo_gets_the_workers_interface_unless_the_user_has_chosen_one() -> None:
    spec = completed({})
    assert spec.env["GLOO_SOCKET_IFNAME"] == "eth7"
    assert spec.host.environment["GLOO_SOCKET_IFNAME"] == {"value": "eth7", "source": "ddptrain"}
    chosen = completed({"GLOO_SOCKET_IFNAME": "ib0"})
    assert chosen.host.environment["GLOO_SOCKET_IFNAME"] == {"value": "ib0", "source": "user"}
    assert completed({}, env={"GLOO_SOCKET_IFNAME": "ib1"}).env["GLOO_SOCKET_IFNAME"] == "ib1"
    assert "GLOO_SOCKET_IFNAME" not in completed({}, interface=None).env


def test_interface_is_the_one_that_carries_the_address() -> None:
    lo = rank_environment.interface_of("127.0.0.1")
    assert lo in psutil.net_if_addrs()
    assert rank_environment.interface_of("127.0.0.77") == lo
    assert rank_environment.interface_of("203.0.113.1") is None


def test_variables_of_the_nanny_are_removed_and_those_of_the_user_stay() -> None:
    nanny = {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1}
    cleaned = rank_environment.without_nanny({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "4", "A": "b"}, nanny)
    assert cleaned == {"MKL_NUM_THREADS": "4", "A": "b"}


def test_restart_count_is_the_number_of_earlier_attempts() -> None:
    assert [completed({}, attempt=n).env["TORCHELASTIC_RESTART_COUNT"] for n in (1, 2, 3)] == ["0", "1", "2"]


def test_dasks_own_configuration_reaches_neither_the_rank_server_nor_a_rank() -> None:
    environ = {"DASK_INTERNAL_INHERIT_CONFIG": "e30=", "DASK_DISTRIBUTED__LOGGING": "kept"}
    own = rank_environment.without_nanny(environ, {})
    assert own == {"DASK_DISTRIBUTED__LOGGING": "kept"}
    assert "DASK_INTERNAL_INHERIT_CONFIG" not in rank_environment.server_environment(environ)
    assert "DASK_INTERNAL_INHERIT_CONFIG" not in completed(own).env


def test_rank_server_has_one_blas_thread_unless_the_user_wants_more() -> None:
    assert rank_environment.server_environment({})["OPENBLAS_NUM_THREADS"] == "1"
    assert rank_environment.server_environment({"OPENBLAS_NUM_THREADS": "4"})["OPENBLAS_NUM_THREADS"] == "4"


def test_repr_shows_no_environment() -> None:
    assert "hunter2" not in repr(completed({}, env={"TOKEN": "hunter2"}))


def test_nccls_flight_recorder_is_on_unless_the_user_turns_it_off() -> None:
    assert not [name for name in completed({}).env if "NCCL" in name]
    env = completed({"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, backend="nccl").env
    assert env["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/s/flight-record-"


def test_script_sees_the_gpus_of_all_ranks_beside_it_and_torchruns_other_variables() -> None:
    spec = completed({}, gpu="3", script="train.py", hosts=2, local_gpus=("7", "3"))
    assert (spec.env["CUDA_VISIBLE_DEVICES"], spec.host.gpu) == ("7,3", "3")
    names = ("GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")
    assert [spec.env[name] for name in names] == ["2", "default", "3", "4", "/s/error.json"]
    assert completed({}, gpu="3", local_gpus=("7", "3")).env["CUDA_VISIBLE_DEVICES"] == "3"
    assert completed({}, script="train.py").env["CUDA_VISIBLE_DEVICES"] == ""

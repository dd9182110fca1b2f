"""Commands of torchrun as configurations."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.config.torchrun import translate
from ddptrain.errors import UsageError


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("torchrun train.py", {"workload": {"script": "train.py"}, "cluster": {"ranks": 1}}),
        (
            "OMP_NUM_THREADS=2 torchrun --standalone --nproc-per-node=gpu a/train.py --nnodes 3",
            {
                "workload": {"script": "a/train.py", "args": ["--nnodes", "3"]},
                "cluster": {"ranks": "auto"},
                "env": {"OMP_NUM_THREADS": "2"},
            },
        ),
        (
            "torchrun --nnodes 2 --nproc_per_node 8 --max_restarts 3 -m pkg.fit -x",
            {
                "workload": {"module": "pkg.fit", "args": ["-x"]},
                "cluster": {"name": "hosts", "ranks": 16},
                "failure": {"max_restarts": 3},
            },
        ),
        (
            "python3 -m torch.distributed.launch --nnodes 1:4 --nproc-per-node cpu train.py",
            {
                "workload": {"script": "train.py", "local_rank_arg": True},
                "cluster": {"name": "hosts", "ranks": "auto", "gpus": 0},
            },
        ),
        (
            "python -m torch.distributed.run --nnodes 1:4 --nproc-per-node 2 train.py",
            {"workload": {"script": "train.py"}, "cluster": {"name": "hosts", "ranks": {"min": 2, "max": 8}}},
        ),
    ],
)
def test_options_have_fields(command: str, config: dict[str, Any]) -> None:
    found = translate(command)
    assert found.config == config and found.notes == ()


def test_options_without_a_field_are_named() -> None:
    found = translate("torchrun --rdzv_backend c10d -r 3 --role x train.py")
    assert found.name == "train"
    assert found.notes == (
        "--redirects is left out: the log of each rank is shown and saved",
        "--rdzv-backend is left out: the hosts and the rendezvous are those of the cluster",
        "--role is left out: ddptrain has nothing like it",
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python train.py", r'"python" is not a command of torchrun'),
        ("", r'"nothing" is not a command of torchrun'),
        ("torchrun 'train.py", "can't be read: No closing quotation"),
        ("torchrun", "contains no script"),
        ("torchrun --foo 3 train.py", "torchrun has no option --foo"),
        ("torchrun --nnodes", "--nnodes: expected one argument"),
        ("torchrun --max-restarts x train.py", "invalid int value: 'x'"),
        ("torchrun --nnodes 0 train.py", 'is a number or MIN:MAX, got "0"'),
        ("torchrun --nnodes 4:2 train.py", 'the first number is the smaller one, got "4:2"'),
        ("torchrun --nproc-per-node many train.py", 'auto, gpu or cpu, got "many"'),
        ("torchrun --no-python ./fit.sh", "must be a Python file"),
    ],
)
def test_what_can_not_be_translated_is_refused(command: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        translate(command)

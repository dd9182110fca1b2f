"""A search for parameters that runs in each rank."""

from __future__ import annotations

from tests.pains.problem import TORCHRUN, Problem, Show, run

PROBLEM = Problem(
    name="sweeps",
    title="In a sweep each rank has other parameters",
    happens=(
        "The search runs inside of each rank, so each gets values of its own, or the ranks disagree on the number"
        " of trials."
    ),
    threads=("wandb/wandb#6533", "wandb/wandb#7811", "wandb/wandb#3883"),
    files={
        "train.py": """
import ddptrain


def train(ctx: ddptrain.RankContext, lr: float) -> None:
    print(f"trains with lr {lr:.6f}", flush=True)
    ctx.log({"val/loss": abs(lr - 0.01)}, step=1)
""",
        "train.yaml": """
workload: train:train
cluster: {ranks: 2}
params: {lr: 0.1}
sweep:
  space: {params.lr: {log: [1.0e-4, 1.0e-1]}}
  trials: 2
  metric: val/loss
  ranks: 2
""",
    },
    peer_files={
        "train.py": """
import optuna
import torch.distributed as dist


def objective(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    print(f"rank {dist.get_rank()} trains with lr {lr:.6f}", flush=True)
    dist.barrier()
    return abs(lr - 0.01)


dist.init_process_group("gloo")
optuna.create_study().optimize(objective, n_trials=2)
""",
    },
    peer=Show(
        run(TORCHRUN),
        must=(r"rank 0 trains with lr", r"rank 1 trains with lr"),
        keep=("trains with lr",),
        verdict=(
            "Two searches run side by side; DDP starts all ranks from the weights of rank 0, so the mistake does "
            "not show."
        ),
    ),
    ours=Show(
        run("ddptrain sweep train.yaml"),
        must=(r"succeeded", "2 complete"),
        keep=("ddptrain: trial", "trains with", "^sweep", "best:"),
    ),
    avoided=(
        "The search runs in the driver, once; each trial is a run, whose ranks all get the same parameters: see "
        "[Sweeps](experiments.md#sweeps)."
    ),
    equal="Optuna has `TorchDistributedTrial`, which sends the values of rank 0 to the others.",
)

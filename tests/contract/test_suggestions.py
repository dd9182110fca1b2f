"""What the command says to a word that it does not know: what to write instead."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Project


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("train work.yaml --params.lr=5", "--set params.lr=VALUE"),
        ("train work.yaml --nproc 2", "did you mean --ranks?"),
        ("train work.yaml --nproc_per_node 2", "did you mean --ranks?"),
        ("train --config work.yaml", "the file needs no option: ddptrain train FILE"),
        ("train work.yaml --gpu 0", "--set cluster.gpus=VALUE"),
        ("train work.yaml --epochs 3", "--set params.epochs=VALUE"),
        ("train work.yaml --set params.lr 3", "a field is changed as --set KEY=VALUE"),
        ("train work.yaml --set epochs=3", "a parameter of the workload is params.epochs"),
        ("train work.yaml --set env={DEVICES:0,1}", "quotes around a value with a comma"),
        ("torchrun train.py", "did you mean ddptrain run?"),
        ("rm latest", "did you mean ddptrain results rm?"),
        ("results delete latest", "did you mean ddptrain results rm?"),
        ("ps", "did you mean ddptrain results list?"),
        ("version", "did you mean ddptrain --version?"),
        ('sweep work.yaml --set sweep={"space":{"params.lr":{"loguniform":[1,2]}},"trials":1}', "write log"),
    ],
)
def test_wrong_word_has_a_hint(project: Project, line: str, hint: str) -> None:
    project.function("def train(ctx, lr: float = 0.1):\n    pass\n")
    refused = project(*line.split(), rc=2)
    assert hint in refused.stderr and refused.stdout == ""

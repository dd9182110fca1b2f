"""Wrong parameters: the error names each key with its value, and says what to write instead."""

from __future__ import annotations

from tests.contract.conftest import Project


def test_list_of_names_in_another_format_is_refused(project: Project) -> None:
    project.write("pets.csv", "pet\nluna\n")
    done = project("train", "petnames", "--set", "params.names=pets.csv", "--set", "cluster.ranks=1", rc=2)
    assert "'pets.csv' ends in neither .txt (a name on each line) nor .json (a list of names)" in done.stderr


def test_weights_of_images_at_a_url_are_refused(project: Project) -> None:
    done = project("train", "images-local", "--set", "params.weights=https://host/w.pth", rc=2)
    assert "params.weights: a URL is not read" in done.stderr and "give its path" in done.stderr


def test_params_that_a_function_does_not_take_end_the_run_once(project: Project) -> None:
    config = project.function(
        "def train(ctx, epochs: int, lr: float = 0.1, copy=None):\n    print('training')\n",
        params={"epoch": 3, "lr": "x", "copy": 1},
        failure={"max_restarts": 2},
    )
    done = project("train", config, rc=2)
    problems = (
        "params.epochs: is required, and not given (write params.epochs: VALUE); "
        'params.lr: expected a number, got the text "x"; '
        "params.epoch: unknown key (did you mean params.epochs?)"
    )
    assert f"failed: {problems}" in done.stderr.splitlines()[-1] and "training" not in done.stdout
    record = project.record()
    assert (len(record["attempts"]), record["exit_code"], record["failure"]["kind"]) == (1, 2, "params")


def test_function_that_a_call_would_not_run_is_refused(project: Project) -> None:
    done = project("train", project.function("async def train(ctx):\n    pass\n"), rc=1)
    assert "is defined by async def or has a yield" in done.stderr.splitlines()[-1]


def test_function_that_its_module_lacks_is_named_before_the_start(project: Project) -> None:
    config = project.function("def train(ctx):\n    pass\n", workload="work:trian")
    done = project("train", config, rc=2)
    assert "has no trian" in done.stderr and "did you mean work:train?" in done.stderr
    assert not project.run_directories()

"""Params are checked against the source of a user's function, and what the source does not say is no error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddptrain.config.load import load_config
from ddptrain.errors import ConfigError

MODULE = "mine_for_signatures"


def problems(tmp_path: Path, source: str, params: str = "{}", function: str = "main") -> list[str]:
    """What is said of such params, each without the file's name."""
    (tmp_path / f"{MODULE}.py").write_text(source)
    config = tmp_path / "c.yaml"
    config.write_text(f"workload: {MODULE}:{function}\nparams: {params}\n")
    try:
        load_config(config)
    except ConfigError as error:
        return [str(problem).removeprefix(f"{config}:") for problem in error.problems]
    return []


def test_unknown_key_is_told_with_its_place_and_the_nearest_one(tmp_path: Path) -> None:
    (said,) = problems(tmp_path, "def main(ctx, epochs=1, batch_size=2): ...", "{epoch: 3}")
    assert said == "2: params.epoch: unknown key (did you mean params.epochs?)"


def test_missing_key_is_told(tmp_path: Path) -> None:
    assert problems(tmp_path, "def main(ctx, lr): ...") == [
        "2: params.lr: is required, and not given (write params.lr: VALUE)"
    ]


def test_first_parameter_is_the_context_by_name_or_by_type(tmp_path: Path) -> None:
    for first in (
        "ctx",
        "_context",
        "_",
        "c: RankContext",
        "c: 'ddptrain.RankContext'",
        "c: ddptrain.RankContext | None",
    ):
        assert problems(tmp_path, f"def main({first}, lr=1): ...", "{lr: 2}") == []
    assert problems(tmp_path, "def main(lr): ...", "{lr: 2}") == []
    (said,) = problems(tmp_path, "def main(rank, lr): ...", "{lr: 2}")
    assert "params.rank: is required" in said


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        ("int", "0.5", "expected a whole number, got 0.5"),
        ("int", '"3"', 'expected a whole number, got the text "3" (write the number without quotes'),
        ("float", "fast", 'expected a number, got the text "fast"'),
        ("float", "3", ""),
        ("bool", "1", "expected true or false, got 1"),
        ("str", "3", "expected text, got 3 (write it in quotes)"),
        ("int | None", "null", ""),
        ("Optional[int]", "null", ""),
        ("int", "null", "expected a whole number, got nothing"),
        ("list[int]", "[1, x]", 'params.x[1]: expected a whole number, got the text "x"'),
        ("tuple[int, int]", "[1, 2]", ""),
        ("dict", "[]", "expected a mapping, as key: value, got a list"),
        ("Literal['adam', 'sgd']", "adm", "expected 'adam' or 'sgd', got the text \"adm\" (did you mean adam?)"),
        ("Union[int, str]", "1.5", "expected a whole number or text, got 1.5"),
        ("'int'", "x", "expected a whole number"),
        ("Path", "anything", ""),
        ("list[Path]", "[1]", ""),
        ("Annotated[int, Gt(3)]", "x", ""),
    ],
)
def test_simple_types_are_checked(tmp_path: Path, hint: str, value: str, said: str) -> None:
    told = problems(tmp_path, f"def main(ctx, x: {hint}): ...", f"{{x: {value}}}")
    assert (said in told[0]) if said else told == []


def test_default_of_none_allows_null(tmp_path: Path) -> None:
    assert problems(tmp_path, "def main(ctx, lr: float = None): ...", "{lr: null}") == []


@pytest.mark.parametrize(
    "source",
    [
        "def main(ctx, **params): ...",
        "@decorated\ndef main(ctx, lr): ...",
        "main = make()",
        "from elsewhere import main",
        "from elsewhere import *",
        "def __getattr__(name): ...",
        "def main(*args, **kwargs): ...",
        "if True:\n    def main(lr): ...\nelse:\n    def main(rate): ...",
        "def main(ctx, a, /): ...",
        "class main: ...",
        "def broken(:",
    ],
)
def test_what_the_source_does_not_tell_is_no_error(tmp_path: Path, source: str) -> None:
    assert problems(tmp_path, source, "{anything: 1}") == []


def test_keywords_take_others_but_named_ones_are_checked(tmp_path: Path) -> None:
    told = problems(tmp_path, "def main(ctx, lr: float, **more): ...", "{lr: x, other: 1}")
    assert len(told) == 1 and "params.lr: expected a number" in told[0]


def test_elastics_record_keeps_the_signature(tmp_path: Path) -> None:
    assert "unknown key" in problems(tmp_path, "@record\ndef main(ctx, lr=1): ...", "{rate: 1}")[0]


@pytest.mark.parametrize("header", ["@dataclass(frozen=True)\nclass Params:", "class Params(BaseModel):"])
def test_model_that_stands_for_all_params_is_checked(tmp_path: Path, header: str) -> None:
    source = f"{header}\n    lr: float\n    epochs: int = 3\ndef main(ctx, params: Params): ..."
    assert problems(tmp_path, source, "{lr: 1}") == []
    told = problems(tmp_path, source, "{epochs: x, lrr: 1}")
    assert [line.partition(": ")[2].partition(":")[0] for line in told] == ["params.lr", "params.epochs", "params.lrr"]


@pytest.mark.parametrize(
    "source",
    [
        "class Params(Base):\n    lr: float\ndef main(ctx, params: Params): ...",
        "from elsewhere import Params\ndef main(ctx, params: Params): ...",
        "def main(ctx, params: 'elsewhere.Params'): ...",
        "@dataclass\nclass Params(Base):\n    lr: float\ndef main(ctx, params: Params): ...",
        "class Params(BaseModel):\n    model_config = {'extra': 'allow'}\ndef main(ctx, params: Params): ...",
        "class Params(BaseModel):\n    lr: float = Field(alias='rate')\ndef main(ctx, params: Params): ...",
        "class Params(BaseModel):\n    @model_validator()\n    def f(cls, x): ...\ndef main(p: Params): ...",
    ],
)
def test_model_that_code_may_change_is_left_to_the_rank(tmp_path: Path, source: str) -> None:
    assert problems(tmp_path, source, "{rate: 1}") == []


def test_function_that_the_module_lacks_is_told(tmp_path: Path) -> None:
    (said,) = problems(tmp_path, "def train(ctx): ...", function="trian")
    assert said.startswith("1: workload: ") and said.endswith(f"(did you mean {MODULE}:train?)")


def test_module_is_not_imported(tmp_path: Path) -> None:
    problems(tmp_path, "raise SystemExit(9)\ndef main(ctx): ...", "{lr: 1}")
    assert MODULE not in sys.modules


def test_module_that_is_nowhere_is_left_to_the_rank(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("workload: not_here.at_all:main\nparams: {lr: 1}\n")
    assert load_config(tmp_path / "c.yaml").config.params == {"lr": 1}


def test_module_in_a_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "a_package_of_mine").mkdir()
    (tmp_path / "a_package_of_mine" / "train.py").write_text("def main(ctx): ...")
    (tmp_path / "c.yaml").write_text("workload: a_package_of_mine.train:main\nparams: {lr: 1}\n")
    with pytest.raises(ConfigError, match=r"params\.lr: unknown key"):
        load_config(tmp_path / "c.yaml")

"""Names: the data, the model, and lists of names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from ddptrain.errors import UsageError
from ddptrain.workloads.petnames import names as source_of_names
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig
from ddptrain.workloads.petnames.names import (
    SYMBOLS,
    check,
    clean_names,
    decode,
    display,
    encode,
    foreign_characters,
    load_names,
    normalise,
    split_names,
)
from ddptrain.workloads.petnames.params import PetnamesParams
from ddptrain.workloads.petnames.train import NameDataset

# --- petnames data ---


def test_a_window_has_the_symbols_before_each_character_and_the_stop() -> None:
    windows = NameDataset(["ada"], "window", 3)
    symbols, lengths, targets = windows.batch(torch.arange(4))
    assert [decode(row) for row in symbols.tolist()] == ["***", "**a", "*ad", "ada"]
    assert (lengths.tolist(), decode(targets.tolist())) == ([3, 3, 3, 3], "ada+")


def test_a_batch_of_names_is_cut_to_the_longest_and_padding_is_no_target() -> None:
    names = NameDataset(["bo", "ada", "whiskers"], "full", 8)
    symbols, lengths, targets = names.batch(torch.tensor([0, 1]))
    assert [decode(row) for row in symbols.tolist()] == ["*ada", "*bo+"]
    assert (lengths.tolist(), decode(targets.tolist())) == ([4, 3], "abdoa++")
    assert names.symbols.dtype == torch.uint8


# --- petnames model ---


def small_model(**params: object) -> CharacterModel:
    torch.manual_seed(0)
    return CharacterModel(ModelConfig.of(PetnamesParams.model_validate({"hidden_size": 8, "dropout": 0.0, **params})))


@pytest.mark.parametrize("entry", ["one_hot", "embedding"])
def test_padding_changes_neither_the_loss_of_a_name_nor_of_its_neighbour(entry: str) -> None:
    model, names = small_model(context="full", input=entry), NameDataset(["ada", "mr. whiskers"], "full", 8)

    def loss(*index: int) -> torch.Tensor:
        symbols, lengths, targets = names.batch(torch.tensor(index))
        return cross_entropy(model(symbols, lengths), targets, reduction="sum")

    torch.testing.assert_close(loss(0, 1), loss(0) + loss(1))


def test_one_layer_with_dropout_gives_no_warning() -> None:
    assert small_model(layers=1, dropout=0.5).lstm.dropout == 0.0


def test_a_model_is_built_again_from_what_a_checkpoint_stores() -> None:
    config = small_model(context="full").config
    assert ModelConfig.restored(config.plain()) == config


@pytest.mark.parametrize("stored", [None, {}, {"hidden": 3}])
def test_a_checkpoint_of_something_else_is_refused(stored: object) -> None:
    with pytest.raises(UsageError, match="does not contain a pet-name model"):
        ModelConfig.restored(stored)


@pytest.mark.parametrize("change", [{"layers": 10**9}, {"hidden_size": 10**9}, {"context": "all"}, {"window": "8"}])
def test_a_checkpoint_of_a_model_that_cannot_be_trained_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(change))):
        ModelConfig.restored({**small_model().config.plain(), **change})


def test_a_model_takes_no_memory_before_its_weights_fit() -> None:
    largest = {**small_model().config.plain(), "layers": 32, "hidden_size": 8192}
    assert all(each.is_meta for each in CharacterModel.restored(largest).parameters())


def test_a_model_over_other_symbols_is_refused() -> None:
    with pytest.raises(UsageError, match="over the symbols 'abc'"):
        ModelConfig.restored({**small_model().config.plain(), "symbols": "abc"})


def test_every_parameter_is_described() -> None:
    assert all(field.description for field in PetnamesParams.model_fields.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochz": 3},
        {"epochs": 0},
        {"epochs": "3"},
        {"val_fraction": 1.0},
        {"context": "half"},
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="PetnamesParams"):
        PetnamesParams.model_validate(wrong)


# --- petnames names ---


def test_alphabet_has_31_symbols() -> None:
    assert SYMBOLS == "*+abcdefghijklmnopqrstuvwxyz-. "


@given(st.text(SYMBOLS))
def test_decoding_undoes_encoding(text: str) -> None:
    assert decode(encode(text)) == text


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


def test_names_are_shown_as_people_write_them() -> None:
    assert [display(name) for name in ("mr. whiskers", "lou-lou", "t-bone")] == ["Mr. Whiskers", "Lou-Lou", "T-Bone"]


def test_builtin_list_is_large_clean_and_without_repeats() -> None:
    clean = load_names(PetnamesParams())
    assert len(clean.names) >= 1200
    assert not clean.left_out


def test_left_out_names_are_counted_and_shown() -> None:
    clean = clean_names([" Luna ", "LUNA", "josé", "r2d2", "", None, "mr.  whiskers", "x" * 65])
    assert clean.names == ("luna", "mr. whiskers")
    report = clean.report("list.txt")
    assert report == (
        "names: 2 of 8 from list.txt; left out: 2 with characters outside a-z, '-', '.' and space "
        f"(such as 'jos\\xe9', 'r2d2'); 1 too long (such as '{'x' * 40}'); 2 empty; 1 repeated"
    )


def test_blank_and_stop_are_not_characters_of_a_name() -> None:
    assert foreign_characters("*a+") == "*+"


@pytest.mark.parametrize(
    ("file_name", "content"),
    [("names.json", '["Luna", "Max", null]'), ("names.txt", "\ufeffLuna\r\nMax\n\n"), ("N.TXT", "Luna\nMax")],
)
def test_each_format_is_read(tmp_path: Path, file_name: str, content: str) -> None:
    path = tmp_path / file_name
    path.write_text(content, encoding="utf-8")
    assert load_names(PetnamesParams(names=str(path))).names == ("luna", "max")


def test_relative_paths_start_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "names.txt").write_text("luna")
    monkeypatch.chdir(tmp_path)
    assert load_names(PetnamesParams(names="names.txt")).names == ("luna",)


def test_list_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_of_names, "MAX_SOURCE_BYTES", 10)
    (tmp_path / "names.txt").write_text("luna\nbella")
    assert load_names(PetnamesParams(names=str(tmp_path / "names.txt"))).names == ("luna", "bella")
    (tmp_path / "names.txt").write_text("luna\nbellas")
    with pytest.raises(UsageError, match="holds more than"):
        load_names(PetnamesParams(names=str(tmp_path / "names.txt")))


@pytest.mark.parametrize(
    ("file_name", "content", "message"),
    [
        ("names.csv", "pet,age\nluna,1", r"names.csv' ends in neither .txt \(a name on each line\) nor .json"),
        ("names.json.gz", "x", "names.json.gz' ends in neither"),
        ("names", "x", "names' ends in neither"),
        ("names.json", "{", "not valid JSON"),
        ("names.json", '{"a": 1}', "not a JSON list of names"),
        ("names.json", '[["luna"]]', "not a JSON list of names"),
        ("names.json", '[{"pet": "luna"}]', "not a JSON list of names"),
        ("names.txt", "", "no usable name: .*names.txt is empty"),
        ("names.txt", "123\n", "no usable name.*'123'"),
        ("names.json", "[" * 100_000, "not valid JSON"),
    ],
)
def test_an_unusable_source_says_what_is_wrong(tmp_path: Path, file_name: str, content: str, message: str) -> None:
    path = tmp_path / file_name
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        load_names(PetnamesParams(names=str(path)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't read params.names .*none.txt.* does not exist; .*working directory"):
        load_names(PetnamesParams(names=str(tmp_path / "none.txt")))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"names": "missing.txt"}, r"can't read params.names 'missing.txt': /.*/missing.txt does not exist"),
        (
            {"names": "names.txt", "val_fraction": 0.9},
            "params.val_fraction 0.9 of 1 distinct name leaves nothing to train on: ",
        ),
        ({"names": "long.txt"}, "no usable name: .* from long.txt"),
    ],
)
def test_what_no_rank_could_train_on_is_told_in_one_line_without_what_led_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, object], message: str
) -> None:
    (tmp_path / "names.txt").write_text("luna\n")
    (tmp_path / "long.txt").write_text("a" * 65)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        check(params, tmp_path / "inputs", pytest.fail)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None and (caught.value.__context__ is None or caught.value.__suppress_context__)


def test_names_that_do_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "names.txt").write_text("luna\nmax\n")
    monkeypatch.chdir(tmp_path)
    check({"names": "names.txt", "names_options": {}}, tmp_path, pytest.fail)
    check({}, tmp_path, pytest.fail)
    assert [path.name for path in tmp_path.iterdir()] == ["names.txt"]


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_bytes(b"luna\n\xff")
    with pytest.raises(UsageError, match=r"not UTF-8 text \(byte 5\)"):
        load_names(PetnamesParams(names=str(tmp_path / "names.txt")))


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        load_names(PetnamesParams(names="nosuch://me:hunter2@host/names.txt"))
    assert "hunter2" not in str(caught.value)


@given(st.lists(st.text("abc", min_size=1), min_size=2).filter(lambda names: len(set(names)) > 1), st.integers(0, 99))
def test_no_held_out_name_is_trained_on(names: list[str], seed: int) -> None:
    split = split_names(names, 0.3, seed)
    assert set(split.train) | set(split.held_out) == set(names)
    assert set(split.train).isdisjoint(split.held_out)
    assert len(set(split.held_out)) == len(split.held_out) >= 1


def test_the_split_depends_on_the_seed_but_not_on_the_order() -> None:
    names = load_names(PetnamesParams()).names
    split = split_names(names, 0.1, 1)
    assert set(split_names(names[::-1], 0.1, 1).held_out) == set(split.held_out)
    assert set(split_names(names, 0.1, 2).held_out) != set(split.held_out)
    assert len(split.held_out) == round(0.1 * len(names))


def test_examples_are_the_three_most_frequent_and_cut() -> None:
    foreign = [*("é" * 50,) * 3, *("ü2",) * 2, "ñ", "ñ", "ö", "ö"]
    told = clean_names(foreign).report("list.txt")
    assert told.endswith(f"(such as {'é' * 40!a}, '\\xfc2', '\\xf1')")


@pytest.mark.parametrize(
    ("count", "share", "held_out"),
    [(10, 0.1, 1), (10, 0.01, 1), (10, 0.0, 0), (10, 0.25, 2), (10, 0.26, 3), (10, 0.9, 9)],
)
def test_share_of_distinct_names_is_held_out(count: int, share: float, held_out: int) -> None:
    names = [f"n{'abcdefghij'[number]}" for number in range(count)]
    split = split_names([*names, *names], share, 0)
    assert (len(split.held_out), len(split.train)) == (held_out, 2 * (count - held_out))
    assert sorted({*split.train, *split.held_out}) == names and not {*split.train} & {*split.held_out}


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b"]])
def test_split_leaves_names_to_train_on(names: list[str]) -> None:
    if len(set(names)) == 1:
        with pytest.raises(UsageError, match=r"params\.val_fraction 0\.1 of 1 distinct name leaves nothing"):
            split_names(names, 0.1, 0)
    else:
        assert len(split_names(names, 0.1, 0).train) == 1

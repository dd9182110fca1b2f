"""Images, tables, galleries and the confusion matrix of a run."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from ddptrain.reports.html.pictures import PictureReader
from ddptrain.reports.html.tables import CsvFiles, GeneratedName, confusion, gallery


def png(folder: Path, name: str, size: tuple[int, int] = (4, 3)) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (10, 200, 30)).save(path)


def reader(folder: Path, most: int = 100) -> PictureReader:
    files = {path.relative_to(folder).as_posix(): path.lstat().st_size for path in folder.rglob("*.*")}
    return PictureReader(folder, files, most)


def test_picture_is_decoded_and_encoded_again(tmp_path: Path) -> None:
    png(tmp_path, "images/a/step-2-rank-0.png")
    with (tmp_path / "images/a/step-2-rank-0.png").open("ab") as file:
        file.write(b"<script>")  # behind the end of the image
    picture = reader(tmp_path).read("images/a/step-2-rank-0.png")
    assert picture is not None and (picture.width, picture.height, picture.is_small) == (4, 3, True)
    data = base64.b64decode(picture.source.removeprefix("data:image/png;base64,"))
    assert b"<script>" not in data
    assert Image.open(io.BytesIO(data)).getpixel((0, 0)) == (10, 200, 30)


def test_large_picture_becomes_smaller(tmp_path: Path) -> None:
    png(tmp_path, "a.png", (3000, 1500))
    picture = reader(tmp_path).read("a.png")
    assert picture is not None and (picture.width, picture.height) == (480, 240)


@pytest.mark.parametrize("content", [b"", b"<svg/>", b"\x89PNG\r\n\x1a\n" + b"\0" * 50])
def test_what_is_no_image_is_left_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    assert reader(tmp_path).read("a.png") is None


def test_enormous_picture_is_left_out(tmp_path: Path) -> None:
    png(tmp_path, "a.png", (8000, 4001))
    assert reader(tmp_path).read("a.png") is None


def test_link_and_path_out_of_the_folder_are_left_out(tmp_path: Path) -> None:
    png(tmp_path, "secret.png")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/link.png").symlink_to(tmp_path / "secret.png")
    pictures = reader(tmp_path / "run")
    assert pictures.read("link.png") is None
    assert pictures.read("../secret.png") is None


def test_newest_pictures_are_shown(tmp_path: Path) -> None:
    for step in range(5):
        png(tmp_path, f"images/a/step-{step}-rank-0.png")
    ((name, pictures),) = reader(tmp_path, 2).groups()
    assert name == "a"
    assert [picture.name for picture in pictures] == ["step-4-rank-0.png", "step-3-rank-0.png"]  # the newest first


def files(folder: Path, **contents: str) -> CsvFiles:
    for name, text in contents.items():
        path = folder / f"{name.replace('__', '/')}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CsvFiles(folder, {path.relative_to(folder).as_posix(): 1 for path in folder.rglob("*.csv")})


def test_newest_table_of_each_rank_is_shown(tmp_path: Path) -> None:
    found = files(
        tmp_path, **{"tables__t__step-2-rank-0": "a,b\n1,2\n", "tables__t__step-10-rank-0": "a,b\n3,4\n5,6\n"}
    )
    (table,) = found.tables()
    assert (table.path, table.columns, table.rows) == (
        "tables/t/step-10-rank-0.csv",
        ["a", "b"],
        [["3", "4"], ["5", "6"]],
    )
    assert not table.more


def test_rows_columns_and_cells_are_bounded(tmp_path: Path) -> None:
    (table,) = files(tmp_path, wide=",".join("c" * 999 for _ in range(50)) + "\n" + "x\n" * 500).tables()
    assert (len(table.columns), len(table.columns[0]), len(table.rows), table.more) == (20, 203, 100, True)


def test_gallery_shows_wrong_predictions_first(tmp_path: Path) -> None:
    png(tmp_path, "images/p/a.png")
    png(tmp_path, "images/p/b.png")
    rows = "image,label,prediction\nimages/p/a.png,cat,cat\nimages/p/b.png,cat,dog\nimages/p/missing.png,x,y\n"
    (table,) = files(tmp_path, tables__p=rows).tables()
    items = gallery(table, reader(tmp_path))
    assert [(item.picture.name, item.is_wrong) for item in items] == [("b.png", True), ("a.png", False)]
    assert items[0].cells == [("label", "cat"), ("prediction", "dog")]


def test_confusion_counts_all_ranks(tmp_path: Path) -> None:
    header = "key,label,prediction,probability\n"
    found = files(
        tmp_path,
        **{
            "predictions__rank-0": header + "1,cat,cat,0.9\n2,cat,dog,0.6\n",
            "predictions__rank-1": header + "3,dog,dog,0.8\n4,cat,dog,0.7\n",
        },
    )
    matrix = confusion(found.predictions())
    assert matrix is not None
    assert (matrix.classes, matrix.total, matrix.right, matrix.accuracy) == (["cat", "dog"], 4, 2, 0.5)
    assert [[cell.count for cell in cells] for _, _, cells in matrix.rows] == [[1, 2], [0, 1]]
    assert matrix.worst == [("4", "cat", "dog", 0.7), ("2", "cat", "dog", 0.6)]


def test_many_classes_have_one_row_for_the_others() -> None:
    matrix = confusion([[str(at), f"class-{at}", f"class-{at}", "1"] for at in range(100)])
    assert matrix is not None and len(matrix.classes) == 25
    assert matrix.rows[-1][0] == "other classes"
    assert sum(cell.count for _, _, cells in matrix.rows for cell in cells) == 100
    assert confusion([]) is None


def test_names_that_were_generated_last_are_shown(tmp_path: Path) -> None:
    table = "tables__generated_names__step-{}-rank-0".format
    found = files(
        tmp_path, **{table(5): "name,is_known\nOld,False\n", table(10): "name,is_known\nRex,True\nMo,False\nbad\n"}
    )
    assert found.generated_names() == [GeneratedName("Rex", is_known=True), GeneratedName("Mo", is_known=False)]
    assert found.tables() == []
    assert files(tmp_path / "other", **{table(5): "a,b\n1,2\n"}).generated_names() == []

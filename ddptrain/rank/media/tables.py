"""Tables as files: CSV, or Parquet where pyarrow is installed."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

FORMATS = ("csv", "parquet")


def encode(columns: Sequence[str], rows: Sequence[Sequence[Any]], form: str) -> bytes:
    """The file of a table of numbers, text and None.

    Raises:
        ValueError: there is no such format.
        ImportError: Parquet needs pyarrow.
        TypeError: a column can't be one of Parquet: it has text and numbers, say.
    """
    if form == "csv":
        return _as_csv(columns, rows)
    if form == "parquet":
        return _as_parquet(columns, rows)
    raise ValueError(f"a table is written as csv or parquet, not as {form!r}")


def _as_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _as_parquet(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError("tables are written as Parquet by pyarrow: pip install 'ddptrain[parquet]'") from error
    arrays = []
    for index, name in enumerate(columns):
        try:
            arrays.append(pa.array([row[index] for row in rows]))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise TypeError(f"column {name!r} holds values of different types: {error}; write it as csv") from error
    file = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, names=list(columns)), file)
    return file.getvalue()

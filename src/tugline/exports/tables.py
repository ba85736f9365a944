"""Write Parquet and Arrow files in batches of bounded size.

pyarrow comes with the extra ``export``. No file holds a date or a path, so equal rows make equal
bytes. A map is a list of ``{key, value}``, because Hugging Face `datasets` knows no Arrow map.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tugline.errors import UsageError
from tugline.exports.base import Exporter, RowWriter

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as _error:
    _MISSING = "this format is written with pyarrow, which needs: pip install 'tugline[export]'"
    raise UsageError(_MISSING) from _error

_BATCH_ROWS = 256
_BATCH_TOKENS = 1 << 20
"""A batch is written when it has that many rows or tokens."""


def _map(value: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct({"key": pa.string(), "value": value}))


TYPES: dict[str, pa.DataType] = {
    "text": pa.string(),
    "texts": pa.list_(pa.string()),
    "bool": pa.bool_(),
    "int": pa.int32(),
    "float": pa.float64(),
    "ids": pa.list_(pa.int32()),
    "longs": pa.list_(pa.int64()),
    "bools": pa.list_(pa.bool_()),
    "bits": pa.list_(pa.int8()),
    "floats": pa.list_(pa.float32()),
    "tags": _map(pa.string()),
    "numbers": _map(pa.float64()),
    "spans": pa.list_(
        pa.struct(
            dict.fromkeys(("call", "start", "end", "version"), pa.int32()) | {"masked": pa.string()}
        )
    ),
    "failure": pa.struct({"boundary": pa.string(), "message": pa.string()}),
    "ledger": pa.struct(
        dict.fromkeys(("sampled", "trained"), pa.int64())
        | dict.fromkeys(("masked", "dropped"), _map(pa.int64()))
    ),
}
"""The types in `TableExporter.columns`."""


def pairs(mapping: Mapping[Any, object]) -> list[dict[str, object]]:
    """Return the value of a map column, sorted by key."""
    return [{"key": str(key), "value": mapping[key]} for key in sorted(mapping)]


class TableExporter(Exporter):
    """A format of rows with typed columns."""

    suffix = ".parquet"
    columns = ""
    """``name:type`` of each, with the types in `TYPES`."""

    def open(self, path: Path) -> RowWriter:
        """Create the file: Arrow IPC if that is the suffix, else Parquet."""
        fields = (column.split(":") for column in self.columns.split())
        schema = pa.schema([(name, TYPES[kind]) for name, kind in fields])
        return _TableWriter(path, schema, ipc=self.suffix == ".arrow")


class _TableWriter(RowWriter):
    def __init__(self, path: Path, schema: pa.Schema, *, ipc: bool) -> None:
        self._schema = schema
        self._rows: list[Mapping[str, object]] = []
        self._tokens = 0
        self._writer: Any = (
            pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))
            if ipc
            else pq.ParquetWriter(str(path), schema, compression="zstd")
        )

    def write(self, values: Mapping[str, object]) -> None:
        """Buffer one row, and write the batch if it is full."""
        self._rows.append(values)
        self._tokens += max(getattr(value, "size", 0) for value in values.values())
        if len(self._rows) >= _BATCH_ROWS or self._tokens >= _BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        columns = [
            pa.array([row[one.name] for row in self._rows], one.type) for one in self._schema
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows, self._tokens = [], 0

    def close(self) -> None:
        """Write the last batch and close the file."""
        if self._rows:
            self._flush()
        self._writer.close()

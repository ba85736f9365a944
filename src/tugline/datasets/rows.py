"""Rows of a data set: from a JSON, JSON lines, CSV or Parquet file, or from the Hugging Face hub.

Rows come one by one, each with its place in words, so that a bad one is told by where it stands.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tugline.errors import ConfigError
from tugline.schema import read_text, read_values

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_LONGEST_FIELD = 1 << 30
"""Characters of a CSV field: a patch or a list of tests is longer than csv's own bound."""


class Source(msgspec.Struct, frozen=True):
    """Where rows are: a file, or a data set of the hub. Exactly one of them."""

    path: str | None = None
    dataset: str | None = None
    """Such as ``SWE-Gym/SWE-Gym``; needs the extra ``hub``."""
    subset: str | None = None
    """Of `dataset`: its configuration."""
    split: str | None = None
    """Of `dataset`: which split; None: all."""
    revision: str | None = None
    """Of `dataset`: a commit or tag, so that the rows stay what they are."""

    def check(self, taskset: str) -> None:
        """Raises `ConfigError`, naming the task set, unless it says one place."""
        if (self.path is None) == (self.dataset is None):
            msg = f"taskset {taskset!r}: give either path or dataset"
            raise ConfigError(msg)
        if self.path is not None and Path(self.path).suffix.lower() not in SUFFIXES:
            msg = f"taskset {taskset!r}: path is {self.path!r}, must end in {', '.join(SUFFIXES)}"
            raise ConfigError(msg)

    def rows(self) -> Iterator[tuple[str, Row, str | None]]:
        """Each row with its place in words, and the split that it came from, if there is one."""
        if self.path is not None:
            for where, row in _of_file(Path(self.path)):
                if not isinstance(row, dict):
                    msg = f"{where} is no row; an object with keys and values is needed"
                    raise ConfigError(msg)
                yield where, row, None
            return
        yield from self._of_hub()

    def _of_hub(self) -> Iterator[tuple[str, Row, str | None]]:
        try:
            import datasets  # noqa: PLC0415 - an extra
        except ImportError as error:
            msg = "rows of the Hugging Face hub need `pip install tugline[hub]`"
            raise ConfigError(msg) from error
        name = self.dataset or ""
        try:
            found = datasets.load_dataset(name, self.subset, revision=self.revision)
        except (OSError, ValueError, RuntimeError) as error:
            msg = f"data set {name!r} cannot be had: {str(error).splitlines()[0][:300]}"
            raise ConfigError(msg) from error
        if self.split is not None and self.split not in found:
            msg = f"data set {name!r}: split is {self.split!r}, must be one of {', '.join(found)}"
            raise ConfigError(msg)
        for split in [self.split] if self.split is not None else list(found):
            for number, row in enumerate(found[split]):
                yield f"{name}, {split} row {number}", row, split


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    match path.suffix.lower():
        case ".parquet":
            yield from _of_parquet(path)
        case ".json":
            values = read_values(path)
            if not isinstance(values, list):
                msg = f"{path} must be a list of rows"
                raise ConfigError(msg)
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(values))
        case ".csv":
            yield from _of_csv(path)
        case _:
            for number, line in enumerate(read_text(path).split("\n"), 1):
                if line.strip():
                    yield f"{path}, line {number}", _decoded(line, f"{path}, line {number}")


def _of_csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(_LONGEST_FIELD)
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if None in row:
                msg = f"{where}: there are more values than the {len(row) - 1} names in line 1"
                raise ConfigError(msg)
            yield where, row
    except csv.Error as error:
        msg = f"{path}, line {rows.line_num} is not valid CSV: {error}"
        raise ConfigError(msg) from error


def _decoded(line: str, where: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        msg = f"{where} is not valid JSON: {error}"
        raise ConfigError(msg) from error


def _of_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - an extra
    except ImportError as error:
        msg = f"{path}: Parquet files need `pip install tugline[hub]`"
        raise ConfigError(msg) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except (OSError, ArrowException) as error:
        msg = f"cannot read {path}: {error}"
        raise ConfigError(msg) from error

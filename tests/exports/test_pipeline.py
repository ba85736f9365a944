"""Exports are atomic and deterministic, and count what they leave out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exports.made import call, export, read_rows, record
from tugline.errors import UnknownPlugin, UsageError
from tugline.exports.base import SkipReason
from tugline.exports.pipeline import Split
from tugline.types import PluginSpec

FORMS = ["parquet", "sft", "trl", "verl", "slime"]


def record_some(folder: Path) -> None:
    """Twelve sessions of three tasks."""
    for i in range(12):
        record(folder, f"s{i}", task=f"t{i % 3}", sample=i // 3, reward=float(i % 2))


@pytest.mark.parametrize("form", FORMS)
def test_two_runs_write_the_same_bytes(tmp_path: Path, form: str) -> None:
    """Neither the time nor the order of a folder changes a byte."""
    record_some(tmp_path / "in")
    export(form, tmp_path / "in", tmp_path / "first")
    export(form, tmp_path / "in", tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_a_split_is_a_folder_of_files(tmp_path: Path) -> None:
    """The summary has the counts of each file; every session is in one file."""
    record_some(tmp_path / "in")
    split = Split(shares={"train": 0.5, "test": 0.5}, seed=3)
    summary = export("parquet", tmp_path / "in", tmp_path / "out", split=split)
    tables = {name: read_rows(tmp_path / "out" / f"{name}.parquet") for name in split.shares}
    train, test = tables.values()
    assert sorted(row["session"] for row in train + test) == sorted(f"s{i}" for i in range(12))
    assert not {row["task"] for row in train} & {row["task"] for row in test}
    counts = {name: file.sessions for name, file in summary.files.items()}
    assert counts == {name: len(rows) for name, rows in tables.items()}
    assert sum(file.tasks for file in summary.files.values()) == 3
    assert sum(file.tokens for file in summary.files.values()) == 12 * 6
    assert sum(file.trained for file in summary.files.values()) == 12 * 3


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """Only `force` overwrites a file; no partial file is left beside it."""
    record(tmp_path / "in", "a")
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    with pytest.raises(UsageError, match=r"out.jsonl already exists; .* overwrite it with --force"):
        export("sft", tmp_path / "in", out)
    assert out.read_text() == "precious"
    export("sft", tmp_path / "in", out, force=True)
    assert json.loads(out.read_text())["metadata"]["session"] == "a"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.jsonl"]


def test_damaged_recordings_are_reported(tmp_path: Path) -> None:
    """Recordings without a header, or refused by a builder, are named; others are exported."""
    record(tmp_path, "a")
    broken = record(tmp_path, "b", sample=1)
    data = bytearray(broken.read_bytes())
    data[len(data) // 2] ^= 0xFF
    broken.write_bytes(data)
    record(tmp_path, "c", sample=2, calls=[call(0, [], [1])])
    (tmp_path / "d.0.rec").write_bytes(b"")
    summary = export("parquet", tmp_path, tmp_path / "out")
    assert (summary.recordings, summary.exported) == (4, 1)
    assert summary.left_out == {SkipReason.DAMAGED: 2, SkipReason.NO_HEADER: 1}
    assert str(broken) in summary.errors[0]
    assert "prompt_ids is empty" in summary.errors[1]


def test_an_empty_export_is_an_error(tmp_path: Path) -> None:
    """The error has the reasons, and no file is written."""
    record(tmp_path, "a", status=None)
    with pytest.raises(UsageError, match="no sessions to export: of 1 recordings, 1 no_reward"):
        export("verl", tmp_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.0.rec"]


def test_traces_are_built_with_the_given_builder(tmp_path: Path) -> None:
    """An unknown builder is an error."""
    record(tmp_path, "a")
    builder = PluginSpec("per_request", {"max_length": 5})
    export("parquet", tmp_path, tmp_path / "out", builder=builder)
    rows = read_rows(tmp_path / "out")
    assert [row["ids"] for row in rows] == [[10, 11, 12, 13], [10, 11, 12, 13, 14]]
    assert {row["builder"] for row in rows} == {"per_request"}
    assert rows[0]["ledger"]["dropped"] == [{"key": "over_length", "value": 1}]
    with pytest.raises(UnknownPlugin, match="unknown builder 'per_reqest'; did you mean"):
        export("parquet", tmp_path, tmp_path / "new", builder=PluginSpec("per_reqest"))


def test_formats_with_ids_have_one_tokenizer(tmp_path: Path) -> None:
    """Only text formats, and the full table, whose rows have their tokenizer, allow several."""
    record(tmp_path, "a", tokenizer="1f")
    record(tmp_path, "b", sample=1, tokenizer="2f")
    with pytest.raises(
        UsageError, match="have token ids of 2 tokenizers; export the sessions of one at a time"
    ):
        export("trl", tmp_path, tmp_path / "out")
    export("parquet", tmp_path, tmp_path / "out")
    assert [row["tokenizer"] for row in read_rows(tmp_path / "out")] == ["1f", "2f"]
    assert export("sft", tmp_path, tmp_path / "chat").exported == 2


def test_the_last_attempt_of_a_session_is_exported(tmp_path: Path) -> None:
    """Earlier attempts are left out; a session of another run is not an attempt."""
    record(tmp_path / "runs", "a", epoch=1, reward=1.0)
    record(tmp_path / "runs", "a", reward=0.0)
    record(tmp_path / "other", "a", reward=0.5)
    summary = export("sft", tmp_path, tmp_path / "out.jsonl")
    assert summary.left_out == {SkipReason.SUPERSEDED: 1}
    rewards = [row["metadata"]["reward"] for row in read_rows(tmp_path / "out.jsonl")]
    assert sorted(rewards) == [0.5, 1.0]


def test_a_problem_is_in_one_file_in_whatever_step(tmp_path: Path) -> None:
    """The ids of a problem's tasks differ by step and run; held-out sessions are left out."""
    for step in range(12):
        for problem in ("one", "two", "three-3"):
            record(tmp_path / "in", f"{problem}-{step}", task=f"g{step:07d}-{problem}")
    record(tmp_path / "in", "one-r1", task="r1-g0000001-one")
    record(tmp_path / "in", "held", task="eval000004-four")
    split = Split(shares={"train": 0.5, "test": 0.5}, seed=3)
    summary = export("trl", tmp_path / "in", tmp_path / "out", split=split)
    train, test = (read_rows(tmp_path / "out" / f"{name}.parquet") for name in split.shares)
    names = [{row["session"].rpartition("-")[0] for row in rows} for rows in (train, test)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {"one", "two", "three-3"}
    assert summary.left_out == {SkipReason.HELD_OUT: 1}


@pytest.mark.parametrize("form", ["parquet", "trl", "verl"])
def test_a_file_is_of_the_format_that_its_name_says(tmp_path: Path, form: str) -> None:
    """A table is Parquet or JSON lines by the file's name; other names are refused."""
    record(tmp_path / "in", "a")
    export(form, tmp_path / "in", tmp_path / "out.parquet")
    export(form, tmp_path / "in", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    table = read_rows(tmp_path / "out.parquet")
    assert [row.keys() for row in lines] == [row.keys() for row in table]
    for name in ("out.csv", "out.arrow"):
        with pytest.raises(UsageError, match=r"must end in .json, .jsonl, .ndjson, .parquet"):
            export(form, tmp_path / "in", tmp_path / name)
    with pytest.raises(UsageError, match="must end in"):
        export("sft", tmp_path / "in", tmp_path / "chat.parquet")

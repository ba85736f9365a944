"""Task-set files, and rows as tasks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tugline.datasets.base import Solution
from tugline.datasets.files import gather, load_tasks
from tugline.errors import ConfigError
from tugline.types import PluginSpec

SUMS = Path(__file__).with_name("sums")
SET = (SUMS / "set.yaml").read_text()


def write_set(folder: Path, text: str = SET) -> Path:
    """Write a task-set file with its rows beside it; returns its path."""
    shutil.copy(SUMS / "rows.jsonl", folder)
    (folder / "set.yaml").write_text(text)
    return folder / "set.yaml"


def test_rows_become_tasks_by_the_template(tmp_path: Path) -> None:
    """Fields fill in instruction, files, tags and the evaluator's options; the rest is shared."""
    (first, taskset), (second, _) = gather([write_set(tmp_path)])
    assert (first.id, second.id) == ("x-a-1", "x-a-2")
    assert first.instruction == "Say 1 + 1, level 3. Be brief."
    assert first.evaluator == PluginSpec("function", {"target": "m:f", "expected": "2"})
    assert first.files == {"x.py": "pass"}
    assert first.tags == {"taskset": "jsonl", "meta.level": "3", "run": "one", "instance": "a/1"}
    assert (first.samples, first.limits.agent_s, first.limits.init_s) == (4, 9, 60)
    assert taskset is not None
    assert taskset.solution(second) == Solution(changes={"answer.txt": "4"})


ROWS_SET = "taskset: {{name: jsonl, options: {{path: {path}, id: id{more}}}}}\n"
ROWS_SET += "template: {{harness: {{name: pi}}, evaluator: {{name: tests}}}}\n"


def read_rows(path: Path, data: str | bytes, more: str = "") -> list[tuple[str, str]]:
    """Write a file of rows; returns ids and instructions of its tasks."""
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    (path.parent / "set.yaml").write_text(ROWS_SET.format(path=path.name, more=more))
    return [(task.id, task.instruction) for task in load_tasks([path.parent / "set.yaml"])]


def test_rows_may_come_from_any_kind_of_file(tmp_path: Path) -> None:
    """JSON lines, JSON, CSV and Parquet give the same tasks."""
    rows = [{"instruction": "do one", "id": "1"}, {"instruction": "do two", "id": "2"}]
    table = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows), table)
    for name, data in {
        "r.jsonl": "\n".join(map(json.dumps, rows)),
        "r.json": json.dumps(rows),
        "r.csv": "instruction,id\ndo one,1\ndo two,2\n",
        "r.parquet": table.getvalue().to_pybytes(),
    }.items():
        assert read_rows(tmp_path / name, data) == [("1", "do one"), ("2", "do two")], name


def test_text_of_rows_is_unchanged(tmp_path: Path) -> None:
    """Unicode separators, line breaks, long fields and a byte order mark change no text."""
    odd = "one\u2028two\x85three"
    row = json.dumps({"id": "1", "instruction": odd}, ensure_ascii=False)
    assert read_rows(tmp_path / "r.jsonl", f"\ufeff{row}\r\n") == [("1", odd)]
    odd += "\x0bfour\x1cfive"
    long = "x" * 200_000
    table = f'\ufeffid,instruction\r\n1,{odd}\r\n2,"a\nb"\r\n3,{long}\r\n'
    assert read_rows(tmp_path / "r.csv", table) == [("1", odd), ("2", "a\nb"), ("3", long)]


@pytest.mark.parametrize(
    ("name", "data", "more", "message"),
    [
        (
            "r.csv",
            "id,instruction\n1,a,b\n",
            "",
            "line 2: the line has more values than the 2 names",
        ),
        ("r.csv", "id,instruction\n1\n", "", "line 2: instruction is null, must be a text"),
        ("r.jsonl", '{"id": 1, "instruction": null}', "", "instruction is null"),
        (
            "r.jsonl",
            '{"id": 1, "instruction": " "}',
            "",
            "instruction is ' ', must be a non-empty text",
        ),
        ("r.jsonl", '{"id": 1, "q": null}', ", instruction: 'Say {q}'", "q is null"),
        ("r.jsonl", '{"id": null, "instruction": "a"}', "", "id is null"),
    ],
)
def test_missing_values_are_reported(
    tmp_path: Path, name: str, data: str, more: str, message: str
) -> None:
    """The error names the line and the field."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_rows(tmp_path / name, data, more)


def test_task_files_and_sets_share_a_folder(tmp_path: Path) -> None:
    """Files and sets are read from one folder; the error for a duplicate id names both places."""
    file = write_set(tmp_path)
    (tmp_path / "rows.jsonl").rename(tmp_path.parent / "rows.jsonl")
    file.write_text(SET.replace("path: rows.jsonl", "path: ../rows.jsonl"))
    own = "instruction: do\nharness: {name: pi}\nevaluator: {name: tests}\nid: "
    (tmp_path / "a.yaml").write_text(f"{own}own")
    assert [task.id for task in load_tasks([tmp_path])] == ["own", "x-a-1", "x-a-2"]
    (tmp_path / "z.yaml").write_text(f"{own}x-a-2")
    with pytest.raises(
        ConfigError, match=r"z\.yaml: id 'x-a-2' is already used by .*set\.yaml, a/2"
    ):
        load_tasks([tmp_path])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("prefix:", "prefx:", "unknown key 'prefx'; did you mean 'prefix'?"),
        ("samples: 4", "sampels: 4", "template: unknown key 'sampels'; did you mean 'samples'?"),
        ("samples: 4", "samples: many", "template: samples is 'many'"),
        ("samples: 4", "files: {}", "template: files is set for each instance"),
        ("name: jsonl", "name: jsnol", "unknown taskset 'jsnol'; did you mean 'jsonl'?"),
        ("id: name", "idd: name", "taskset 'jsonl': "),
        ("id: name", "id: nam", "rows.jsonl, line 1: unknown field 'nam' (known: name, q"),
        ("path: rows.jsonl", "path: none.jsonl", "none.jsonl: No such file"),
        ("path: rows.jsonl", "path: rows.txt", "must end in .jsonl, .json, .csv, .parquet"),
        ("path: rows.jsonl", "split: x", "give either path or dataset"),
        ('"{instruction} Be', '"Be', "must contain {instruction}"),
        ("prefix: x-", "select: {include: [zzz]}", "no tasks are selected"),
        ("prefix: x-", "select: {limit: 0}", "select.limit is 0"),
        ("prefix: x-", "select: {shufle: 0}", "unknown key 'select.shufle'"),
        ("files: start", "files: q", "q must be an object that maps paths to texts"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_mistakes_in_sets_are_reported(tmp_path: Path, old: str, new: str, message: str) -> None:
    """The error has the key, the value and what would be right."""
    file = write_set(tmp_path, SET.replace(old, new, 1))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is checked below
        load_tasks([file])
    assert type(caught.value).__name__ in {"ConfigError", "UnknownPlugin"}
    assert message in str(caught.value)


def test_the_documented_custom_set_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class in docs/tasksets.md is found by its module."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "tasksets.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "documented_sums.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    text = "taskset: {name: 'documented_sums:Sums', options: {count: 3}}\n"
    text += "template: {harness: {name: pi}, evaluator: {name: tests}}\n"
    (tmp_path / "set.yaml").write_text(text)
    gathered = gather([tmp_path / "set.yaml"])
    assert [task.id for task, _ in gathered] == ["sum-0", "sum-1", "sum-2"]
    task, taskset = gathered[2]
    assert taskset is not None
    assert taskset.solution(task) == Solution(changes={"answer.txt": "4\n"})
    assert task.tags["split"] == "train"

"""Task files and the errors in them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import yaml
from task_schema import SCHEMA, make_json_schema

from tugline.datasets.files import load_tasks
from tugline.errors import ConfigError, UsageError
from tugline.schema import field_docs
from tugline.task_files import make_template
from tugline.types import Callback, Group, Limits, PluginSpec, Sampling, Task
from tugline.types.task import SERVER_FIELDS

YAML = "id: {id}\ninstruction: do\nharness: {{name: pi}}\nevaluator: {{name: tests}}\n"
RIGHT = YAML.format(id="t")
WANTED = Task(id="t", instruction="do", harness=PluginSpec("pi"), evaluator=PluginSpec("tests"))


def make_file(folder: Path, name: str, text: str) -> Path:
    """Write a file, and its folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_task_files_have_several_formats(tmp_path: Path) -> None:
    """YAML, TOML, JSON and JSON lines are read, with one task or many."""
    raw = {"id": "t", "instruction": "do", "harness": {"name": "pi"}}
    raw["evaluator"] = {"name": "tests"}
    line = msgspec.json.encode(raw).decode()
    toml = 'id="t"\ninstruction="do"\nharness.name="pi"\nevaluator.name="tests"\n'
    forms = {
        "one.yaml": yaml.safe_dump(raw),
        "many.yml": yaml.safe_dump([raw]),
        "one.toml": toml,
        "many.toml": f"[[tasks]]\n{toml}",
        "one.json": line,
        "many.json": f"[{line}]",
        "lines.jsonl": f"{line}\n\n",
    }
    for name, text in forms.items():
        assert load_tasks([make_file(tmp_path, name, text)]) == [WANTED], name


def test_folders_and_patterns_are_searched(tmp_path: Path) -> None:
    """Files come in order of names, without subfolders, which may hold the tasks' own files."""
    for name in ("b", "a"):
        make_file(tmp_path, f"{name}.yaml", YAML.format(id=name))
    make_file(tmp_path, "workspace/package.json", "{}")
    make_file(tmp_path, "notes.txt", "no task")
    assert [task.id for task in load_tasks([tmp_path])] == ["a", "b"]
    assert [task.id for task in load_tasks([f"{tmp_path}/[b].yaml"])] == ["b"]
    for nothing in (tmp_path / "c.yaml", f"{tmp_path}/*.toml"):
        with pytest.raises(UsageError, match="does not exist"):
            load_tasks([nothing])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="contains no task files"):
        load_tasks([tmp_path / "empty"])


def test_texts_can_be_read_from_files(tmp_path: Path) -> None:
    """Paths of text files are relative to the task file."""
    make_file(tmp_path, "texts/ask.md", "Please mend it.\n")
    make_file(tmp_path, "texts/calc.py", "def add(): ...\n")
    path = make_file(
        tmp_path,
        "t.yaml",
        "id: t\ninstruction_file: texts/ask.md\nharness: {name: pi}\nevaluator: {name: tests}\n"
        "files: {calc.py: {file: texts/calc.py}, b.txt: here}\n",
    )
    (task,) = load_tasks([path])
    assert task.instruction == "Please mend it.\n"
    assert task.files == {"calc.py": "def add(): ...\n", "b.txt": "here"}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("t.yaml", RIGHT + "limits: {agent: 3}", "key 'limits.agent'; did you mean 'agent_s'?"),
        ("t.yaml", RIGHT + "callback: {uri: x}", "unknown key 'callback.uri'; did you mean 'url'?"),
        ("t.yaml", RIGHT + "group: {on_stale: x}", "group.on_stale is 'x', must be one of mark, a"),
        ("t.yaml", RIGHT + "callback: {}", "callback.url is missing"),
        (
            "t.yaml",
            RIGHT + "instruction_file: x",
            "instruction and instruction_file are both given",
        ),
        ("t.yaml", RIGHT + "files: {a: {file: b}}", "files.a.file is 'b', which cannot be read: N"),
        ("t.jsonl", '{"id": "t"}\n{', "t.jsonl, line 1: instruction is missing"),
        ("t.jsonl", "{", "t.jsonl, line 1 is not valid JSON"),
        ("t.yaml", "[3]", "t.yaml, task 1: 3 is not a task"),
        ("t.txt", "", "file type '.txt' is not supported; use one of .yaml"),
    ],
)
def test_mistakes_have_file_field_and_value(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    """The error has in one line what is wrong, and what would be right."""
    path = make_file(tmp_path, name, text)
    with pytest.raises(ConfigError) as raised:
        load_tasks([path])
    assert expected in str(raised.value)
    assert str(path) in str(raised.value)


def test_the_mistakes_of_all_tasks_of_a_file_are_reported(tmp_path: Path) -> None:
    """Each mistake is named with its task; a missing text file is a mistake, too."""
    text = """
- {id: a, instruction_file: no.md, harness: pi, evaluator: tests, samples: 0}
- {id: b, instruction: do, harness: pi, evaluator: tests}
- {id: c, instruction: do, evaluator: tests, limits: {agent_s: x}}
"""
    path = make_file(tmp_path, "t.yaml", text)
    with pytest.raises(ConfigError) as raised:
        load_tasks([path])
    assert [str(each) for each in raised.value.problems] == [
        f"{path}, task 1: instruction_file is 'no.md', which cannot be read: {os.strerror(2)}",
        f"{path}, task 1: samples is 0, must be an integer >= 1",
        f"{path}, task 3: harness is missing",
        f"{path}, task 3: limits.agent_s is 'x', must be a number",
    ]


def test_a_plugin_may_be_given_by_its_name(tmp_path: Path) -> None:
    """A harness, evaluator or runtime without options can be its name, as in the schema."""
    text = "id: t\ninstruction: do\nharness: pi\nevaluator: tests\nruntime: local\n"
    (read,) = load_tasks([make_file(tmp_path, "t.yaml", text)])
    assert read == msgspec.structs.replace(WANTED, runtime=PluginSpec("local"))
    assert {"type": "string"} in make_json_schema()["$defs"]["Task"]["properties"]["harness"][
        "anyOf"
    ]
    wrong = make_file(tmp_path, "u.yaml", text.replace("pi", "3"))
    with pytest.raises(ConfigError, match="harness is 3, must be an object"):
        load_tasks([wrong])


def test_paths_of_a_workspace_are_relative_to_the_file(tmp_path: Path) -> None:
    """A path that exists beside the file is made absolute; others are paths on the node."""
    (tmp_path / "tasks/project").mkdir(parents=True)
    text = YAML.format(id="t") + "workspace:\n  folder: "
    for number, (given, wanted) in enumerate(
        {"project": f"{tmp_path}/tasks/project", "elsewhere": "elsewhere", "/srv": "/srv"}.items()
    ):
        file = make_file(tmp_path, f"tasks/{number}.yaml", text + given)
        assert load_tasks([file])[0].workspace.folder == wanted


def test_ids_are_unique(tmp_path: Path) -> None:
    """An id may occur once in all files together; the error names both places."""
    make_file(tmp_path, "a.yaml", YAML.format(id="t"))
    make_file(tmp_path, "b.yaml", YAML.format(id="t"))
    with pytest.raises(ConfigError, match=r"b\.yaml: id 't' is already used by .*a\.yaml"):
        load_tasks([tmp_path])


def test_the_template_has_every_field(tmp_path: Path) -> None:
    """Each field is in the template with its default as a comment."""
    text = make_template()
    (task,) = load_tasks([make_file(tmp_path, "t.yaml", text)])
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    start = lines.index("runtime:")
    callback = lines.index("callback:")
    fields = [line for line in lines[start - 1 : callback - 1] if ":" in line and line[0] != "-"]
    settings = [line for line in fields if not line[0].isupper()]
    (full,) = load_tasks([make_file(tmp_path, "f.yaml", text + "\n".join(settings))])
    assert full == task
    for kind in (Task, Limits, Sampling, Group, Callback, PluginSpec):
        for name, sentence in field_docs(kind).items():
            if name in SERVER_FIELDS:
                assert sentence not in text
                continue
            assert sentence in text, f"{kind.__name__}.{name}"
            assert f"{name}:" in text


def test_the_documented_schema_is_up_to_date() -> None:
    """The page equals what ``python tools/docs/task_schema.py`` writes."""
    made = msgspec.json.encode(make_json_schema())
    assert msgspec.json.decode(SCHEMA.read_bytes()) == msgspec.json.decode(made)


def test_an_agents_command_is_relative_to_the_task_file(tmp_path: Path) -> None:
    """A word that names a file beside it is absolute; the task's own files and others stay."""
    for name in ("agent.py", "own.py", "lib/tool.py", "with space.py"):
        make_file(tmp_path, name, "")
    agent = str(tmp_path / "agent.py")

    def read(options: dict[str, object]) -> dict[str, object]:
        values = {"id": "t", "instruction": "do", "evaluator": "tests", "files": {"own.py": ""}}
        values["harness"] = {"name": "shell", "options": options}
        path = make_file(tmp_path, "t.json", msgspec.json.encode(values).decode())
        return load_tasks([path])[0].harness.options

    text = "python3 ./agent.py --fast && python3 own.py other.py"
    assert read({"command": text})["command"] == text.replace("./agent.py", agent)
    words = ["python3", "agent.py", "-v", "with space.py"]
    assert read({"command": words, "folders": ["lib", "/usr/lib"]}) == {
        "command": ["python3", agent, "-v", str(tmp_path / "with space.py")],
        "folders": [str(tmp_path / "lib"), "/usr/lib"],
    }
    assert read({"command": "true", "setup": "sh agent.py"})["setup"] == f"sh {agent}"

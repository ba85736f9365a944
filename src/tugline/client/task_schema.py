"""What a task may be told: as a JSON schema for editors, and as a file with comments to fill in.

Both are made of `types.Task` itself, of its fields and the sentences under them, so they cannot
say anything else than what is accepted.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from enum import EnumType
from typing import Any

import msgspec
import yaml

from tugline.client.task_files import INSTRUCTION, struct_in
from tugline.types import Task

_TEXT = {"type": "string"}
_FILE = {
    "description": "Text, or where it is: relative to the task file.",
    "anyOf": [
        _TEXT,
        {
            "type": "object",
            "properties": {"file": _TEXT},
            "required": ["file"],
            "additionalProperties": False,
        },
    ],
}
_EXAMPLE = """\
# One problem for an agent. Check it with `tugline task check`, run it with `tugline submit`.
# A file may also hold a list of tasks. Lines that are commented out show the default.

# {id}
id: mend-add
# {instruction}
# (instruction_file: PATH takes it from a file beside this one.)
instruction: |
  calc.py adds up wrongly, and test_calc.py shows it. Mend calc.py.
# {harness}
harness:
  name: pi
# {evaluator}
evaluator:
  name: tests
# {files}
# (NAME: {{file: PATH}} takes the text from a file beside this one.)
files:
  calc.py: |
    def add(a, b):
        return a - b
  test_calc.py: |
    from calc import add


    def test_add():
        assert add(2, 3) == 5
"""


def template() -> str:
    """A task file with every field and its sentence: what one must say, then all defaults."""
    told = sentences(Task)
    start = _EXAMPLE.format_map(told)
    return start + "\n".join(["", *_optional()]) + "\n"


def _optional() -> Iterator[str]:
    told = sentences(Task)
    for field in msgspec.structs.fields(Task):
        if f"\n{field.name}:" in f"\n{_EXAMPLE}":
            continue
        yield f"# {told[field.name]}{_choices(field.type)}"
        inner = struct_in(field.type)
        if not inner:
            yield f"# {field.name}: {_shown(_default(field))}"
            continue
        yield f"# {field.name}:"
        for kind in inner:
            within = sentences(kind)
            for one in msgspec.structs.fields(kind):
                default = getattr(field.default, one.name, _default(one))
                sentence = f"{within[one.name]}{_choices(one.type)}"
                yield f"#   {one.name}: {_shown(default)}  # {sentence}"


def _choices(annotation: Any) -> str:
    return f" One of {', '.join(annotation)}." if isinstance(annotation, EnumType) else ""


def _default(field: msgspec.structs.FieldInfo) -> object:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def _shown(default: object) -> str:
    if default is msgspec.NODEFAULT:
        return '"..."'
    shown: str = yaml.safe_dump(msgspec.to_builtins(default), default_flow_style=True)
    return shown.removesuffix("\n").removesuffix("\n...")


def schema() -> dict[str, Any]:
    """JSON schema of a task file: one task, or a list of them."""
    (_,), parts = msgspec.json.schema_components([Task], ref_template="#/$defs/{name}")
    structs = {"Task": Task} | {
        inner.__name__: inner
        for field in msgspec.structs.fields(Task)
        for inner in struct_in(field.type)
    }
    for name, kind in structs.items():
        parts[name]["additionalProperties"] = False
        for field, sentence in sentences(kind).items():
            parts[name]["properties"][field]["description"] = sentence
    task = parts["Task"]
    task["properties"]["files"]["additionalProperties"] = _FILE
    task["properties"][INSTRUCTION] = _TEXT | {
        "description": "In place of `instruction`: where its text is, relative to the task file."
    }
    required = [name for name in task.pop("required") if name != "instruction"]
    task["required"] = required
    task["oneOf"] = [{"required": ["instruction"]}, {"required": [INSTRUCTION]}]
    one = {"$ref": "#/$defs/Task"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tugline tasks",
        "anyOf": [one, {"type": "array", "items": one}],
        "$defs": parts,
    }


def sentences(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The sentence under each field of a struct, in one line."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    body = node.body if isinstance(node, ast.ClassDef) else []
    told: dict[str, str] = {}
    for before, after in itertools.pairwise(body):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            text = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
            told[before.target.id] = " ".join(str(text).replace("``", "`").split())
    return told

"""Reference forms of a task file: a JSON schema for editors and a commented template.

Both are generated from `types.Task`, its fields and their docstrings, so they match what is
accepted.
"""

from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tugline.schema import describe_structs, field_docs, list_structs
from tugline.task_files import INSTRUCTION_FILE
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
_EXAMPLE = (Path(__file__).parent / "task_template.yaml").read_text(encoding="utf-8")
"""A task file whose comments name the fields that describe them."""


def make_template() -> str:
    """A task file with every field and its sentence: the required ones, then all defaults."""
    start = _EXAMPLE.format_map(field_docs(Task))
    return start + "\n".join(["", *_optional()]) + "\n"


def _optional() -> Iterator[str]:
    docs = field_docs(Task)
    for field in msgspec.structs.fields(Task):
        if f"\n{field.name}:" in f"\n{_EXAMPLE}":
            continue
        yield f"# {docs[field.name]}{_choices(field.type)}"
        inner = list_structs(field.type)
        if not inner:
            yield f"# {field.name}: {_to_yaml(_default(field))}"
            continue
        yield f"# {field.name}:"
        for kind in inner:
            for part in msgspec.structs.fields(kind):
                default = getattr(field.default, part.name, _default(part))
                sentence = f"{field_docs(kind)[part.name]}{_choices(part.type)}"
                yield f"#   {part.name}: {_to_yaml(default)}  # {sentence}"


def _choices(annotation: Any) -> str:
    return f" One of {', '.join(annotation)}." if isinstance(annotation, EnumType) else ""


def _default(field: msgspec.structs.FieldInfo) -> object:
    make = field.default_factory
    return field.default if make is msgspec.NODEFAULT else make()


def _to_yaml(default: object) -> str:
    if default is msgspec.NODEFAULT:
        return '"..."'
    text: str = yaml.safe_dump(msgspec.to_builtins(default), default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")


def make_json_schema() -> dict[str, Any]:
    """JSON schema of a task file: one task, or a list of them."""
    parts = describe_structs([Task], "#/$defs/{name}")
    for part in parts.values():
        if part.get("type") == "object":
            part["additionalProperties"] = False
    task = parts["Task"]
    task["properties"]["files"]["additionalProperties"] = _FILE
    task["properties"][INSTRUCTION_FILE] = _TEXT | {
        "description": "In place of `instruction`: file with its text, relative to the task file."
    }
    required = [name for name in task.pop("required") if name != "instruction"]
    task["required"] = required
    task["oneOf"] = [{"required": ["instruction"]}, {"required": [INSTRUCTION_FILE]}]
    task_ref = {"$ref": "#/$defs/Task"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tugline tasks",
        "anyOf": [task_ref, {"type": "array", "items": task_ref}],
        "$defs": parts,
    }

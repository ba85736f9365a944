"""Write ``docs/task.schema.json``, the JSON schema of task files, for editors.

It is generated from `types.Task`, its fields and their docstrings, so it matches the parser.
"""

from pathlib import Path
from typing import Any

import msgspec
from struct_schemas import describe_structs

from tugline.task_files import INSTRUCTION_FILE, PLUGINS
from tugline.types import Task

SCHEMA = Path(__file__).parents[2] / "docs" / "task.schema.json"
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


def make_json_schema() -> dict[str, Any]:
    """Make the JSON schema of a task file, which has a task or a list of tasks."""
    parts = describe_structs([Task], "#/$defs/{name}")
    for part in parts.values():
        if part.get("type") == "object":
            part["additionalProperties"] = False
    task = parts["Task"]
    task["properties"]["files"]["additionalProperties"] = _FILE
    task["properties"][INSTRUCTION_FILE] = _TEXT | {
        "description": "In place of `instruction`: file with its text, relative to the task file."
    }
    for kind in PLUGINS:
        given = task["properties"][kind]
        given["anyOf"] = [_TEXT, {"$ref": given.pop("$ref")}]
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


if __name__ == "__main__":
    SCHEMA.write_bytes(msgspec.json.format(msgspec.json.encode(make_json_schema())) + b"\n")

"""JSON schemas of structs, for the generated documents."""

import inspect
from collections.abc import Iterable
from typing import Any

import msgspec

from tugline.schema import field_docs, list_structs


def describe_structs(kinds: Iterable[Any], ref_template: str) -> dict[str, Any]:
    """Return the JSON schemas of all structs in these types, with the docstrings of fields."""
    waiting = [struct for kind in kinds for struct in list_structs(kind)]
    _, schemas = msgspec.json.schema_components(waiting, ref_template=ref_template)
    for schema in schemas.values():  # before Python 3.13 docstrings come with their indentation
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"])
    seen = set()
    while waiting:
        struct = waiting.pop()
        if struct in seen:
            continue
        seen.add(struct)
        for name, text in field_docs(struct).items():
            schemas[struct.__name__]["properties"][name].setdefault("description", text)
        for field in msgspec.structs.fields(struct):
            waiting += list_structs(field.type)
    return schemas

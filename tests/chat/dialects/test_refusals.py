"""Malformed requests are parsed or refused by name, and never raise another exception."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chat.dialects.wires import ALL_WIRES, WIRES, Wire
from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.model_call import Request
from tugline.errors import RequestError

HERE = Path(__file__).parent
REFUSED = [json.loads(line) for line in (HERE / "refused.jsonl").read_text().splitlines()]
"""Fields of a request, the parameter that the error names, and a part of its text."""
FULL = json.loads((HERE / "full.json").read_text())
"""For each dialect a request with a little of everything."""
WRONG = [None, True, 3, -1.5, "", "x", [], ["x"], [None], [[]], {}, {"type": "x"}, {"x": {}}, [{}]]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row['dialect']}-{row['param']}")
def test_unsupported_fields_are_refused_by_name(row: dict[str, Any]) -> None:
    """The error names the field; its text has the value or what is allowed."""
    wire = ALL_WIRES[row["dialect"]]
    with pytest.raises(RequestError) as caught:
        wire.hello(**row["fields"])
    assert caught.value.param == row["param"]
    assert row["words"] in str(caught.value)


@pytest.mark.parametrize("wire", ALL_WIRES.values(), ids=ALL_WIRES)
def test_malformed_bodies_are_400(wire: Wire) -> None:
    """Whatever the bytes are."""
    whole = json.dumps({**wire.fields, **FULL[wire.dialect.name]}).encode()
    malformed = [b"", b"{", b"[]", b"5", b"\xff", b"\0\0", b"[" * 90_000, whole[:-1]]
    malformed.append(whole.replace(b'"Hi', b'"\xff'))
    deep = b"[" * 9000 + b"]" * 9000
    malformed += [whole.replace(name, deep) for name in (b'"user"', b'"text"')]
    malformed += [whole.replace(b'"name"', b'"\xff"'), whole.replace(b'"a"', b'"\\ud800"')]
    for body in malformed:
        if body != whole:
            with pytest.raises(RequestError) as caught:
                wire.dialect.parse(wire.request(body), ParseCache())
            assert wire.dialect.encode_error(caught.value)[0] == 400


@pytest.mark.parametrize(
    ("wire", "path"),
    [
        *((wire, wire.path) for wire in ALL_WIRES.values()),
        (WIRES["openai_responses"], "/responses/compact"),
    ],
    ids=[*ALL_WIRES, "compact"],
)
def test_any_field_may_be_anything(wire: Wire, path: str) -> None:
    """Every field in turn is missing or of another kind: parsed or refused, never a crash."""
    parsed = refused = 0
    statuses = set()
    for body in [*WRONG, *corrupt(FULL[wire.dialect.name])]:
        try:
            request = wire.dialect.parse(wire.request(body, path), ParseCache())
        except RequestError as error:
            refused += 1
            statuses.add(wire.dialect.encode_error(error)[0])
        else:
            parsed += 1
            assert msgspec.convert(msgspec.to_builtins(request), Request) == request
            wire.dialect.stream(request, "s1-0", 17)
    assert min(parsed, refused) > 100
    assert statuses == {400}


def corrupt(whole: Any) -> Iterator[Any]:
    """For every value in the body: the body without it, and with other values in its place."""
    for *path_to, last in list_paths(whole):
        for value in [..., *WRONG]:
            body = copy.deepcopy(whole)
            place = body
            for step in path_to:
                place = place[step]
            if value is ...:
                del place[last]
            else:
                place[last] = value
            yield body


def list_paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside `value`."""
    steps = value if isinstance(value, dict) else range(len(value) * isinstance(value, list))
    for step in steps:
        yield (*before, step)
        if isinstance(value[step], dict | list):
            yield from list_paths(value[step], (*before, step))

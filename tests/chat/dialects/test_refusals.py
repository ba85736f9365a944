"""Whatever is wrong in a request, it is parsed or refused by name; never anything else."""

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
"""Fields of a request, the field that is to blame for its refusal, and a part of the text."""
FULL = json.loads((HERE / "full.json").read_text())
"""For each dialect a request with a little of everything."""
WRONG = [None, True, 3, -1.5, "", "x", [], ["x"], [None], [[]], {}, {"type": "x"}, {"x": {}}, [{}]]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row['dialect']}-{row['param']}")
def test_unsupported_fields_are_refused_by_name(row: dict[str, Any]) -> None:
    """The error names the field, and its text says the value or what would be right."""
    wire = ALL_WIRES[row["dialect"]]
    with pytest.raises(RequestError) as caught:
        wire.hello(**row["fields"])
    assert caught.value.param == row["param"]
    assert row["words"] in str(caught.value)


@pytest.mark.parametrize("wire", ALL_WIRES.values(), ids=ALL_WIRES)
def test_malformed_bodies_are_400(wire: Wire) -> None:
    """Whatever arrives is answered with a 400, never with a crash."""
    whole = json.dumps({**wire.fields, **FULL[wire.dialect.name]}).encode()
    spoilt = [b"", b"{", b"[]", b"5", b"\xff", b"\0\0", b"[" * 90_000, whole[:-1]]
    spoilt.append(whole.replace(b'"Hi', b'"\xff'))
    deep = b"[" * 9000 + b"]" * 9000
    spoilt += [whole.replace(name, deep) for name in (b'"user"', b'"text"')]
    spoilt += [whole.replace(b'"name"', b'"\xff"'), whole.replace(b'"a"', b'"\\ud800"')]
    for body in spoilt:
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
    for body in [*WRONG, *spoil(FULL[wire.dialect.name])]:
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


def spoil(whole: Any) -> Iterator[Any]:
    """The body with one place left out, or holding something else, for every place in it."""
    for *way, last in places(whole):
        for value in [..., *WRONG]:
            body = copy.deepcopy(whole)
            place = body
            for step in way:
                place = place[step]
            if value is ...:
                del place[last]
            else:
                place[last] = value
            yield body


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside `value`."""
    steps = value if isinstance(value, dict) else range(len(value) * isinstance(value, list))
    for step in steps:
        yield (*before, step)
        if isinstance(value[step], dict | list):
            yield from places(value[step], (*before, step))

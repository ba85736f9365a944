"""Malformed requests are parsed or refused by name, and never raise another exception."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.dialects.wires import ALL_WIRES, WIRES, Wire, neutral
from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.model_call import Request
from tugline.errors import RequestError
from tugline.types import Sampling, decode, encode

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


NUMBERS = (
    st.integers(-3, 3)
    | st.sampled_from([2**31, 2**53, 2**63, 2**64, 10**30]).flatmap(
        lambda n: st.integers(n - 2, n + 2)
    )
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(10**40), 10**40)
)
STOPS = st.lists(st.text(max_size=3) | st.integers(1020, 1030).map(lambda n: "x" * n), max_size=70)
SETTINGS = {
    "anthropic": ("temperature", "top_p", "top_k", "max_tokens", "stop_sequences"),
    "google": ("temperature", "topP", "topK", "maxOutputTokens", "seed", "stopSequences"),
    "openai_chat": (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_completion_tokens",
        "seed",
        "stop",
    ),
    "openai_responses": (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_output_tokens",
        "seed",
        "stop",
    ),
    "openai_completions": ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop"),
}


@pytest.mark.parametrize("wire", ALL_WIRES.values(), ids=ALL_WIRES)
@settings(max_examples=300)
@given(data=st.data())
def test_accepted_sampling_is_readable(wire: Wire, data: st.DataObject) -> None:
    """The bounds of requests are those of recordings; a refusal names the field."""
    name = data.draw(st.sampled_from(SETTINGS[wire.dialect.name]))
    value = data.draw(STOPS if name.startswith("stop") else NUMBERS)
    given_fields = (
        {"generationConfig": {name: value}} if wire.dialect.name == "google" else {name: value}
    )
    param, sampling = "", Sampling()
    try:
        sampling = wire.hello(**given_fields).sampling
    except RequestError as error:
        param = error.param or "none"
    assert (name in param) or (not param and decode(encode(sampling), Sampling) == sampling)


@pytest.mark.parametrize("wire", ALL_WIRES.values(), ids=ALL_WIRES)
def test_malformed_bodies_are_400(wire: Wire) -> None:
    """Any bytes that are not a request get 400."""
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
    """A body without a field, or with one of another kind, is parsed or refused; none crashes."""
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
            plain = neutral(request)
            assert msgspec.convert(msgspec.to_builtins(plain), Request) == plain
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

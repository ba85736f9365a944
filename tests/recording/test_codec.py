"""Calls are read as they were written, bit for bit; images are stored once, ids share memory."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from support.calls import make_call, write_calls
from support.random_experts import SESSIONS_WITH_EXPERTS
from support.random_sessions import SESSIONS, RandomSession
from tugline.errors import CaptureError
from tugline.recording.file import Writer, read
from tugline.types import Call, Image, Message, Role, Sampling, Tool, ToolCall, VersionSpan, encode

NOISE = np.random.default_rng(0)
LARGE = "data:image/png;base64," + base64.b64encode(NOISE.bytes(300_000)).decode()
SMALL = "data:image/png;base64,iVBORw0KGgo="
URLS = (
    SMALL,
    "data:image/gif;base64," + base64.b64encode(NOISE.bytes(2000)).decode(),
    "https://example.org/a.png",
    "sha256:" + Image(SMALL).digest,
    "data:,",
    "",
)


def are_equal(loaded: tuple[Call, ...], calls: list[Call]) -> bool:
    """Whether calls are equal in every byte."""
    return [encode(call) for call in loaded] == [encode(call) for call in calls]


texts = st.text(st.characters(codec="utf-8"), max_size=12)
images = st.builds(Image, st.sampled_from(URLS), st.integers(0, 9), st.none() | texts)
messages = st.builds(
    Message,
    st.sampled_from(Role),
    texts,
    tool_calls=st.lists(st.builds(ToolCall, texts, texts, texts), max_size=2).map(tuple),
    reasoning=st.none() | texts,
    images=st.lists(images, max_size=3).map(tuple),
)


tools = st.builds(Tool, texts, texts, st.just({"n": [1, 0.1, None]}))
contents = st.fixed_dictionaries(
    {
        "messages": st.lists(messages, max_size=3).map(tuple),
        "answer": st.none() | messages.map(lambda message: replace(message, images=())),
        "tools": st.lists(tools, max_size=1).map(tuple),
    }
)


@settings(max_examples=80)
@given(drawn=SESSIONS | SESSIONS_WITH_EXPERTS, data=st.data())
def test_any_calls_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, drawn: RandomSession, data: st.DataObject
) -> None:
    """Forks, repeats, images, and files closed and opened in between change nothing."""
    calls = [replace(call, **data.draw(contents)) for call in drawn.calls]
    path = tmp_path_factory.getbasetemp() / "any.rec"
    path.unlink(missing_ok=True)
    writer = Writer(path)
    for call in calls:
        if data.draw(st.booleans()):
            writer.close()
            writer = Writer(path)
        writer.append(call)
    writer.close()
    recording = read(path)
    assert are_equal(recording.calls, calls)
    assert not any(call.prompt_ids.flags.writeable for call in recording.calls), "shared memory"
    for image in (image for call in calls for m in call.messages for image in m.images):
        assert recording.images[image.digest] == image.url


def test_an_image_is_stored_once(tmp_path: Path) -> None:
    """Calls share a stored image, however many have it, in extended or in new prompts."""
    path, ids = tmp_path / "a.rec", np.arange(50, dtype=np.int32)
    picture = Message(Role.USER, "look", images=(Image(LARGE, 2),))
    calls = []
    for number in range(12):
        is_new = number % 4 == 0
        added = (picture,) if is_new else (Message(Role.TOOL, f"result {number}"),)
        calls.append(make_call(number, ids, ids[:5], messages=added))
    write_calls(path, calls)
    assert path.stat().st_size < 1.02 * len(LARGE)
    recording = read(path)
    assert are_equal(recording.calls, calls)
    assert recording.images == {Image(LARGE).digest: LARGE}


def unreadable(call: Call) -> Iterator[Call]:
    """Calls that cannot be encoded, or that a reader refuses."""
    samplings = [
        Sampling(max_tokens=2**31), Sampling(max_tokens=0), Sampling(temperature=11.0),
        Sampling(top_p=0.0), Sampling(top_k=-1), Sampling(seed=-1), Sampling(seed=2**64),
        Sampling(stop=("",)), Sampling(stop=("x",) * 65), Sampling(stop=("x" * 1025,)),
    ]  # fmt: skip
    yield from (replace(call, number=1, requested=sampling) for sampling in samplings)
    yield from (replace(call, number=1, sampling=sampling) for sampling in samplings)
    nested: dict[str, Any] = {}
    for _ in range(2000):
        nested = {"x": nested}
    for schema in ({"maximum": 2**64}, {"minimum": -(2**63) - 1}, nested, {"x": "\udc00"}):
        yield replace(call, number=1, tools=(Tool("f", "", schema),))
    yield replace(call, number=1, versions=(VersionSpan(2**64, 0, 1),))


def test_a_call_that_cannot_be_read_is_an_error_when_it_is_written(tmp_path: Path) -> None:
    """The error leaves the file intact; calls that are written later can be read."""
    path, ids = tmp_path / "a.rec", np.arange(50, dtype=np.int32)
    message = Message(Role.USER, "look", images=(Image(LARGE, 2),))
    first, second = make_call(0, ids, ids[:5]), make_call(2, ids, ids[:9], messages=(message,))
    broken = make_call(1, ids[:30], ids, messages=(message,), thread="\ud800")
    with Writer(path) as writer:
        writer.append(first)
        for bad in (broken, *unreadable(first)):
            with pytest.raises(CaptureError, match="cannot be recorded"):
                writer.append(bad)
        writer.append(second)
    assert are_equal(read(path).calls, [first, second])

"""Whatever calls are packed come back bit for bit, pictures once, ids in shared memory."""

import base64
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from calls import make_call, write_calls
from drawn_sessions import SESSIONS, Drawn
from tugline.recording.file import Writer, read
from tugline.types import Call, Image, Message, Role, Tool, ToolCall, encode

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


def same(found: tuple[Call, ...], calls: list[Call]) -> bool:
    """Equal in every byte."""
    return [encode(one) for one in found] == [encode(one) for one in calls]


words = st.text(st.characters(codec="utf-8"), max_size=12)
images = st.builds(Image, st.sampled_from(URLS), st.integers(0, 9), st.none() | words)
messages = st.builds(
    Message,
    st.sampled_from(Role),
    words,
    tool_calls=st.lists(st.builds(ToolCall, words, words, words), max_size=2).map(tuple),
    reasoning=st.none() | words,
    images=st.lists(images, max_size=3).map(tuple),
)


tools = st.builds(Tool, words, words, st.just({"n": [1, 0.1, None]}))
contents = st.fixed_dictionaries(
    {
        "messages": st.lists(messages, max_size=3).map(tuple),
        "answer": st.none() | messages.map(lambda message: replace(message, images=())),
        "tools": st.lists(tools, max_size=1).map(tuple),
    }
)


@settings(max_examples=80)
@given(drawn=SESSIONS, data=st.data())
def test_any_calls_come_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: Drawn, data: st.DataObject
) -> None:
    """Forks, repeats, pictures and files closed in between make no difference."""
    calls = [replace(one, **data.draw(contents)) for one in drawn.calls]
    path = tmp_path_factory.getbasetemp() / "any.rec"
    path.unlink(missing_ok=True)
    writer = Writer(path)
    for one in calls:
        if data.draw(st.booleans()):
            writer.close()
            writer = Writer(path)
        writer.append(one)
    writer.close()
    found = read(path)
    assert same(found.calls, calls)
    assert not any(one.prompt_ids.flags.writeable for one in found.calls), "they share memory"
    for image in (image for one in calls for m in one.messages for image in m.images):
        assert found.images[image.digest] == image.url


def test_a_picture_is_kept_once(tmp_path: Path) -> None:
    """However many calls hold it, extended or rendered anew."""
    path, ids = tmp_path / "a.rec", np.arange(50, dtype=np.int32)
    picture = Message(Role.USER, "look", images=(Image(LARGE, 2),))
    calls = []
    for number in range(12):
        anew = number % 4 == 0
        added = (picture,) if anew else (Message(Role.TOOL, f"result {number}"),)
        calls.append(make_call(number, ids, ids[:5], messages=added))
    write_calls(path, calls)
    assert path.stat().st_size < 1.02 * len(LARGE)
    found = read(path)
    assert same(found.calls, calls)
    assert found.images == {Image(LARGE).digest: LARGE}


def test_a_call_that_cannot_be_encoded_leaves_the_file_sound(tmp_path: Path) -> None:
    """Half a character is refused; what comes after can still be read."""
    path, ids = tmp_path / "a.rec", np.arange(50, dtype=np.int32)
    seen = Message(Role.USER, "look", images=(Image(LARGE, 2),))
    first, second = make_call(0, ids, ids[:5]), make_call(2, ids, ids[:9], messages=(seen,))
    broken = make_call(1, ids[:30], ids, messages=(seen,), thread="\ud800")
    with Writer(path) as writer:
        writer.append(first)
        with pytest.raises(UnicodeEncodeError):
            writer.append(broken)
        writer.append(second)
    assert same(read(path).calls, [first, second])

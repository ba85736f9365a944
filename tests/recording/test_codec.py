"""Whatever calls are packed come back bit for bit, pictures once, ids in shared memory."""

import base64
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calls import make_call, write_calls
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


@st.composite
def sessions(draw: st.DrawFn) -> list[Call]:
    """Calls that extend, fork from, repeat or ignore earlier ones, in any order of numbers."""
    few = st.lists(st.integers(0, 3), max_size=6).map(lambda ids: np.array(ids, np.int32))
    calls: list[Call] = []
    for number in draw(st.permutations(range(draw(st.integers(1, 8))))):
        base = draw(st.sampled_from(calls)) if calls and draw(st.booleans()) else None
        start = np.empty(0, np.int32)
        if base is not None:
            whole = np.concatenate((base.prompt_ids, base.sampled_ids))
            start = whole[: draw(st.integers(0, len(whole))) if draw(st.booleans()) else None]
        added = draw(st.lists(messages, max_size=3))
        calls.append(
            make_call(
                number,
                np.concatenate((start, draw(few))),
                draw(few),
                parent=base.number if base else None,
                messages=tuple(added),
                answer=draw(
                    st.none() | messages.map(lambda m: msgspec.structs.replace(m, images=()))
                ),
                tools=tuple(
                    Tool(name, "", {"n": [1, 0.1, None]})
                    for name in draw(st.sets(words, max_size=1))
                ),
            )
        )
    return calls


@settings(max_examples=80)
@given(calls=sessions(), data=st.data())
def test_any_calls_come_back(
    tmp_path_factory: pytest.TempPathFactory, calls: list[Call], data: st.DataObject
) -> None:
    """Forks, repeats, pictures and files closed in between make no difference."""
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

"""Encode server-sent events, and read the payloads of a stream."""

import re
from collections.abc import AsyncGenerator, AsyncIterable

DONE = b"[DONE]"
"""Last payload of a stream of OpenAI-compatible servers."""
_DATA = re.compile(rb"^data:(.*)", re.MULTILINE)


def encode_event(data: bytes, event: str = "", event_id: int | None = None) -> bytes:
    """Encode an event; `data` must not contain line breaks."""
    head = b"" if event_id is None else b"id: %d\n" % event_id
    if event:
        head += b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


async def read_payloads(chunks: AsyncIterable[bytes]) -> AsyncGenerator[list[bytes]]:
    """Yield payloads of events except `DONE`, in lists of those completed by one chunk.

    White space around a payload is not stripped.
    """
    rest: list[bytes] = []
    """What came since the last line break."""
    async for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if not end:
            rest.append(chunk)
            continue
        data = b"".join([*rest, chunk])  # no copy of a single chunk
        end += len(data) - len(chunk)
        payloads = _DATA.findall(data, 0, end)
        rest = [data[end:]] if end < len(data) else []
        if payloads and payloads[-1].strip() == DONE:
            payloads.pop()
        if payloads:
            yield payloads
    last = b"".join(rest)
    if last.startswith(b"data:") and last[5:].strip() != DONE:
        yield [last[5:]]

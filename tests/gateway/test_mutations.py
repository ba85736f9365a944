"""What a client sends can hurt neither its session nor the engine (I4, I5).

`TUGLINE_MUTATIONS` is the number of requests for each mode, 150 by default.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from gateway import mutations
from support.engine import reply_in_turn
from support.gateway import open_session_in_mode
from tugline.errors import CaptureError
from tugline.recording import file
from tugline.recording.codec import Unpacker
from tugline.types import Limits, Mode

COUNT = int(os.environ.get("TUGLINE_MUTATIONS", "150"))
ARGUMENTS = ('{"a": 1}', '{"a": 1%s}' % ("0" * 30), "[" * 900, '{"a": "\\ud800"}', "NaN", "1e999")
CALLS = [f'<tool_call>\n{{"name": "read", "arguments": {a}}}\n</tool_call>' for a in ARGUMENTS]
PLAY = reply_in_turn(*["Done.", "<think>\nHm.\n</think>\n\nDone.", *CALLS] * 4_000)


class Follower:
    """Reader of a recording that grows: each record is decoded as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._unpacker = path, 0, Unpacker()
        self.calls = 0

    def read(self) -> int:
        """Decode what was appended; return its size. Raises `CaptureError` if it is unreadable."""
        with self._path.open("rb") as source:
            source.seek(self._at)
            new = file.MAGIC * bool(self._at) + source.read()
        skip = len(file.MAGIC) if self._at else 0
        self._at += len(new) - skip
        for frame in file.read_frames(self._path, new):
            if frame.start >= skip:
                file._unpack_frame(self._path, frame, self._unpacker)
        self.calls = len(self._unpacker._calls)
        return len(new) - skip


ROUTES = {  # routes of each API that answer, then its other routes
    "anthropic": (["/v1/messages"], ["/v1/messages/count_tokens"]),
    "openai_chat": (["/v1/chat/completions"], []),
    "openai_completions": (["/v1/completions"], []),
    "openai_responses": (
        ["/v1/responses", "/v1/responses/compact"],
        ["/v1/responses/input_tokens"],
    ),
    "google": (
        [
            f"/v1beta/models/m:{name}"
            for name in ("generateContent", "streamGenerateContent?alt=sse")
        ],
        ["/v1beta/models/m:countTokens"],
    ),
}
FAULTS = ("server_error", "api_error", "INTERNAL", "UNAVAILABLE")
"""Kinds of errors that are not the client's, in streams that have begun."""


def draw_request(draw: random.Random, body: mutations.Body) -> tuple[str, bytes, bool]:
    """Path and body of a request, and whether it asks for an answer."""
    data, (answers, others) = mutations.mutate(draw, body), ROUTES[body.dialect]
    if others and draw.random() < 0.1:
        return draw.choice(others), data, False
    if body.dialect != "google" and draw.random() < 0.5:
        data = data.replace(b"{", b'{"stream": true, ', 1)
    return draw.choice(answers), data, True


@pytest.mark.timeout(120 + COUNT // 10)
@pytest.mark.parametrize("mode", [Mode.EXACT, Mode.OBSERVED])
async def test_no_request_is_a_fault_and_every_answer_is_readable(
    tmp_path: Path, mode: Mode
) -> None:
    """Each mutated request gets an answer or a 4xx; each answer's record can be read at once."""
    draw, bodies, statuses = random.Random(f"{mode}"), mutations.seeds(), Counter[int]()
    path = tmp_path / "s1.0.rec"
    faults: list[str] = []
    async with open_session_in_mode(
        tmp_path, PLAY, mode, limits=Limits(max_turns=1_000_000)
    ) as session:
        following = Follower(path)
        for _ in range(COUNT):
            body = draw.choice(bodies)
            url, data, asks = draw_request(draw, body)
            headers = mutations.draw_headers(draw)
            async with session.http.post(session.url + url, data=data, headers=headers) as response:
                text = await response.text()
            statuses[response.status] += 1
            if response.status >= 500 or any(f'"{kind}"' in text for kind in FAULTS):
                faults.append(f"{response.status} {url} {text[:300]} {data[:2000]!r}")
            try:
                answered = asks and response.status == 200
                assert following.read() or not answered, "an answer is not recorded"
            except CaptureError as error:
                faults.append(f"{error} {data[:2000]!r}")
        calls = following.calls
    figures = f"{mode}: {dict(statuses)}, {calls} calls, {len(faults)} faults"
    assert not faults, "\n\n".join([figures, *faults[:20]])
    logging.getLogger("mutations").warning(figures)
    assert len(file.read(path).calls) == calls > COUNT / 8

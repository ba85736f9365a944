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
from rig import in_turn, rig_of
from tugline.errors import CaptureError
from tugline.recording import file
from tugline.recording.codec import Unpacker
from tugline.types import Limits, Mode

COUNT = int(os.environ.get("TUGLINE_MUTATIONS", "150"))
CALL = '<tool_call>\n{"name": "read", "arguments": {"a": 1}}\n</tool_call>'
PLAY = in_turn(*["Done.", f"I look.\n{CALL}", "<think>\nHm.\n</think>\n\nDone."] * 20_000)


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


def address(dialect: str, data: bytes, *, stream: bool) -> tuple[str, bytes]:
    """Path and body of a request, streamed or whole."""
    path = mutations.PATHS[dialect]
    if dialect == "google":
        return path.replace("generate", "streamGenerate") + "?alt=sse" if stream else path, data
    return path, data.replace(b"{", b'{"stream": true, ', 1) if stream else data


@pytest.mark.parametrize("mode", [Mode.EXACT, Mode.OBSERVED])
async def test_no_request_is_a_fault_and_every_answer_is_readable(
    tmp_path: Path, mode: Mode
) -> None:
    """Each mutated request gets an answer or a 4xx; each answer's record can be read at once."""
    draw, bodies, statuses = random.Random(f"{mode}"), mutations.seeds(), Counter[int]()
    path = tmp_path / "s1.0.rec"
    faults: list[str] = []
    async with rig_of(tmp_path, PLAY, mode, limits=Limits(max_turns=1_000_000)) as it:
        following = Follower(path)
        for _ in range(COUNT):
            body = draw.choice(bodies)
            stream = draw.random() < 0.5
            url, data = address(body.dialect, mutations.mutate(draw, body), stream=stream)
            headers = {"content-type": "application/json"}
            async with it.http.post(it.url + url, data=data, headers=headers) as response:
                text = await response.text()
            statuses[response.status] += 1
            if response.status >= 500 or '"server_error"' in text or "api_error" in text:
                faults.append(f"{response.status} {url} {text[:300]} {data[:2000]!r}")
            try:
                assert following.read() or response.status != 200, "an answer is not recorded"
            except CaptureError as error:
                faults.append(f"{error} {data[:2000]!r}")
        answered = following.calls

    found = f"{mode}: {dict(statuses)}, {answered} calls, {len(faults)} faults"
    assert not faults, "\n\n".join([found, *faults[:20]])
    logging.getLogger("mutations").warning(found)
    assert len(file.read(path).calls) == answered > COUNT / 8

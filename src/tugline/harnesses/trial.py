"""The first start of a program, right after its installation: it must ask a model something.

The model refuses at once, with the status on which the program gives up. So a broken installation
is found by whoever installs, not by a thousand sessions, and a program that keeps compiled scripts
has them from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from tugline.errors import HarnessError
from tugline.harnesses.base import Harness, LaunchContext, mounts, spent_status
from tugline.sandbox.base import Runtime, SandboxSpec
from tugline.sandbox.local import Local

_LIMIT_S = 90.0
_TAIL = 400
_BODY = b'{"error":{"message":"no more calls","type":"invalid_request_error","code":400}}'


async def start_once(harness: Harness, runtime: Runtime | None = None) -> None:
    """Raises `HarnessError` with the program's last words unless it asked a model something.

    It runs in a box of `runtime`, `Local` unless another is given.
    """
    runtime, place = runtime or Local(), SandboxSpec(mounts=mounts(harness))
    asked = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="tugline-trial-") as folder:
        async with (
            _refusing(spent_status(harness), asked) as url,
            runtime.open(Path(folder), place) as box,
        ):
            seat = LaunchContext(
                instruction="Say hello.",
                workdir=str(box.workdir),
                home=str(box.home),
                base_url=await box.expose(url),
                key="trial",
                model="tugline-trial",
            )
            launch = harness.launch(seat)
            await box.put(box.home, launch.files)
            end = await box.run(launch.argv, env=launch.env, timeout_s=_LIMIT_S)
            said = await asyncio.to_thread((box.logs / "agent.log").read_text, errors="replace")
    if not asked.is_set():
        how = "ran out of time" if end.timed_out else f"ended with exit code {end.code}"
        msg = (
            f"{harness.name} {harness.version} does not work here: it {how} "
            f"and asked no model: {' '.join(said.split())[-_TAIL:]}"
        )
        raise HarnessError(msg)


@contextlib.asynccontextmanager
async def _refusing(status: int, asked: asyncio.Event) -> AsyncIterator[str]:
    """An HTTP server that answers every request with `status`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            _, _, length = head.partition(b"content-length:")
            await reader.readexactly(int(length.split(b"\r\n")[0] or 0))
            if head.startswith(b"post"):
                asked.set()
            start = f"HTTP/1.1 {status} Refused\r\nconnection: close\r\n"
            fields = f"content-type: application/json\r\ncontent-length: {len(_BODY)}\r\n\r\n"
            writer.write((start + fields).encode() + _BODY)
            await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 20)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

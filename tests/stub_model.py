"""A scripted model behind a gateway that hands out calls without tokens of a real engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tugline.gateway.engine import DEFAULT_TERMS, SessionState, SessionTerms
from tugline.recording.records import RecordedResult
from tugline.types import Call, Failure, Finish, Sampling, Session, Task, Timings, VersionSpan
from tugline.web.serve import serve

Step = tuple[str, dict[str, object]] | str
"""A tool call, or the text of the last answer."""


@dataclass
class Door:
    """An open session."""

    base_url: str
    key: str


class StubGateway:
    """Plays `script` to every session; knows sessions by their path and checks their key."""

    def __init__(self, script: Sequence[Step]) -> None:
        self.script = script
        self.requests: dict[str, list[dict]] = {}
        self.failures: dict[str, Failure] = {}
        self.results: dict[str, RecordedResult] = {}
        self.open_now: set[str] = set()
        self.url = ""
        self.app = Starlette(
            routes=[Route("/s/{session}/v1/chat/completions", self.chat, methods=["POST"])]
        )

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[StubGateway]:
        """Serve on a free port."""
        async with serve(self.app) as self.url:
            yield self

    @contextlib.asynccontextmanager
    async def open(
        self,
        session: Session,
        task: Task,
        terms: SessionTerms = DEFAULT_TERMS,
        *,
        on_hang: Callable[[float], None] = lambda _seconds: None,
    ) -> AsyncIterator[Door]:
        """Take this session's calls until left."""
        self.open_now.add(session.id)
        try:
            yield Door(f"{self.url}/s/{session.id}", f"key-{session.id}")
        finally:
            self.open_now.discard(session.id)

    def read_calls(self, session: str) -> list[Call]:
        """One call per request, each of which carries on the one before."""
        prompt = [1, 2, 3]
        found = []
        for number in range(len(self.requests.get(session, []))):
            found.append(_call(session, number, prompt))
            prompt = [*prompt, 10 + number, 11, 12]
        return found

    async def write_result(self, session: str, result: RecordedResult) -> None:
        """Keep what became of it."""
        self.results[session] = result

    def describe(self, session: str) -> SessionState:
        """The failure that the test said it should be; it has no budgets."""
        return SessionState(Path(), self.failures.get(session))

    async def chat(self, request: Request) -> Response:
        """The next step of the script, as a stream."""
        session = request.path_params["session"]
        if session not in self.open_now or (
            request.headers.get("authorization") != f"Bearer key-{session}"
        ):
            return JSONResponse({"error": {"message": "unknown session"}}, 401)
        if session in self.failures:
            return JSONResponse({"error": {"message": "engine lost"}}, 400)
        body = await request.json()
        self.requests.setdefault(session, []).append(body)
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        step = self.script[turn] if turn < len(self.script) else "Done."
        return StreamingResponse(_events(step, turn), media_type="text/event-stream")


async def _events(step: Step, turn: int) -> AsyncIterator[str]:
    delta: dict[str, object] = {"role": "assistant", "content": step}
    if not isinstance(step, str):
        name, arguments = step
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"index": 0, "id": f"call_{turn}", "type": "function", "function": function}
        delta = {"role": "assistant", "content": None, "tool_calls": [call]}
    finish = "stop" if isinstance(step, str) else "tool_calls"
    base = {"id": f"c{turn}", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    choices = [
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": finish},
    ]
    for choice in choices:
        yield f"data: {json.dumps({**base, 'choices': [choice]})}\n\n"
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    yield f"data: {json.dumps({**base, 'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


def _call(session: str, number: int, prompt: list[int]) -> Call:
    return Call(
        session=session,
        number=number,
        parent=number - 1 if number else None,
        dialect="openai_chat",
        messages=(),
        sampling=Sampling(temperature=1.0),
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array([10 + number, 11], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=(VersionSpan(0, 0, 2),),
        finish=Finish.STOP,
        engine="stub",
        timings=Timings(received=0.0),
    )

"""Ask a model for a verdict: any endpoint that speaks Chat Completions, with retries and a memory.

What the model says is checked before it is believed; what cannot be read is asked for again, a
bounded number of times. In the end there are scores or an `EvaluatorError`, never a silent 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tugline import log
from tugline.errors import EvaluatorError

BEST = 10
"""The highest score."""
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_FIRST_WAIT_S = 0.3
_LONGEST_WAIT_S = 20.0
_MOST = 1 << 20
"""Bytes of an answer."""
_REMEMBERED = 4096
_log = log.get("evaluators.judge")


class Scores(msgspec.Struct, frozen=True):
    """What a judge said: whole numbers from 0 to `BEST` by criterion."""

    scores: dict[str, int]
    reasoning: str = ""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Again(Exception):
    """It may go better next time."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Memory:
    """Scores by a digest of what was asked: in a folder that stays, or in this process."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: OrderedDict[str, Scores] = OrderedDict()

    async def get(self, key: str) -> Scores | None:
        """What was said before; None for what is not known, or damaged."""
        if self._folder is None:
            return self._known.get(key)
        return await asyncio.to_thread(self._read, self._path(self._folder, key))

    async def put(self, key: str, scores: Scores) -> None:
        """Remember it; a full disk costs a line in the log."""
        if self._folder is None:
            self._known[key] = scores
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return
        try:
            await asyncio.to_thread(self._write, self._path(self._folder, key), scores)
        except OSError as error:
            _log.warning("not remembered", folder=str(self._folder), error=error.strerror)

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.json"

    @staticmethod
    def _read(path: Path) -> Scores | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Scores)
        except (OSError, msgspec.DecodeError):
            return None

    @staticmethod
    def _write(path: Path, scores: Scores) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{random.getrandbits(64):x}.part")
        part.write_bytes(msgspec.json.encode(scores))
        part.replace(path)


class JudgeModel:
    """One model at one address; at most `concurrency` requests are under way at once."""

    def __init__(  # noqa: PLR0913 - the options of a judge
        self,
        *,
        base_url: str,
        model: str,
        api_key_env: str | None,
        body: Mapping[str, Any],
        timeout_s: float,
        attempts: int,
        concurrency: int,
        memory: Memory,
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._key_env, self._timeout_s, self._attempts = api_key_env, timeout_s, attempts
        settings = {"model": model, "temperature": 0, **body}
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._room = asyncio.Semaphore(concurrency)
        self._memory = memory

    async def ask(
        self, messages: list[dict[str, str]], names: Sequence[str], schema: Mapping[str, Any]
    ) -> tuple[Scores, bool]:
        """Its scores, and whether they were known. Raises `EvaluatorError`."""
        body = {"response_format": schema, **self._settings, "messages": messages}
        data = msgspec.json.encode({k: v for k, v in body.items() if v != {}}, order="sorted")
        key = hashlib.sha256(data).hexdigest()
        known = await self._memory.get(key)
        if known is not None:
            return known, True
        async with self._room:
            scores = await self._asked(data, names)
        await self._memory.put(key, scores)
        return scores, False

    async def _asked(self, data: bytes, names: Sequence[str]) -> Scores:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            for attempt in range(self._attempts):
                try:
                    return scores_of(await self._post(http, data), names)
                except _Again as error:
                    why, wait_s = str(error), error.wait_s
                if attempt + 1 < self._attempts:
                    _log.info("judge asked again", url=self._url, why=why)
                    back_off = _FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.0)
                    await asyncio.sleep(min(max(wait_s, back_off), _LONGEST_WAIT_S))
        msg = f"judge {self._url}: no verdict in {self._attempts} attempts, at last: {why}"
        raise EvaluatorError(msg)

    async def _post(self, http: aiohttp.ClientSession, data: bytes) -> bytes:
        try:
            async with http.post(self._url, data=data, headers=self._headers()) as reply:
                answer = await reply.content.read(_MOST) if reply.status != 200 else b""
                while reply.status == 200 and (more := await reply.content.read(_MOST)):
                    answer += more
                    if len(answer) > _MOST:
                        msg = f"an answer of more than {_MOST} bytes"
                        raise _Again(msg)
                status, after = reply.status, reply.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Again(str(error) or f"no answer in {self._timeout_s:g} s") from error
        if status == 200:
            return answer
        why = f"HTTP {status}: {answer[:300].decode(errors='replace').strip()}"
        if status in _RETRIED:
            raise _Again(why, float(after) if after.isdecimal() else 0.0)
        msg = f"judge {self._url}: {why}"
        raise EvaluatorError(msg)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._key_env is not None:
            key = os.environ.get(self._key_env)
            if not key:
                msg = f"judge {self._url}: the environment variable {self._key_env} is not set here"
                raise EvaluatorError(msg)
            headers["Authorization"] = f"Bearer {key}"
        return headers


def scores_of(answer: bytes, names: Sequence[str]) -> Scores:
    """The scores in a completion. Raises `_Again` when they are not what was asked for."""
    try:
        choice = msgspec.json.decode(answer, type=_Completion).choices[0]
        text = (choice.message.content or "").rpartition("</think>")[2].strip()
        fenced = text.removeprefix("```json").removeprefix("```").removesuffix("```")
        said = msgspec.json.decode(fenced.encode(errors="replace"), type=Scores)
    except (msgspec.DecodeError, IndexError, RecursionError) as error:
        why = f"an answer that cannot be read ({error}): {answer[:300].decode(errors='replace')}"
        raise _Again(why) from error
    if set(said.scores) != set(names) or not all(0 <= s <= BEST for s in said.scores.values()):
        why = f"scores {said.scores}, must be 0 to {BEST} for each of {', '.join(names)}"
        raise _Again(why)
    return said

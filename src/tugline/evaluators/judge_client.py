"""Request scores from a model: any Chat Completions endpoint, with retries and a cache.

Answers are validated; an invalid one is requested again, a bounded number of times. The result is
scores or an `EvaluatorError`, never a silent 0.
"""

import asyncio
import contextlib
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
from tugline.errors import EvaluatorError, SandboxError
from tugline.sandbox.files import replace_file

MAX_SCORE = 10
"""The highest score."""
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_FIRST_WAIT_S = 0.3
_LONGEST_WAIT_S = 20.0
_MAX_ANSWER_BYTES = 1 << 20
_MAX_CACHED = 4096
_log = log.get("evaluators.judge")


class Scores(msgspec.Struct, frozen=True):
    """A judge's answer: whole numbers from 0 to `MAX_SCORE` by criterion."""

    scores: dict[str, int]
    reasoning: str = ""


class _JudgeMessage(msgspec.Struct):
    content: str | None = None


class _JudgeChoice(msgspec.Struct):
    message: _JudgeMessage
    finish_reason: str | None = None


class _JudgeCompletion(msgspec.Struct):
    choices: list[_JudgeChoice]


class _RetryableError(Exception):
    """A failure that a retry may resolve."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class ScoreCache:
    """Scores by digest of the request, in a folder or in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: OrderedDict[str, Scores] = OrderedDict()

    async def get(self, key: str) -> Scores | None:
        """Return earlier scores; None if there are none, or the file is damaged."""
        if self._folder is None:
            return self._known.get(key)
        file = self._folder / key[:2] / f"{key}.json"
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(await asyncio.to_thread(file.read_bytes), type=Scores)
        return None

    async def put(self, key: str, scores: Scores) -> None:
        """Keep scores; a full disk is logged, not raised."""
        if self._folder is None:
            self._known[key] = scores
            if len(self._known) > _MAX_CACHED:
                self._known.popitem(last=False)
            return
        try:
            path = self._folder / key[:2] / f"{key}.json"
            await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
            await asyncio.to_thread(replace_file, path, msgspec.json.encode(scores))
        except (OSError, SandboxError) as error:
            _log.warning("scores not cached", folder=str(self._folder), error=str(error))


class JudgeClient:
    """Client of one model, with at most `concurrency` requests at once."""

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
        cache: ScoreCache,
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._key_env, self._timeout_s, self._attempts = api_key_env, timeout_s, attempts
        settings = {"model": model, "temperature": 0, **body}
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._slots = asyncio.Semaphore(concurrency)
        self._cache = cache

    async def score(
        self, messages: list[dict[str, str]], names: Sequence[str], schema: Mapping[str, Any]
    ) -> tuple[Scores, bool]:
        """Return its scores, and whether they were cached. Raises `EvaluatorError`."""
        body = {"response_format": schema, **self._settings, "messages": messages}
        data = msgspec.json.encode({k: v for k, v in body.items() if v != {}}, order="sorted")
        key = hashlib.sha256(data).hexdigest()
        known = await self._cache.get(key)
        if known is not None:
            return known, True
        async with self._slots:
            scores = await self._request(data, names)
        await self._cache.put(key, scores)
        return scores, False

    async def _request(self, data: bytes, names: Sequence[str]) -> Scores:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            for attempt in range(self._attempts):
                try:
                    return parse_scores(await self._post(http, data), names)
                except _RetryableError as error:
                    reason, wait_s = str(error), error.wait_s
                if attempt + 1 < self._attempts:
                    _log.info("judge request retried", url=self._url, reason=reason)
                    back_off = _FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.0)
                    await asyncio.sleep(min(max(wait_s, back_off), _LONGEST_WAIT_S))
        msg = f"judge {self._url}: no verdict in {self._attempts} attempts, at last: {reason}"
        raise EvaluatorError(msg)

    async def _post(self, http: aiohttp.ClientSession, data: bytes) -> bytes:
        try:
            async with http.post(self._url, data=data, headers=self._headers()) as reply:
                answer = await reply.content.read(_MAX_ANSWER_BYTES) if reply.status != 200 else b""
                while reply.status == 200 and (more := await reply.content.read(_MAX_ANSWER_BYTES)):
                    answer += more
                    if len(answer) > _MAX_ANSWER_BYTES:
                        msg = f"an answer of more than {_MAX_ANSWER_BYTES} bytes"
                        raise _RetryableError(msg)
                status, after = reply.status, reply.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _RetryableError(str(error) or f"no answer in {self._timeout_s:g} s") from error
        if status == 200:
            return answer
        reason = f"HTTP {status}: {answer[:300].decode(errors='replace').strip()}"
        if status in _RETRIED:
            raise _RetryableError(reason, float(after) if after.isdecimal() else 0.0)
        msg = f"judge {self._url}: {reason}"
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


def parse_scores(answer: bytes, names: Sequence[str]) -> Scores:
    """Return the scores in a completion. Raises `_RetryableError` if they are not as requested."""
    try:
        choice = msgspec.json.decode(answer, type=_JudgeCompletion).choices[0]
        text = (choice.message.content or "").rpartition("</think>")[2].strip()
        fenced = text.removeprefix("```json").removeprefix("```").removesuffix("```")
        scores = msgspec.json.decode(fenced.encode(errors="replace"), type=Scores)
    except (msgspec.DecodeError, IndexError, RecursionError) as error:
        reason = f"unreadable answer ({error}): {answer[:300].decode(errors='replace')}"
        raise _RetryableError(reason) from error
    if set(scores.scores) != set(names) or not all(
        0 <= score <= MAX_SCORE for score in scores.scores.values()
    ):
        reason = f"scores {scores.scores}, must be 0 to {MAX_SCORE} for each of {', '.join(names)}"
        raise _RetryableError(reason)
    return scores

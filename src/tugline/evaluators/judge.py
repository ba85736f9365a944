"""Evaluate with a model that grades by a rubric, an "LLM judge".

For criteria that tests cannot measure. The judge sees the session's calls, changes and final
answer, shortened. The agent may have written any of this, so it is quoted as JSON strings between
marks with a digest of the data, which the data cannot contain; the judge is instructed not to obey
it, and its instructions are repeated after the data. The judge answers with integers by criterion.
A failed request or an invalid answer is retried a limited number of times and then raises
`EvaluatorError`; it is never a silent 0. The judge can be misled nevertheless: combine it with
tests (`weighted`), or use it for style, where less depends on it.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import msgspec

from tugline import log
from tugline.errors import ConfigError, EvaluatorError, is_temporary
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.judge_prompts import Criterion, make_prompt
from tugline.evaluators.script import diff_work
from tugline.schema import PositiveFloat, PositiveInt
from tugline.types import Reward
from tugline.web.engine_http import EngineHttp

MAX_SCORE = 10
"""Highest score of a criterion."""
_FIRST_WAIT_S = 0.3
_LONGEST_WAIT_S = 20.0
_MAX_ANSWER_BYTES = 1 << 20
_log = log.get("evaluators.judge")


class Scores(msgspec.Struct, frozen=True):
    """A judge's answer: integers from 0 to `MAX_SCORE` by criterion."""

    scores: dict[str, int]
    reasoning: str = ""


class _JudgeMessage(msgspec.Struct):
    content: str | None = None


class _JudgeChoice(msgspec.Struct):
    message: _JudgeMessage


class _JudgeCompletion(msgspec.Struct):
    choices: list[_JudgeChoice]


class _RetryableError(Exception):
    """A failure that a retry may resolve."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(kw_only=True, eq=False)
class JudgeEvaluator(Evaluator):
    """Grades by a `rubric`: a text, or criteria with ``name``, ``text`` and ``weight``.

    `base_url` (with ``/v1``) and `model` select the judge; the API key is in the environment
    variable `api_key_env` of the node. At most about `max_chars` of the agent's text are shown.
    `schema` requests structured output; `body` adds fields to the request, or removes those that
    are None. With `per_call`, every call is scored, too, in requests of `calls_per_request`.
    """

    sandboxes = 0
    graded_by_model = True

    base_url: Annotated[str, msgspec.Meta(pattern="^https?://")]
    model: str
    rubric: str | Annotated[list[Criterion], msgspec.Meta(min_length=1)]
    api_key_env: str | None = None
    max_chars: PositiveInt = 60_000
    schema: bool = True
    body: Mapping[str, Any] | None = None
    timeout_s: PositiveFloat = 60.0
    attempts: PositiveInt = 4
    concurrency: PositiveInt = 8
    per_call: bool = False
    calls_per_request: PositiveInt = 16

    def __post_init__(self) -> None:
        rubric = self.rubric
        if isinstance(rubric, str):
            rubric = [Criterion("score", rubric.strip())]
        self._criteria = msgspec.convert(rubric, list[Criterion])
        names = {each.name for each in self._criteria}
        if len(names) < len(self._criteria) or not self._criteria[0].text:
            msg = (
                "evaluator 'judge': rubric must be a text, or a list of criteria with "
                "different names"
            )
            raise ConfigError(msg)
        self._url = f"{self.base_url.rstrip('/')}/chat/completions"

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Grade the session."""
        limit = asyncio.timeout(outcome.timeout_s)
        try:
            async with limit:
                return await self._grade(outcome)
        except TimeoutError as error:
            if not limit.expired():
                raise
            msg = f"evaluator 'judge': no verdict within {outcome.timeout_s:g} s"
            raise EvaluatorError(msg) from error

    async def _grade(self, outcome: SessionOutcome) -> Verdict:
        diff = await _diff_work(outcome)
        names = [each.name for each in self._criteria]
        answer = await self._request(self._make_prompt(outcome, diff), names)
        parts = {name: answer.scores[name] / MAX_SCORE for name in names}
        value = sum(each.weight * parts[each.name] for each in self._criteria)
        value /= sum(each.weight for each in self._criteria)
        report: dict[str, Any] = {"scores": answer.scores, "reasoning": answer.reasoning}
        if not self.per_call:
            return Verdict(Reward(value, parts), report)
        answers = await self._grade_calls(outcome, diff)
        scores = {number: score for each in answers for number, score in each.scores.items()}
        report["calls"] = {"scores": scores, "reasoning": [each.reasoning for each in answers]}
        per_call = {int(number): score / MAX_SCORE for number, score in scores.items()}
        return Verdict(Reward(value, parts, per_call=per_call), report)

    async def _grade_calls(self, outcome: SessionOutcome, diff: str) -> list[Scores]:
        """Return the scores of the calls, by number, in parts. Raises `EvaluatorError`."""
        answers = []
        for start in range(0, len(outcome.calls), self.calls_per_request):
            part = slice(start, min(start + self.calls_per_request, len(outcome.calls)))
            messages = self._make_prompt(outcome, diff, part)
            names = [str(call.number) for call in outcome.calls[part]]
            answers.append(await self._request(messages, names))
        return answers

    def _make_prompt(
        self, outcome: SessionOutcome, diff: str, part: slice | None = None
    ) -> list[dict[str, str]]:
        instruction = outcome.task.instruction
        return make_prompt(instruction, outcome.calls, diff, self._criteria, self.max_chars, part)

    async def _request(self, messages: list[dict[str, str]], names: Sequence[str]) -> Scores:
        """Request a score for each name, with retries. Raises `EvaluatorError`."""
        settings: dict[str, Any] = {"model": self.model, "temperature": 0}
        if self.schema:
            settings["response_format"] = _schema(names)
        settings |= self.body or {}
        body = {name: value for name, value in settings.items() if value is not None}
        data = msgspec.json.encode({**body, "messages": messages}, order="sorted")
        async with _find_limit(self._url).hold(self.concurrency):
            return await self._retry(data, names)

    async def _retry(self, data: bytes, names: Sequence[str]) -> Scores:
        async with EngineHttp(key=self._find_key()) as http:
            for attempt in range(self.attempts):
                try:
                    return parse_scores(await self._post(http, data), names)
                except _RetryableError as error:
                    reason = str(error)
                    wait_s = error.wait_s
                if attempt + 1 < self.attempts:
                    _log.info("judge request retried", url=self._url, reason=reason)
                    back_off = _FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.0)
                    await asyncio.sleep(min(max(wait_s, back_off), _LONGEST_WAIT_S))
        msg = (
            f"judge {self._url}: no verdict after {self.attempts} attempts; the last error: "
            f"{reason}"
        )
        raise EvaluatorError(msg)

    async def _post(self, http: EngineHttp, data: bytes) -> bytes:
        answer = b""
        try:
            async with asyncio.timeout(self.timeout_s), http.request(self._url, data) as reply:
                async for chunk in reply.chunks():
                    answer += chunk
                    if len(answer) > _MAX_ANSWER_BYTES:
                        raise _RetryableError(f"the answer exceeds {_MAX_ANSWER_BYTES} bytes")
        except OSError as error:
            raise _RetryableError(str(error) or f"no answer within {self.timeout_s:g} s") from error
        if reply.status == 200:
            return answer
        reason = f"HTTP {reply.status}: {answer[:300].decode(errors='replace').strip()}"
        if is_temporary(reply.status) and reply.status != 404:  # 404: the model or URL is wrong
            after = reply.headers.get("retry-after", "")
            raise _RetryableError(reason, float(after) if after.isdecimal() else 0.0)
        raise EvaluatorError(f"judge {self._url}: {reason}")

    def _find_key(self) -> str:
        key = os.environ.get(self.api_key_env or "", "")
        if self.api_key_env and not key:
            msg = (
                f"judge {self._url}: the environment variable {self.api_key_env} is not set on "
                "this node"
            )
            raise EvaluatorError(msg)
        return key


class _Limit:
    """Limit of concurrent requests to one judge."""

    def __init__(self) -> None:
        self._running = 0
        self._ended = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def hold(self, most: int) -> AsyncIterator[None]:
        """Wait until fewer than `most` requests run, and count one during the block."""
        async with self._ended:
            await self._ended.wait_for(lambda: self._running < most)
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            async with self._ended:
                self._ended.notify_all()


_LIMITS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Limit]] = WeakKeyDictionary()
"""Limits by URL: every rubric is an evaluator of its own, and all share the server."""


def _find_limit(url: str) -> _Limit:
    limits = _LIMITS.setdefault(asyncio.get_running_loop(), {})
    return limits.setdefault(url, _Limit())


async def _diff_work(outcome: SessionOutcome) -> str:
    """Return the agent's changes; a repository's own files are read in a fresh sandbox."""
    if outcome.patch.files and outcome.task.workspace.has_base:
        async with outcome.open_sandbox({}) as sandbox:
            return await diff_work(outcome, sandbox)
    return await diff_work(outcome, None)


def _schema(names: Sequence[str]) -> dict[str, Any]:
    """Return the ``response_format`` of a Chat Completions request."""
    scores = {name: {"type": "integer", "enum": list(range(MAX_SCORE + 1))} for name in names}
    return {
        "type": "json_schema",
        "json_schema": {
            "name": "grades",
            "strict": True,
            "schema": _object({"reasoning": {"type": "string"}, "scores": _object(scores)}),
        },
    }


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def parse_scores(answer: bytes, names: Sequence[str]) -> Scores:
    """Return the scores of a completion. Raises `_RetryableError` for an invalid answer."""
    try:
        choice = msgspec.json.decode(answer, type=_JudgeCompletion).choices[0]
        text = (choice.message.content or "").rpartition("</think>")[2].strip()
        fenced = text.removeprefix("```json").removeprefix("```").removesuffix("```")
        scores = msgspec.json.decode(fenced.encode(errors="replace"), type=Scores)
    except (msgspec.DecodeError, IndexError, RecursionError) as error:
        reason = f"the answer cannot be decoded ({error}): {answer[:300].decode(errors='replace')}"
        raise _RetryableError(reason) from error
    if set(scores.scores) != set(names) or not all(
        0 <= score <= MAX_SCORE for score in scores.scores.values()
    ):
        reason = (
            f"scores is {scores.scores}, must have a number from 0 to {MAX_SCORE} for each of "
            f"{', '.join(names)}"
        )
        raise _RetryableError(reason)
    return scores

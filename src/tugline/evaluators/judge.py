"""Judge by a model: a rubric, applied to what the agent said and did.

For what no test can tell. The judge sees the agent's text as data (`transcript`), answers with
whole numbers by criterion, and is asked again where it does not (`judge_model`). It can be talked
into things all the same: use it beside tests (`weighted`), or for style, where less is at stake.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.diff import unified
from tugline.evaluators.fresh import has_base, texts
from tugline.evaluators.judge_model import BEST, JudgeModel, Memory, Scores
from tugline.evaluators.together import all_of
from tugline.evaluators.transcript import Criterion, Shown, prompt
from tugline.types import Call, Reward, Trace

_SCOPES = ("session", "trace")


class JudgeEvaluator(Evaluator):
    """`rubric` is what to grade: a text, or criteria with ``name``, ``text`` and ``weight``.

    `base_url` (with ``/v1``) and `model` say who grades; the key is in the environment variable
    `api_key_env` of the node. With `scope` ``trace``, each trace is graded by itself. `max_chars`
    of the agent's text are shown. `schema` asks the endpoint to hold answers to their form; `body`
    adds fields to the request, None takes one out. `cache` is a folder that remembers verdicts.
    """

    opens_sandbox = False

    def __init__(  # noqa: PLR0913 - what a task can say
        self,
        *,
        base_url: str,
        model: str,
        rubric: str | Sequence[Mapping[str, Any]],
        api_key_env: str | None = None,
        scope: str = "session",
        max_chars: int = 60_000,
        schema: bool = True,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        attempts: int = 4,
        concurrency: int = 8,
        cache: str | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            _refuse("base_url", base_url, "an http:// or https:// URL, such as http://host:8000/v1")
        if scope not in _SCOPES:
            _refuse("scope", scope, "session or trace")
        if not timeout_s > 0:
            _refuse("timeout_s", timeout_s, "more than 0")
        whole = {"max_chars": max_chars, "attempts": attempts, "concurrency": concurrency}
        for option, value in whole.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                _refuse(option, value, "a whole number from 1")
        self._criteria = _criteria(rubric)
        self._scope, self._most, self._schema = scope, max_chars, schema
        self._model = JudgeModel(
            base_url=base_url,
            model=model,
            api_key_env=api_key_env,
            body=dict(body or {}),
            timeout_s=timeout_s,
            attempts=attempts,
            concurrency=concurrency,
            memory=Memory(Path(cache) if cache is not None else None),
        )

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """One verdict for the session, or one for each trace and their mean."""
        limit = asyncio.timeout(outcome.timeout_s)
        try:
            async with limit:
                diff = await _diff(outcome)
                if self._scope == "session":
                    value, report, parts = await self._grade(outcome, outcome.calls, diff)
                    return Verdict(Reward(value, parts), report)
                return await self._each(outcome, diff)
        except TimeoutError as error:
            if not limit.expired():
                raise
            msg = f"evaluator 'judge': no verdict in {outcome.timeout_s:g} s"
            raise EvaluatorError(msg) from error

    async def _each(self, outcome: SessionOutcome, diff: str) -> Verdict:
        if not outcome.traces:
            msg = "evaluator 'judge': there is no trace to grade"
            raise EvaluatorError(msg)
        shown = (_calls_of(trace, outcome.calls) for trace in outcome.traces)
        graded = await all_of(self._grade(outcome, calls, diff) for calls in shown)
        values, reports, parts = zip(*graded, strict=True)
        mean = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        return Verdict(Reward(sum(values) / len(values), mean, values), {"traces": list(reports)})

    async def _grade(
        self, outcome: SessionOutcome, calls: Sequence[Call], diff: str
    ) -> tuple[float, dict[str, Any], dict[str, float]]:
        """The value, the report and the parts of what these calls show."""
        shown = Shown(outcome.task.instruction, calls, diff)
        names = [each.name for each in self._criteria]
        messages = prompt(shown, self._criteria, self._most)
        said, known = await self._model.ask(messages, names, _schema(names) if self._schema else {})
        report = {"scores": said.scores, "reasoning": said.reasoning, "cached": known}
        parts = {name: said.scores[name] / BEST for name in names}
        return self._value(said), report, parts

    def _value(self, said: Scores) -> float:
        total = sum(each.weight for each in self._criteria)
        return sum(each.weight * said.scores[each.name] for each in self._criteria) / total / BEST


async def _diff(outcome: SessionOutcome) -> str:
    """What changed; of a repository's own files the old text is in a box of its own."""
    before: Mapping[str, str] = outcome.task.files
    if outcome.patch.files and has_base(outcome.task.workspace):
        async with outcome.open_sandbox({}) as box:
            before = await texts(box, outcome.patch, before)
    return await asyncio.to_thread(unified, before, outcome.patch)


def _calls_of(trace: Trace, calls: Sequence[Call]) -> list[Call]:
    numbers = {span.call for span in trace.spans}
    return [call for call in calls if call.number in numbers]


def _schema(names: Sequence[str]) -> dict[str, Any]:
    """The form of an answer, as Chat Completions wants it to be told."""
    scores = {name: {"type": "integer", "enum": list(range(BEST + 1))} for name in names}
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


def _criteria(rubric: object) -> list[Criterion]:
    if isinstance(rubric, str) and rubric.strip():
        return [Criterion("score", rubric.strip(), 1.0)]
    made: list[Criterion] = []
    for each in rubric if isinstance(rubric, list | tuple) else ():
        name, text, weight = _fields(each)
        fine = isinstance(name, str) and name and isinstance(text, str) and text
        if not fine or name in {known.name for known in made} or not 0 < weight < math.inf:
            _refuse("rubric", each, "criteria with a name of their own, a text and a weight over 0")
        made.append(Criterion(str(name), str(text), weight))
    if not made:
        _refuse("rubric", rubric, "a text or a list of criteria")
    return made


def _fields(criterion: object) -> tuple[object, object, float]:
    if not isinstance(criterion, Mapping) or set(criterion) - {"name", "text", "weight"}:
        return None, None, 0.0
    weight = criterion.get("weight", 1.0)
    number = float(weight) if isinstance(weight, int | float) else 0.0
    return criterion.get("name"), criterion.get("text"), number


def _refuse(option: str, value: object, right: str) -> None:
    msg = f"evaluator 'judge': {option} is {value!r:.120}, must be {right}"
    raise ConfigError(msg)

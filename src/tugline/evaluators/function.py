"""Evaluate by a Python function of your own: ``module:callable``, called with `SessionOutcome`.

It runs in the node's process and must be trusted; it must not execute what the agent left (open a
sandbox for that). A function that is not ``async`` runs in a thread, and is abandoned when the time
of the evaluation is over.
"""

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.plugins import find
from tugline.types import Reward

_TRACEBACK_LINES = 6


class FunctionEvaluator(Evaluator):
    """`target` is called with the outcome and `options` as keyword arguments.

    It returns a number, a `Reward`, a `Verdict`, or a dict with ``value`` and further named
    numbers, the parts.
    """

    opens_sandbox = False

    def __init__(self, *, target: str, options: Mapping[str, Any] | None = None) -> None:
        self._name, self._function = target, _load(target)
        self._options = dict(options or {})

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Call the function; what it raises is no verdict, and never the agent's fault."""
        limit = asyncio.timeout(outcome.timeout_s)
        try:
            async with limit:
                made = await self._call(outcome)
        except EvaluatorError:
            raise
        except Exception as error:
            if limit.expired():
                msg = f"evaluator 'function': {self._name} took over {outcome.timeout_s:g} s"
            else:
                lines = "".join(traceback.format_exception(error)).strip().splitlines()
                last = "\n".join(lines[-_TRACEBACK_LINES:])
                msg = f"evaluator 'function': {self._name} raised: {last}"
            raise EvaluatorError(msg) from error
        return _to_verdict(self._name, made)

    async def _call(self, outcome: SessionOutcome) -> object:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(outcome, **self._options)
        made = await _in_thread(lambda: self._function(outcome, **self._options))
        return await made if inspect.isawaitable(made) else made


def _load(target: str) -> Callable[..., Any]:
    """Import the function. Raises `ConfigError` and `UnknownPlugin`."""
    function: Callable[..., Any] | None = find("function", target) if ":" in target else None
    if callable(function):
        return function
    kind = type(function).__name__
    reason = "must be module:callable" if function is None else f"is a {kind}, must be callable"
    raise ConfigError(f"evaluator 'function': target is {target!r}, {reason}")


async def _in_thread(function: Callable[[], object]) -> object:
    """Call in a thread of its own, because one that hangs must not occupy a pool's."""
    done: Future[object] = Future()
    done.set_running_or_notify_cancel()  # who gives up waiting does not cancel it

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - passed to the caller, SystemExit too
            done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    threading.Thread(target=work, name="tugline-function", daemon=True).start()
    return await asyncio.wrap_future(done)


def _to_verdict(name: str, made: object) -> Verdict:
    """Convert a result. Raises `EvaluatorError` if it is no reward."""
    if isinstance(made, Mapping) and "value" in made:
        numbers = {str(key): _check_number(name, value) for key, value in made.items()}
        made = Reward(numbers.pop("value"), numbers)
    if isinstance(made, bool | int | float):
        made = Reward(float(made))
    if isinstance(made, Reward):
        made = Verdict(made, {})
    if not isinstance(made, Verdict):
        raise EvaluatorError(
            f"evaluator 'function': {name} returned {made!r:.80}, must be a number, a Reward, "
            "a Verdict or a dict with 'value'"
        )
    for number in (made.reward.value, *made.reward.parts.values(), *made.reward.per_trace):
        _check_number(name, number)
    return made


def _check_number(name: str, value: object) -> float:
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    msg = f"evaluator 'function': {name} returned {value!r:.80} where a finite number belongs"
    raise EvaluatorError(msg)

"""Evaluate with a custom Python function: ``module:callable``, called with a `SessionOutcome`.

It runs in the node's process and must be trusted; it must not execute the agent's work except in a
sandbox that it opens. A function that is not ``async`` runs in a thread, which is abandoned when
the time limit of the evaluation is exceeded.
"""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from tugline.errors import ConfigError, EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.verdict import make_plain, to_number
from tugline.plugins import find
from tugline.types import Reward

_TRACEBACK_LINES = 6
_FIELDS = ("value", "per_trace", "per_call")
"""Keys of a returned dict that are fields of `Reward`."""


class FunctionEvaluator(Evaluator):
    """Calls `target` with the outcome, and with `options` as keyword arguments.

    The function returns a number, a `Reward`, a `Verdict`, or a dict with ``value``, maybe
    ``per_call`` and ``per_trace`` as in `Reward`, and the parts as further named numbers.
    """

    sandboxes = 0

    def __init__(self, *, target: str, options: Mapping[str, Any] | None = None) -> None:
        self._name = target
        self._function = _load(target)
        self._options = dict(options or {})
        _check_signature(target, self._function, self._options)

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Call the function; any exception becomes an `EvaluatorError`."""
        limit = asyncio.timeout(outcome.timeout_s)
        try:
            async with limit:
                result = await self._call(outcome)
        except EvaluatorError:
            raise
        except Exception as error:
            if limit.expired():
                msg = f"evaluator 'function': {self._name} took more than {outcome.timeout_s:g} s"
            else:
                lines = "".join(traceback.format_exception(error)).strip().splitlines()
                last = "\n".join(lines[-_TRACEBACK_LINES:])
                msg = f"evaluator 'function': {self._name} raised: {last}"
            raise EvaluatorError(msg) from error
        return _to_verdict(self._name, result)

    async def _call(self, outcome: SessionOutcome) -> object:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(outcome, **self._options)
        result = await _in_thread(lambda: self._function(outcome, **self._options))
        return await result if inspect.isawaitable(result) else result


def _load(target: str) -> Callable[..., Any]:
    """Import the function. Raises `ConfigError` and `UnknownPlugin`."""
    function: Callable[..., Any] | None = find("function", target) if ":" in target else None
    if callable(function):
        return function
    kind = type(function).__name__
    reason = (
        "must be module:callable" if function is None else f"which is a {kind}; it must be callable"
    )
    raise ConfigError(f"evaluator 'function': target is {target!r}, {reason}")


def _check_signature(target: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the function cannot be called with an outcome and the options."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function of C without a signature
        return
    try:
        signature.bind(None, **options)
    except TypeError as error:
        given = ", ".join(("outcome", *(f"{name}=..." for name in options)))
        msg = f"evaluator 'function': {target} takes {signature}, must take ({given}): {error}"
        raise ConfigError(msg) from error


async def _in_thread(function: Callable[[], object]) -> object:
    """Call a function in a new thread: one that hangs must not occupy a thread pool."""
    done: Future[object] = Future()
    done.set_running_or_notify_cancel()  # a cancelled wait does not cancel the future

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - passed to the caller, SystemExit too
            done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    threading.Thread(target=work, name="tugline-function", daemon=True).start()
    return await asyncio.wrap_future(done)


def _to_verdict(name: str, result: object) -> Verdict:
    """Convert a function's result. Raises `EvaluatorError` if that is not possible."""
    try:
        if isinstance(result, Verdict):
            return make_plain(result)
        if isinstance(result, Mapping) and "value" in result:
            parts = dict(result)
            known = {name: parts.pop(name) for name in _FIELDS if name in parts}
            result = Reward(parts=parts, **known)
        if not isinstance(result, Reward):
            expected = "a number, a Reward, a Verdict or a dict with 'value'"
            result = Reward(to_number(result, "the result", expected))
        return make_plain(Verdict(result, {}))
    except EvaluatorError as error:
        raise EvaluatorError(f"evaluator 'function': {name} returned no verdict: {error}") from None

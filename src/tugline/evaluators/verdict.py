"""Ask an evaluator for a verdict that can be stored, whatever its own code raises or returns."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tugline.errors import EvaluatorError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.plugins import refuse_endings
from tugline.types import Reward, plain_text

MAX_VALUES = 100_000
"""Maximum number of values in a report; the rest is left out."""
MAX_DEPTH = 32
"""Depth from which a report's values are written as text, so that one that holds itself ends."""
_MAX_TEXT = 300
"""Maximum length of a value that is only written as text, such as an object of a class."""
_MAX_BYTES = 1 << 20
"""Size up to which an array's numbers are written."""
_INTEGERS = range(-(1 << 63), 1 << 63)


async def evaluate(evaluator: Evaluator, outcome: SessionOutcome) -> Verdict:
    """Score one session; the verdict holds plain values only.

    Raises `EvaluatorError` for a reward that is not finite or does not fit the session's calls and
    traces, and if the evaluator's code cancels or exits, neither of which it may do to the node:
    only an order to this task is a cancellation. Other errors of the evaluator are raised as they
    are.
    """
    name = type(evaluator).__name__
    with refuse_endings(name, EvaluatorError):
        verdict = await evaluator.evaluate(outcome)
    if not isinstance(verdict, Verdict):
        raise EvaluatorError(f"{name} returned {_describe(verdict)}, must be a Verdict")
    made = make_plain(verdict)
    _check_fit(made.reward, outcome)
    return made


def _check_fit(reward: Reward, outcome: SessionOutcome) -> None:
    """Check that each call and trace has a value, or none. Raises `EvaluatorError`."""
    session = outcome.calls[0].session if outcome.calls else f"of task {outcome.task.id}"
    recorded = [call.number for call in outcome.calls]
    differing = sorted(set(recorded) ^ set(reward.per_call))
    if reward.per_call and differing:
        wrong = ", ".join(map(str, differing))
        msg = f"session {session}: reward.per_call has {len(reward.per_call)} values for"
        msg += f" {len(recorded)} recorded calls; it must have one for each number of a call, or be"
        raise EvaluatorError(f"{msg} empty (missing or not recorded: {wrong})")
    traces = len(outcome.traces)
    if reward.per_trace and len(reward.per_trace) != traces:
        msg = f"session {session}: reward.per_trace has {len(reward.per_trace)} values for {traces}"
        raise EvaluatorError(f"{msg} traces; it must have one for each, or be empty")


def make_plain(verdict: Verdict) -> Verdict:
    """Copy a verdict, with numbers, texts, lists and dicts only. Raises `EvaluatorError`.

    In the report, what is none of these becomes a text; a reward has to be a finite number.
    """
    try:
        reward = verdict.reward
        parts = {
            plain_text(str(name)): to_number(value, f"reward.parts[{name!r}]")
            for name, value in reward.parts.items()
        }
        made = Reward(
            to_number(reward.value, "reward.value"),
            parts,
            tuple(
                to_number(each, f"reward.per_trace[{at}]")
                for at, each in enumerate(reward.per_trace)
            ),
            _read_per_call(reward.per_call),
        )
        report = _Report().convert(verdict.report, 0)
    except EvaluatorError:
        raise
    except Exception as error:
        raise EvaluatorError(f"the verdict is invalid: {type(error).__name__}: {error}") from error
    return Verdict(made, report if isinstance(report, dict) else {"report": report})


def _read_per_call(per_call: object) -> dict[int, float]:
    if not isinstance(per_call, Mapping):
        what = _describe(per_call)
        msg = f"reward.per_call is {what}, must be a mapping from the number of each call"
        raise EvaluatorError(msg)
    values = {
        int(call): to_number(value, f"reward.per_call[{call!r}]")
        for call, value in per_call.items()
    }
    return dict(sorted(values.items()))


def to_number(value: object, name: str, expected: str = "a finite number") -> float:
    """Convert a number of any type, also of NumPy or PyTorch, to a float.

    Raises `EvaluatorError` unless it is finite.
    """
    number: Any = value
    try:
        if not isinstance(value, bool | int | float) and hasattr(value, "item"):
            number = value.item()
        number = math.nan if isinstance(number, str | bytes) else float(number)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        number = math.nan
    if math.isfinite(number):
        return float(number)
    raise EvaluatorError(f"{name} is {_describe(value)}, must be {expected}")


class _Report:
    """Converter of one report, which counts its values."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def convert(self, value: object, depth: int) -> object:
        """Convert a value to one that JSON and msgpack can write."""
        self._left -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return plain_text(str(value))
        if isinstance(value, int):
            return int(value) if int(value) in _INTEGERS else _describe(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(float(value))
        if depth >= MAX_DEPTH:
            return _describe(value)
        return self._convert_other(value, depth + 1)

    def _convert_other(self, value: Any, depth: int) -> object:
        if isinstance(value, Mapping):
            return self._convert_mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset):
            return self._convert_items(value, depth)
        if isinstance(value, bytes | bytearray | memoryview):
            return plain_text(bytes(value).decode(errors="backslashreplace"))
        if isinstance(value, msgspec.Struct) or hasattr(type(value), "__dataclass_fields__"):
            names = getattr(value, "__struct_fields__", None) or value.__dataclass_fields__
            fields = {name: getattr(value, name, None) for name in names}
            return self._convert_mapping(fields, depth)
        small = getattr(value, "nbytes", _MAX_BYTES + 1) <= _MAX_BYTES
        if small and callable(getattr(value, "tolist", None)):  # of arrays and their numbers
            return self.convert(value.tolist(), depth)
        return _describe(value)

    def _convert_mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, object]:
        made: dict[str, object] = {}
        for key, each in value.items():
            if self._left <= 0:
                break
            made[plain_text(str(key))] = self.convert(each, depth)
        return made

    def _convert_items(self, values: Iterable[object], depth: int) -> list[object]:
        made: list[object] = []
        for each in values:
            if self._left <= 0:
                break
            made.append(self.convert(each, depth))
        return made


def _describe(value: object) -> str:
    """Write any value as a short text."""
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001 - of the value's own class
        text = f"{type(value).__name__} ({type(error).__name__})"
    return plain_text(text[:_MAX_TEXT])

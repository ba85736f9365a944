"""Convert verdicts to values that can be stored, whatever a plug-in returned.

A verdict is journalled, sent and stored as msgpack and JSON. Values of other types become text or
their nearest plain type, so that a verdict is never lost because of a detail for human readers.
"""

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from tugline.errors import EvaluatorError
from tugline.evaluators.base import Verdict
from tugline.types import Reward

_MAX_DEPTH = 32
_MAX_VALUES = 20_000
_LEFT_OUT = "[left out]"


def make_plain(verdict: object) -> Verdict:
    """Return `verdict` with plain values only. Raises `EvaluatorError` if that is not possible."""
    if not isinstance(verdict, Verdict):
        raise EvaluatorError(f"the evaluator returned {describe(verdict)}, must be a Verdict")
    try:
        report = (
            verdict.report if isinstance(verdict.report, Mapping) else {"report": verdict.report}
        )
        plain = Verdict(
            _make_plain_reward(verdict.reward),
            {plain_text(str(key)): _Converter().convert(value) for key, value in report.items()},
        )
        msgspec.msgpack.encode(plain)
    except EvaluatorError:
        raise
    except Exception as error:  # the methods of any object may fail
        reason = plain_text(f"{type(error).__name__}: {error}")
        raise EvaluatorError(f"the verdict cannot be stored: {reason}") from error
    return plain


def to_number(name: str, value: object) -> float:
    """Return any real number as a float. Raises `EvaluatorError` if it is none, or not finite."""
    if not isinstance(value, str | bytes) and hasattr(value, "__float__"):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise EvaluatorError(f"{name} is {describe(value)}, must be a finite number")


def plain_text(text: str) -> str:
    r"""Return `text` with lone surrogates, which UTF-8 cannot encode, written as ``\udXXX``."""
    return text.encode("utf-8", "backslashreplace").decode()


def describe(value: object) -> str:
    """Return a short description of any object, also of one whose methods fail."""
    try:
        return plain_text(f"{value!r:.80}")
    except Exception:  # noqa: BLE001 - `repr` of any object
        return f"a {type(value).__name__}"


def _make_plain_reward(reward: object) -> Reward:
    if not isinstance(reward, Reward):
        return Reward(to_number("the reward", reward))
    parts = {
        plain_text(str(name)): to_number(f"the reward's part {describe(name)}", value)
        for name, value in reward.parts.items()
    }
    per_trace = tuple(to_number("reward.per_trace", value) for value in reward.per_trace)
    return Reward(to_number("the reward", reward.value), parts, per_trace)


class _Converter:
    """Conversion of one value of a report, up to a depth and a number of values."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        """Ids of the containers around the current value."""
        self._left = _MAX_VALUES

    def convert(self, value: Any) -> Any:
        """Return `value` as None, a boolean, number or text, or as a dict or list of such."""
        self._left -= 1
        if self._left < 0:
            return _LEFT_OUT
        if isinstance(value, np.ndarray | np.generic):
            value = value.tolist()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if -(2**63) <= value < 2**63 else describe(int(value))
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(float(value))
        if isinstance(value, bytes | bytearray):
            return bytes(value).decode("utf-8", "backslashreplace")
        return self._convert_inside(value)

    def _convert_inside(self, value: Any) -> Any:
        if id(value) in self._open or len(self._open) >= _MAX_DEPTH:
            return _LEFT_OUT
        identity = id(value)
        self._open.add(identity)
        try:
            if isinstance(value, msgspec.Struct):
                value = msgspec.structs.asdict(value)
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            if isinstance(value, Mapping):
                items = islice(value.items(), max(0, self._left))
                return {plain_text(str(key)): self.convert(inner) for key, inner in items}
            if isinstance(value, AbstractSet):
                value = sorted(value, key=repr)
            if isinstance(value, list | tuple):
                return [self.convert(inner) for inner in value[: max(0, self._left)]]
            return plain_text(str(value))
        finally:
            self._open.discard(identity)

"""Calls of DeepSeek V4 are parsed as by its own library; text around them is kept."""

# ruff: noqa: RUF001  # the marks as the model writes them
from __future__ import annotations

import json

import numpy as np
import pytest

from support.tokenizer import make_rendering
from tugline.chat.model_call import Piece, TextDelta
from tugline.chat.stream_parser import StreamParser
from tugline.types import ToolCall


def parse(text: str) -> list[str | tuple[str, object]]:
    """Texts, and calls with their arguments, in their order."""
    made = make_rendering("deepseek-v4")
    end = np.asarray(made.tokenizer.encode("</think>"), np.int32)
    parser = StreamParser(made, end, "0")
    pieces: list[Piece] = parser.feed(made.tokenizer.encode(text))
    return [
        (one.name, json.loads(one.arguments)) if isinstance(one, ToolCall) else one.text
        for one in [*pieces, *parser.finish()[0]]
        if isinstance(one, TextDelta | ToolCall)
    ]


def invoked(*parameters: tuple[str, str, str], name: str = "t") -> str:
    """One call as the model writes it."""
    lines = "".join(
        f'<｜DSML｜parameter name="{key}" string="{text}">{value}</｜DSML｜parameter>\n'
        for key, text, value in parameters
    )
    return f'<｜DSML｜invoke name="{name}">\n{lines}</｜DSML｜invoke>'


def test_values_have_the_kind_that_is_written_beside_them() -> None:
    """Strings stay as they are; everything else is JSON, or text if it cannot be parsed."""
    call = invoked(("s", "true", "5\n"), ("n", "false", "[1, 2.5]"), ("x", "false", "{"))
    assert parse(call) == [("t", {"s": "5\n", "n": [1, 2.5], "x": "{"})]


def test_texts_around_calls_keep_their_place() -> None:
    """The marks of a section are not text; what is before and after it is."""
    section = f"<｜DSML｜tool_calls>\n{invoked()}\n{invoked(name='u')}\n</｜DSML｜tool_calls>"
    assert parse(f"a {section} b") == ["a", ("t", {}), ("u", {}), "\nb"]


@pytest.mark.parametrize(
    "broken",
    [
        invoked(("a", "true", "1"), ("a", "true", "2")),
        invoked(name=""),
        invoked().replace("</｜DSML｜invoke>", ""),
        invoked().replace("\n", "\nsurely "),
    ],
    ids=["twice", "nameless", "unclosed", "wordy"],
)
def test_a_malformed_call_is_text_as_it_was_written(broken: str) -> None:
    """A malformed call is not repaired; other calls are still parsed."""
    assert parse(broken) == [broken.strip()]
    assert parse(f"{invoked()}{broken}") == [("t", {}), broken.strip()]

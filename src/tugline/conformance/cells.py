"""Which harness speaks which dialect, what its shell tool is called, and what it cannot do.

`CELLS` is the matrix that ``tugline harness check`` goes through. `REASONS` holds what fails for a
reason that lies in the harness; docs/harnesses.md says the same in words. A reason is taken only
for a failure whose text it matches, so that it cannot hide one of ours.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tugline.errors import UsageError


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One harness in one dialect."""

    harness: str
    dialect: str
    tool: str
    """The tool that runs a command."""
    argument: str = "command"
    """Its argument that holds the command."""
    arguments: dict[str, Any] = {}
    """What else it must be given."""
    options: dict[str, Any] = {}
    """Of the preset, on top of `dialect`."""
    ends_by_command: bool = False
    """It ends when a command says so, not with an answer that calls no tool."""
    streams: bool = True


_FOUR = ("openai_chat", "openai_responses", "anthropic", "google")
_PI = {"reasoning": True, "args": ["--no-context-files", "--mode", "json"]}
CELLS: tuple[Case, ...] = (
    Case(
        harness="codex",
        dialect="openai_responses",
        tool="exec_command",
        argument="cmd",
    ),
    Case(
        harness="claude_code",
        dialect="anthropic",
        tool="Bash",
        arguments={"description": "As asked"},
    ),
    Case(
        harness="qwen_code",
        dialect="openai_chat",
        tool="run_shell_command",
        arguments={"is_background": False},
    ),
    Case(harness="gemini_cli", dialect="google", tool="run_shell_command"),
    *(
        Case(
            harness="mini_swe_agent",
            dialect=dialect,
            tool="bash",
            options={"dialect": dialect},
            ends_by_command=True,
            streams=False,
        )
        for dialect in _FOUR[:3]
    ),
    *(
        Case(harness="pi", dialect=dialect, tool="bash", options={"dialect": dialect, **_PI})
        for dialect in _FOUR
    ),
    *(
        Case(
            harness="opencode",
            dialect=dialect,
            tool="bash",
            arguments={"description": "As asked"},
            options={"dialect": dialect},
        )
        for dialect in _FOUR
    ),
)

REASONS: tuple[tuple[str, str, str, str], ...] = (
    ("mini_swe_agent", "streaming", "answer came whole", "it asks for whole answers only"),
)
"""Harness, check, pattern of the failure, and the reason in the harness."""


def cells_of(name: str | None) -> tuple[Case, ...]:
    """The cells of one harness, all for None. Raises `UsageError` for one that has none."""
    found = tuple(cell for cell in CELLS if name in (None, cell.harness))
    if not found:
        names = ", ".join(dict.fromkeys(cell.harness for cell in CELLS))
        msg = f"harness {name!r} cannot be checked; these can: {names}"
        raise UsageError(msg)
    return found


def judged(cell: Case, check: str, failure: str | None) -> str:
    """``pass``, ``fail: why``, or ``cli: why`` where the harness is known for it."""
    if failure is None:
        return "pass"
    for harness, name, pattern, reason in REASONS:
        if (harness, name) == (cell.harness, check) and re.search(pattern, failure):
            return f"cli: {reason}"
    return f"fail: {failure}"

"""Scripted sessions: assistant turns that solve a problem, or fail in a typical way.

A script uses the tools of a harness. Each turn also has the approximate result of its tool call,
for conversations that are made without running the harness.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tugline.demo.tasks import Edit, RepairProblem
from tugline.types import Tool


class ToolTurn(msgspec.Struct, frozen=True):
    """An assistant turn that calls one tool; `arguments` is JSON text."""

    name: str
    arguments: str
    result: str


Turn = ToolTurn | str
"""An assistant turn: a tool call, or the final text."""

FIXED = "Fixed."
NOT_FOUND = "I found nothing to fix."
FAILED = "I could not fix it."
HABITS = ("wrong change", "blind change", "read only", "nothing")
HABIT_WEIGHTS = (1, 3, 2, 3)
"""Weights of the ways in which a scripted session fails."""


class Tools(NamedTuple):
    """Make calls of a harness's tools that read and change the broken file of a problem."""

    read: Callable[[RepairProblem], ToolTurn]
    edit: Callable[[RepairProblem, Edit], ToolTurn]


def write_script(
    problem: RepairProblem, tools: Tools, rng: random.Random, p_right: float = 1.0
) -> list[Turn]:
    """Make turns that solve `problem` with probability `p_right`, else fail."""
    if rng.random() < p_right:
        return [tools.read(problem), tools.edit(problem, problem.solution), FIXED]
    habit = rng.choices(HABITS, HABIT_WEIGHTS)[0]
    if habit == "wrong change":
        return [tools.read(problem), tools.edit(problem, rng.choice(problem.wrong)), FIXED]
    if habit == "blind change":
        guess = Edit(rng.choice(problem.blind), problem.solution.new)
        return [tools.edit(problem, guess), FAILED]
    if habit == "read only":
        return [tools.read(problem), NOT_FOUND]
    return [NOT_FOUND]


# --------------------------------------------------------------------------- the harnesses' tools
def _pi_read(problem: RepairProblem) -> ToolTurn:
    return ToolTurn("read", json.dumps({"path": problem.module}), problem.files[problem.module])


def _pi_edit(problem: RepairProblem, edit: Edit) -> ToolTurn:
    edits = [{"oldText": edit.old, "newText": edit.new}]
    result = f"Successfully replaced 1 block(s) in {problem.module}."
    if edit.old not in problem.files[problem.module]:
        result = (
            f"Could not find the exact text in {problem.module}. "
            "The old text must match exactly including all whitespace and newlines."
        )
    return ToolTurn("edit", json.dumps({"path": problem.module, "edits": edits}), result)


def _qwen_read(problem: RepairProblem) -> ToolTurn:
    path = f"/workspace/{problem.module}"
    return ToolTurn("read_file", json.dumps({"file_path": path}), problem.files[problem.module])


def _qwen_edit(problem: RepairProblem, edit: Edit) -> ToolTurn:
    path = f"/workspace/{problem.module}"
    arguments = {"file_path": path, "old_string": edit.old, "new_string": edit.new}
    text = problem.files[problem.module].replace(edit.old, edit.new)
    lines = text.count("\n")
    result = (
        f"The file: {path} has been updated. "
        f"Showing lines 1-{lines} of {lines} from the edited file:\n\n---\n\n{text}"
    )
    return ToolTurn("edit", json.dumps(arguments), result)


def _cat(problem: RepairProblem) -> str:
    return f"cat {problem.module}"


def _sed(problem: RepairProblem, edit: Edit) -> str:
    old = "".join(f"\\{char}" if char in "[]*." else char for char in edit.old)
    return f"sed -i 's#{old}#{edit.new}#' {problem.module}"


def _codex_shell(command: str, output: str) -> ToolTurn:
    result = (
        "Chunk ID: 4db678\nWall time: 0.0000 seconds\nProcess exited with code 0\n"
        f"Original token count: {len(output) // 4}\nOutput:\n{output}"
    )
    return ToolTurn("exec_command", json.dumps({"cmd": command}), result)


def _codex_read(problem: RepairProblem) -> ToolTurn:
    return _codex_shell(_cat(problem), problem.files[problem.module])


def _codex_edit(problem: RepairProblem, edit: Edit) -> ToolTurn:
    return _codex_shell(_sed(problem, edit), "")


def _claude_read(problem: RepairProblem) -> ToolTurn:
    text = problem.files[problem.module].rstrip()
    return ToolTurn("Bash", json.dumps({"command": _cat(problem)}), text)


def _claude_edit(problem: RepairProblem, edit: Edit) -> ToolTurn:
    result = (
        f"[This command modified 1 file you've previously read: {problem.module}. "
        "Call Read before editing.]"
    )
    return ToolTurn("Bash", json.dumps({"command": _sed(problem, edit)}), result)


PI = Tools(_pi_read, _pi_edit)
"""Also the tools of the agent in ``examples/agents``."""
CODEX = Tools(_codex_read, _codex_edit)
CLAUDE_CODE = Tools(_claude_read, _claude_edit)
QWEN_CODE = Tools(_qwen_read, _qwen_edit)

_TEXT = {"type": "string"}
_EDIT = {"type": "object", "properties": {"oldText": _TEXT, "newText": _TEXT}}
_PARAMETERS: dict[str, dict[str, object]] = {
    "read": {"path": _TEXT},
    "edit": {"path": _TEXT, "edits": {"type": "array", "items": _EDIT}},
}
PLAIN = tuple(
    Tool(name, "", {"type": "object", "properties": each}) for name, each in _PARAMETERS.items()
)
"""The same tools as an agent of one's own declares them, without descriptions."""

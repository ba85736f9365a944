"""Scripted sessions: what an expert, or somebody with bad habits, does with a problem."""

from __future__ import annotations

import json
import random

import msgspec

from tugline.demo.tasks import Edit, RepairProblem


class ToolTurn(msgspec.Struct, frozen=True):
    """An assistant turn that calls one tool; `arguments` is JSON text."""

    name: str
    arguments: str


Turn = ToolTurn | str
"""An assistant turn: a tool call, or the final text."""

FIXED = "Fixed."
NOT_FOUND = "I found nothing to fix."
FAILED = "I could not fix it."
HABITS = ("wrong change", "blind change", "read only", "nothing")
HABIT_WEIGHTS = (1, 3, 2, 3)
"""How an unsuccessful scripted session goes wrong."""


def write_script(problem: RepairProblem, rng: random.Random, p_right: float = 1.0) -> list[Turn]:
    """Assistant turns that solve `problem` with probability `p_right`, else a bad habit."""
    if rng.random() < p_right:
        return [_read(problem), _edit(problem, problem.solution), FIXED]
    habit = rng.choices(HABITS, HABIT_WEIGHTS)[0]
    if habit == "wrong change":
        return [_read(problem), _edit(problem, rng.choice(problem.wrong)), FIXED]
    if habit == "blind change":
        guess = Edit(rng.choice(problem.blind), problem.solution.new)
        return [_edit(problem, guess), FAILED]
    if habit == "read only":
        return [_read(problem), NOT_FOUND]
    return [NOT_FOUND]


def _read(problem: RepairProblem) -> ToolTurn:
    return ToolTurn("read", json.dumps({"path": problem.module}))


def _edit(problem: RepairProblem, edit: Edit) -> ToolTurn:
    edits = [{"oldText": edit.old, "newText": edit.new}]
    return ToolTurn("edit", json.dumps({"path": problem.module, "edits": edits}))

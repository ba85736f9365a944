"""Recorded sessions with a patch, and evaluators that judge them, without any agent."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from support.calls import make_call, make_header
from tugline.evaluators.base import SessionOutcome
from tugline.patch import FileChange, Patch, pack_patch
from tugline.recording.file import Writer
from tugline.recording.patches import save_patch
from tugline.recording.records import RecordedExit, RecordedResult
from tugline.types import Ledger, PluginSpec, Reward, Status

FILES = {
    "bill.py": "def total(a, b):\n    return a - b\n",
    "test_bill.py": "from bill import total\n\ndef test_total():\n    assert total(2, 3) == 6\n",
}
"""A bug, and a test that no correct repair passes."""
REPAIRED = {"test_bill.py": FILES["test_bill.py"].replace("6", "5")}
"""Files of the evaluator `tests` with the right test."""
WORKS = {
    "right": Patch({"bill.py": FileChange(b"def total(a, b):\n    return a + b\n")}),
    "wrong": Patch({"bill.py": FileChange(b"def total(a, b):\n    return a * b\n")}),
    "cheat": Patch({"test_bill.py": FileChange(b"def test_total():\n    pass\n")}),
    "broken": Patch({"bill.py": FileChange(b"def total(")}),
    "none": Patch(),
}
"""Patches; `wrong` passes the first test."""


def record(
    folder: Path, session: str, patch: Patch | None = None, reward: float = 0.0, **fields: Any
) -> Path:
    """Record a session of one call; `fields` are those of its task, or `seconds` of its result."""
    task, _, sample = session.rpartition("-")
    seconds = fields.pop("seconds", {"run": 1.0, "eval": 1.0})
    given = {"runtime": PluginSpec("local"), "files": FILES, **fields}
    path = folder / f"{session}.1.rec"
    with Writer(path, make_header(session, task, int(sample), 1, task_fields=given)) as writer:
        writer.append(make_call(0, [1, 2], [3]))
        digest = "" if patch is None else save_patch(pack_patch(patch), folder)
        result = RecordedResult(
            status=Status.COMPLETED,
            builder="prefix_merging",
            ledger=Ledger(sampled=1, trained=1),
            reward=Reward(reward),
            seconds=seconds,
            patch=digest,
            exit=RecordedExit(0, timed_out=False, seconds=1.0) if digest else None,
        )
        writer.append_record(result)
    return path


# --------------------------------------------------------------------------- evaluators
def count_changes(outcome: SessionOutcome) -> dict[str, float]:
    """Count what an evaluator gets of a session."""
    return {
        "value": float(len(outcome.patch.files)),
        "calls": len(outcome.calls),
        "traces": len(outcome.traces),
        "code": outcome.exit.code if outcome.exit else -1,
    }


def kill_once(outcome: SessionOutcome, *, victim: str, mark: str) -> float:
    """Kill the process that judges the task `victim`, unless the file `mark` exists."""
    if outcome.task.id == victim and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def alternate(outcome: SessionOutcome, *, flaky: str, mark: str) -> float:
    """Judge the task `flaky` differently each time, and all others equally."""
    path = Path(mark)
    if outcome.task.id != flaky:
        return 1.0
    path.unlink() if path.exists() else path.touch()
    return float(path.exists())


def function(name: str, **options: str) -> PluginSpec:
    """The evaluator that calls a function of this module."""
    return PluginSpec("function", {"target": f"{__name__}:{name}", "options": options})

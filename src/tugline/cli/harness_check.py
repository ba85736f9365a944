"""Check of a real harness: run a scripted session and verify its result.

The session is a complete rollout with the sandbox, gateway, builder and evaluator of production;
only the model is scripted. The conformance suite of the repository (`make test-harnesses`) checks
more: streaming, faults of the engine, budgets, and network access of programs.
"""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tugline.errors import HarnessError, UsageError
from tugline.gateway.app import Gateway
from tugline.harnesses.base import Harness
from tugline.plugins import make
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.schema import decode, read_values
from tugline.testing import ScriptedTurn, serve_scripted_model
from tugline.traces.lineage import Continuation, mark_side_calls, trace_lineage
from tugline.types import (
    Call,
    CallOutcome,
    Failure,
    Limits,
    PluginSpec,
    Session,
    Task,
    TraceKind,
    Trajectory,
)

INSTRUCTION = "Read one.txt and two.txt, then write both into both.txt."
FILES = {"one.txt": "walrus\n", "two.txt": "heron\n"}
LAST_WORDS = "All done, both words are in."


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Harness in a dialect, with the arguments of its shell tool."""

    harness: str
    dialect: str = ""
    """Dialect of its calls; empty if it is not known before."""
    tool: str
    """Name of the tool that runs a command."""
    argument: str = "command"
    """Argument of the tool for the command."""
    arguments: dict[str, Any] = {}
    """Other required arguments of the tool."""
    options: dict[str, Any] = {}
    """Options of the harness."""
    ends_by_command: bool = False
    """Whether the session ends at a certain command, not at a response without tool calls."""
    streams: bool = True

    def call(self, command: str) -> tuple[str, dict[str, Any]]:
        """Return the tool call that runs a command."""
        return self.tool, {self.argument: command, **self.arguments}

    def script(self) -> tuple[ScriptedTurn, ...]:
        """Return four turns that solve `INSTRUCTION`.

        The first has reasoning, text and two parallel tool calls, which harnesses often change in
        the history.
        """
        end = (self.call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),)
        return (
            ScriptedTurn(
                "First I read both files.",
                reasoning="They may be long. I look at each.",
                calls=(self.call("cat one.txt; sleep 0.2"), self.call("cat two.txt; sleep 0.2")),
            ),
            ScriptedTurn(
                "Both files are short, so I write them into a third one, in the order given.",
                calls=(self.call("cat one.txt two.txt > both.txt"),),
            ),
            ScriptedTurn(reasoning="I make sure.", calls=(self.call("cat both.txt"),)),
            ScriptedTurn(LAST_WORDS, calls=end if self.ends_by_command else ()),
        )


CASES = decode(read_values(Path(__file__).with_name("harness_cases.yaml")), tuple[Case, ...])
"""All presets with all their dialects."""


def cases_of(name: str | None) -> tuple[Case, ...]:
    """Return the cases of one harness, all for None. Raises `UsageError` if there is none."""
    cases = tuple(case for case in CASES if name in (None, case.harness))
    if not cases:
        names = ", ".join(dict.fromkeys(case.harness for case in CASES))
        msg = f"harness {name!r} has no known shell tool (known: {names}); name it with --tool"
        raise UsageError(msg)
    return cases


class CheckResult(msgspec.Struct, frozen=True):
    """Result of a case: ``pass`` or ``fail: reason`` by name of the check."""

    harness: str
    version: str | None
    dialect: str
    turns: int
    exact_turns: int
    """Turns that extend the previous turn without a fork."""
    checks: dict[str, str]

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(result.startswith("fail") for result in self.checks.values())


def main_calls(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of the conversation, without side calls and abandoned responses."""
    marked = mark_side_calls(calls)
    return [c for c in marked if c.kind is not TraceKind.SIDE and c.outcome is CallOutcome.COMPLETE]


def find_forks(calls: Sequence[Call]) -> str | None:
    """List the turns that do not extend the previous turn; None if there are none."""
    forks = [f"turn {c.number}: {c.branch}" for c in main_calls(calls) if c.branch is not None]
    return ", ".join(forks) or None


async def check(case: Case, runtime: PluginSpec, keep: Path | None = None) -> CheckResult:
    """Install the harness, run a session and check it; a failure is a result, not an exception.

    The session's files are stored in the folder `keep`.
    """
    harness = make("harness", PluginSpec(case.harness, case.options), Harness)
    calls: Sequence[Call] = ()
    try:
        await harness.install()
        with tempfile.TemporaryDirectory(prefix="tugline-check-") as temporary:
            name = re.sub(r"\W+", "-", f"{case.harness}-{case.dialect}".strip("-"))
            folder = (keep or Path(temporary)).absolute() / name
            trajectory, calls = await _run_session(case, runtime, folder)
            log = _read_log(folder)
            end = trajectory.report.get("exit")
            faults = find_faults(case, calls, log, end, trajectory.failure)
    except (HarnessError, UsageError) as error:
        faults = {"completes": str(error)}
    turns = main_calls(calls)
    return CheckResult(
        harness=case.harness,
        version=harness.version,
        dialect=case.dialect or next((call.dialect for call in calls), ""),
        turns=len(turns),
        exact_turns=sum(call.branch is None for call in turns),
        checks={name: f"fail: {fault}" if fault else "pass" for name, fault in faults.items()},
    )


async def _run_session(
    case: Case, runtime: PluginSpec, folder: Path
) -> tuple[Trajectory, Sequence[Call]]:
    """Roll out a task with the scripted model in the new folder `folder`."""
    task = Task(
        id="check",
        instruction=INSTRUCTION,
        harness=PluginSpec(case.harness, case.options),
        runtime=runtime,
        evaluator=PluginSpec("session_completed"),
        files=FILES,
        limits=Limits(agent_s=120.0),
    )
    session = Session(id="check-0", task=task.id, sample=0)
    async with (
        serve_scripted_model({INSTRUCTION: case.script()}) as served,
        Gateway(served.upstream, served.rendering, folder / "recordings") as gateway,
    ):
        calls: list[Call] = []
        trajectory = await roll_out(
            task,
            session,
            gateway=gateway,
            directory=folder / "session",
            parts=Parts(),
            on_calls=calls.extend,
        )
        return trajectory, calls


def _read_log(folder: Path) -> str:
    path = folder / "session" / "agent" / "logs" / "agent.log"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def find_faults(
    case: Case, calls: Sequence[Call], log: str, code: int | None, failure: Failure | None = None
) -> dict[str, str | None]:
    """Return the fault of each check by name; None for a check that passes."""
    turns = main_calls(calls)
    expected = len(case.script())
    incomplete = f"exit code {code}" if code else None
    if failure or len(turns) != expected:
        reason = failure.message if failure else " ".join(log.split())[-300:]
        incomplete = f"{len(turns)} turns instead of {expected}; {reason}"
    results = [" ".join(m.content for m in call.messages) for call in (*turns[1:2], *turns[-1:])]
    known = {call.number: call for call in calls}
    broken = [
        call.number
        for call in calls
        if call.parent is not None
        and trace_lineage(call, known.get(call.parent)).continuation is Continuation.BROKEN
    ]
    words = [text.strip() for text in FILES.values()]
    missing = [word for word in words if sum(word in result for result in results) < 2]
    return {
        "completes": incomplete,
        "tool_call_executed": f"the requests lack the results {missing}" if missing else None,
        "history_exact": find_forks(calls),
        "prefix_kept": f"turns {broken} do not begin with the previous turn" if broken else None,
        "text_shown": None if LAST_WORDS in log else f"{LAST_WORDS!r} is not in the output",
    }

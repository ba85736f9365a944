"""Run a real harness through one scripted session and check what it did.

The session is a whole rollout: sandbox, gateway, builder and evaluator are those of production;
only the model is scripted. The conformance suite of the repository (`make test-harnesses`) checks
more: streaming, faults of the engine, budgets, and hosts that a program tries to reach.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tugline.errors import HarnessError, UsageError
from tugline.evaluators.base import SessionOutcome, Verdict
from tugline.gateway.app import Gateway
from tugline.harnesses.base import Harness
from tugline.plugins import find
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.testing.scripted_model import ScriptedTurn, serve_scripted_model
from tugline.types import Call, CallOutcome, Limits, PluginSpec, Reward, Session, Task, TraceKind

INSTRUCTION = "Read one.txt and two.txt, then write both into both.txt."
FILES = {"one.txt": "walrus\n", "two.txt": "heron\n"}
LAST_WORDS = "All done, both words are in."
_AGENT_S = 120.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One harness in one dialect, and how its shell tool is called."""

    harness: str
    dialect: str
    tool: str
    """Name of the tool that runs a command."""
    argument: str = "command"
    """Its argument that holds the command."""
    arguments: dict[str, Any] = {}
    """Its other required arguments."""
    options: dict[str, Any] = {}
    """Options of the harness."""
    ends_by_command: bool = False
    """Whether it ends at a certain command and not at an answer without tool calls."""
    streams: bool = True

    def call(self, command: str) -> tuple[str, dict[str, Any]]:
        """Return the tool call that runs a command."""
        return self.tool, {self.argument: command, **self.arguments}

    def script(self) -> tuple[ScriptedTurn, ...]:
        """Return four turns that do `INSTRUCTION`.

        The first has reasoning, text and two parallel tool calls, which is what breaks histories.
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


def _in_dialects(dialects: Sequence[str], options: dict[str, Any], **case: Any) -> list[Case]:
    return [Case(dialect=d, options={"dialect": d, **options}, **case) for d in dialects]


_ALL = ("openai_chat", "openai_responses", "anthropic", "google")
_DESCRIBED = {"description": "As asked"}
_PI = {"reasoning": True, "args": ["--no-context-files", "--mode", "json"]}
CASES: tuple[Case, ...] = (
    Case(harness="codex", dialect="openai_responses", tool="exec_command", argument="cmd"),
    Case(harness="claude_code", dialect="anthropic", tool="Bash", arguments=_DESCRIBED),
    Case(
        harness="qwen_code",
        dialect="openai_chat",
        tool="run_shell_command",
        arguments={"is_background": False},
    ),
    Case(harness="gemini_cli", dialect="google", tool="run_shell_command"),
    *_in_dialects(
        *(_ALL[:3], {}), harness="mini_swe_agent", tool="bash", ends_by_command=True, streams=False
    ),
    *_in_dialects(_ALL, _PI, harness="pi", tool="bash"),
    *_in_dialects(_ALL, {}, harness="opencode", tool="bash", arguments=_DESCRIBED),
)
"""Every preset in every dialect that it speaks."""


def cases_of(name: str | None) -> tuple[Case, ...]:
    """Return the cases of one harness, all for None. Raises `UsageError` if there is none."""
    found = tuple(case for case in CASES if name in (None, case.harness))
    if not found:
        names = ", ".join(dict.fromkeys(case.harness for case in CASES))
        raise UsageError(f"harness {name!r} cannot be checked; these can: {names}")
    return found


class CheckResult(msgspec.Struct, frozen=True):
    """The results of one case: ``pass`` or ``fail: reason`` by name of the check."""

    harness: str
    version: str | None
    dialect: str
    turns: int
    exact_turns: int
    """Turns that continue the one before without a fork."""
    checks: dict[str, str]

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(result.startswith("fail") for result in self.checks.values())


def compare_file(outcome: SessionOutcome, *, path: str, expected: str) -> Verdict:
    """Report the text that the agent gave a file; reward 1 if it is `expected`."""
    change = outcome.patch.files.get(path)
    text = change.text if change else None
    code = outcome.exit.code if outcome.exit else None
    return Verdict(Reward(float(text == expected)), {"text": text, "exit": code})


class CheckedSession(msgspec.Struct, frozen=True):
    """What one session left for the checks."""

    calls: tuple[Call, ...]
    turns: int
    """Turns that were scripted."""
    report: dict[str, Any]
    """Of `compare_file`."""
    failure: str
    log: str


def main_calls(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of the conversation, without side calls and abandoned answers."""
    return [c for c in calls if c.kind is not TraceKind.SIDE and c.outcome is CallOutcome.COMPLETE]


def find_forks(calls: Sequence[Call]) -> str | None:
    """Name the turns that do not continue the one before; None if all do."""
    forks = [f"turn {c.number}: {c.branch}" for c in main_calls(calls) if c.branch is not None]
    return ", ".join(forks) or None


def find_lost_prefix(calls: Sequence[Call]) -> str | None:
    """Name a turn whose prompt does not begin with the previous prompt and answer, id for id."""
    turns = main_calls(calls)
    for before, after in itertools.pairwise(turns):
        whole = np.concatenate((before.prompt_ids, before.sampled_ids))
        if not np.array_equal(after.prompt_ids[: len(whole)], whole):
            return f"turn {after.number} does not start with turn {before.number}"
    return None if len(turns) > 1 else f"only {len(turns)} turns"


def _completes(session: CheckedSession) -> str | None:
    turns = len(main_calls(session.calls))
    if session.failure or turns != session.turns:
        said = " ".join(session.log.split())[-300:]
        return f"{turns} turns instead of {session.turns}; {session.failure or said}"
    code = session.report.get("exit")
    return f"exit code {code}" if code else None


def _tool_calls_run(session: CheckedSession) -> str | None:
    text = session.report.get("text")
    if text != "".join(FILES.values()):
        return f"both.txt holds {text!r}"
    results = " ".join(m.content for call in session.calls[1:2] for m in call.messages)
    missing = [word for word in ("walrus", "heron") if word not in results]
    return f"the second request lacks the results {missing}" if missing else None


_CHECKS: dict[str, Callable[[CheckedSession], str | None]] = {
    "completes": _completes,
    "tool_call_executed": _tool_calls_run,
    "history_exact": lambda session: find_forks(session.calls),
    "prefix_kept": lambda session: find_lost_prefix(session.calls),
    "text_shown": lambda session: (
        None if LAST_WORDS in session.log else f"{LAST_WORDS!r} is not in its output"
    ),
}
"""Each returns None if all is well, else the reason."""


async def check(case: Case, runtime: PluginSpec, keep: Path | None = None) -> CheckResult:
    """Install the harness, run its session and check it; a failure is a result, no exception.

    The session's files stay in the folder `keep`.
    """
    harness: Harness = find("harness", case.harness)(**case.options)
    session = CheckedSession((), len(case.script()), {}, "", "")
    try:
        await harness.install()
        with tempfile.TemporaryDirectory(prefix="tugline-check-") as temporary:
            folder = (keep or Path(temporary)).absolute() / f"{case.harness}-{case.dialect}"
            session = await _run_session(case, runtime, folder)
        checks = {name: examine(session) for name, examine in _CHECKS.items()}
    except (HarnessError, UsageError) as error:
        checks = dict.fromkeys(_CHECKS, str(error))
    turns = main_calls(session.calls)
    return CheckResult(
        harness=case.harness,
        version=harness.version,
        dialect=case.dialect,
        turns=len(turns),
        exact_turns=sum(call.branch is None for call in turns),
        checks={name: f"fail: {why}" if why else "pass" for name, why in checks.items()},
    )


async def _run_session(case: Case, runtime: PluginSpec, folder: Path) -> CheckedSession:
    """Roll out one task against the scripted model. `folder` must be new and stays."""
    script = case.script()
    expected = {"path": "both.txt", "expected": "".join(FILES.values())}
    evaluator = {"target": f"{__name__}:{compare_file.__name__}", "options": expected}
    task = Task(
        id="check",
        instruction=INSTRUCTION,
        harness=PluginSpec(case.harness, case.options),
        runtime=runtime,
        evaluator=PluginSpec("function", evaluator),
        files=FILES,
        limits=Limits(agent_s=_AGENT_S),
    )
    session = Session(id="check-0", task=task.id, sample=0)
    async with serve_scripted_model({INSTRUCTION: script}) as served:
        gateway = Gateway(served.upstream, served.rendering, folder / "recordings")
        async with gateway:
            trajectory = await roll_out(
                *(task, session), gateway=gateway, directory=folder / "session", parts=Parts()
            )
            calls = tuple(gateway.read_calls(session.id))
    log = folder / "session" / "agent" / "logs" / "agent.log"
    text = await asyncio.to_thread(_read_text, log)
    failure = trajectory.failure.message if trajectory.failure else ""
    return CheckedSession(calls, len(script), trajectory.report, failure, text)


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

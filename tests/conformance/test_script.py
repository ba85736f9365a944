"""The scripted model, and the checks of what harnesses do with it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance import worker
from conformance.session_run import SessionRun, WireRecord
from conformance.worker import stages_of
from support.calls import make_call
from tugline.chat.stream_parser import StreamParser
from tugline.chat.templates.rendering import Rendering
from tugline.cli.harness_check import CASES, LAST_WORDS, Case, cases_of, check
from tugline.sandbox.base import Exit
from tugline.testing import ScriptedModel, ScriptedTurn, make_tokenizer
from tugline.types import Call, CallOutcome, Message, PluginSpec, Role, Timings, Tool

WORDS = make_tokenizer()
RENDERING = Rendering(WORDS, "qwen3", thinking_retention="all")
CASE = cases_of("pi")[0]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "harnesses.md").read_text(encoding="utf-8")


# --------------------------------------------------------------------------- the model
def test_requests_outside_the_scripts_are_side_calls() -> None:
    """A title request is answered and takes no turn of the script."""
    player = ScriptedModel(WORDS, {"Do it": (ScriptedTurn("Done."),)})
    for asked, tools in (("Give a title", [Tool("bash", "Run", {})]), ("Give a title: Do it", [])):
        prompt = RENDERING.render([Message(role=Role.USER, content=asked)], tools)
        assert "title" in WORDS.decode(player.reply(prompt, "").ids)
    assert (player.side_calls, player.expected_tokens) == (2, 0)


def test_an_answer_is_what_the_renderer_reads_back() -> None:
    """Reasoning, text and parallel calls of the script survive the parser of answers."""
    turn = CASE.script()[0]
    end = RENDERING.render([Message(role=Role.USER, content="x")], ())
    _, parsed = StreamParser.parse(RENDERING, end, WORDS.encode(turn.render()))
    assert (parsed.reasoning, parsed.content) == (turn.reasoning, turn.text)
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
    assert calls == list(turn.calls)


# --------------------------------------------------------------------------- the checks
def call(number: int, **changes: Any) -> Call:
    """A turn that continues the one before it exactly; seven ids are new in each."""
    size = 5 + 7 * number
    message = Message(role=Role.TOOL, content="walrus heron")
    timings = Timings(float(number), last_token=10.0)
    fields = {"messages": (message,), "timings": timings, **changes}
    return make_call(number, range(size), range(size, size + 3), **fields)


def session(**changes: Any) -> SessionRun:
    """Four turns without a fault."""
    fields: dict[str, Any] = {
        "exit": Exit(0, timed_out=False, seconds=1.0),
        "calls": tuple(map(call, range(4))),
        "requests": tuple(
            WireRecord(float(i), 200, [(float(at), b"x") for at in range(8)]) for i in range(4)
        ),
        "log": f"He said: {LAST_WORDS}",
        "output": '{"input": 12, "output": 3}',
        "sampled": 12,
        "expected_tokens": 12,
        "side_calls": 0,
    }
    return SessionRun(**{**fields, **changes})


def verdicts(ran: SessionRun) -> dict[str, str | None]:
    """The result of every check for the same session."""
    stages = [*stages_of(CASE, slow=False), *stages_of(CASE, slow=True)]
    return {examine.__name__: examine(CASE, ran) for stage in stages for examine in stage.checks}


def test_a_good_session_passes() -> None:
    """No check fails but that of the budget, which this session did not have."""
    failures = verdicts(session())
    assert failures.pop("budget_stop_survived") == "4 calls with a budget of 2"
    assert set(failures.values()) == {None}


@pytest.mark.parametrize(
    ("check", "ran", "reason"),
    [
        ("streaming", session(requests=(WireRecord(0.0, 200, [(1.0, b"x")]),)), "came whole"),
        (
            "streaming",
            session(requests=(WireRecord(0.0, 200, [(11.0, b"x")] * 9),)),
            "0 of 9 parts",
        ),
        ("usage_seen", session(output="112 1.12 12.5"), "none of"),
        ("retry_safe", session(sampled=16), "16 tokens sampled for answers of 12"),
        ("retry_safe", session(calls=(*session().calls, call(4))), "5 turns instead of 4"),
        (
            "retry_safe",
            session(calls=(*session().calls, call(4, outcome=CallOutcome.CLIENT_GONE))),
            "15 tokens counted of 12",
        ),
        (
            "budget_stop_survived",
            session(exit=Exit(-9, timed_out=True, seconds=90)),
            "still running",
        ),
        ("budget_stop_survived", session(requests=session().requests * 9), "36 requests"),
    ],
)
def test_failed_checks_give_their_reason(check: str, ran: SessionRun, reason: str) -> None:
    """Each check can fail, and then returns the reason."""
    assert reason in (verdicts(ran)[check] or "")


def test_the_docs_say_what_is_checked() -> None:
    """docs/harnesses.md lists each check of the command, docs/benchmarks.md those of the suite."""
    slow = (False, True)
    stages = [stage for case in CASES for each in slow for stage in stages_of(case, slow=each)]
    checks = {check.__name__ for stage in stages for check in stage.checks}
    pages = PAGE + (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert [name for name in sorted(checks) if f"| `{name}` |" not in pages] == []


def test_every_harness_of_the_matrix_has_its_dialects() -> None:
    """The matrix has fifteen different cases, four each of pi and opencode."""
    cases = [(case.harness, case.dialect) for case in CASES]
    assert len(cases) == len(set(cases)) == 15
    assert sum(harness == "pi" for harness, _ in cases) == 4
    assert sum(harness == "opencode" for harness, _ in cases) == 4


# --------------------------------------------------------------------------- the command
@pytest.mark.parametrize(
    ("old", "new", "failed", "reason"),
    [
        ("Be concise.", "", "", ""),
        ("MAX_TURNS = 20", "MAX_TURNS = 2", "completes", "2 turns instead of 4"),
        ("            return\n", "            exit(3)\n", "completes", "exit code 3"),
        ('"content": text})', '"content": "-"})', "tool_call_executed", "lack the results"),
        ('"tool_calls"})', '"tool_calls"}) | {"content": "-"}', "history_exact", "turn 1: hist"),
        ("print(answer.content)", "print()", "text_shown", "is not in the output"),
    ],
)
async def test_the_command_names_the_fault_of_an_agent(
    tmp_path: Path, old: str, new: str, failed: str, reason: str
) -> None:
    """The example agent passes every check of `tugline harness check`; changed ones fail one."""
    agent, right = tmp_path / "agent.py", (ROOT / "examples/agents/openai_loop.py").read_text()
    assert old in right
    agent.write_text(right.replace(old, new))
    options = {"command": [sys.executable, str(agent)]}
    case = Case(harness="shell", dialect="openai_chat", tool="bash", options=options)
    checks = (await check(case, PluginSpec("local"))).checks
    assert [name for name in checks if f"| `{name}` |" not in PAGE] == []
    failures = {name: verdict for name, verdict in checks.items() if verdict != "pass"}
    assert [*failures][:1] == ([failed] if failed else [])
    assert reason in failures.get(failed, "")


# --------------------------------------------------------------------------- the sandbox
LOOKS = """
import socket
for name in ("localhost", "telemetry.example.com"):
    try:
        socket.getaddrinfo(name, 80)
    except socket.gaierror as error:
        assert error.errno == socket.EAI_NONAME
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError:
    raise SystemExit
socket.getaddrinfo("reached.example.com", 80)
"""


async def test_a_harness_has_no_network_and_its_lookups_are_named() -> None:
    """Name lookups fail and are recorded, and no address can be reached."""
    options = {"command": [sys.executable, "-c", LOOKS]}
    case = Case(harness="shell", dialect="openai_chat", tool="none", options=options)
    checks = await worker.check(case)
    assert checks["no_foreign_host"] == "fail: asked for telemetry.example.com"
    assert checks["usage_seen"].startswith("fail: none of [] in its output")

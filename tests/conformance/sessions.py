"""The sessions of the suite: what the model answers, and which faults occur.

A plain session of four turns, the same with a fault at every turn, one whose budget ends halfway;
some harnesses have one more for a feature of theirs.
"""

import re

from conformance.session_run import Scenario
from tugline.cli.harness_check import FILES, INSTRUCTION, LAST_WORDS, Case
from tugline.gateway.policy import CallSettings
from tugline.testing import Reply, ScriptedTurn

SLOW = 1
"""The turn whose first tokens must be sent before its last are sampled."""
BUDGET = 2
CUT = 12
"""Tokens after which the engine dies."""
_TOKEN_S = 0.03
_BUDGET_S = 90.0
_TEAM = "Have one agent of yours look at one.txt, then say what it found."
_SUB_TASK = "Agent: look at one.txt."
_ASK = {"description": "Look", "prompt": _SUB_TASK, "subagent_type": "general-purpose"}
_AGENT_TOOLS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "claude_code": ("Agent", _ASK, {"lean": False}),
    "codex": ("multi_agent_v1__spawn_agent", {"message": _SUB_TASK}, {"sub_agents": True}),
    "qwen_code": ("agent", _ASK, {}),
}
"""Name and arguments of the tool that starts an agent, and options of the harness."""
_SMALL_WINDOWS: dict[str, tuple[int, dict[str, object]]] = {
    "claude_code": (30_000, {}),
    "qwen_code": (60_000, {"context_window": 60_000}),
}
_SUMMARISE = ("Respond with TEXT ONLY", "produce the <state_snapshot>")
_SUMMARY = "Both words were read, and big.txt in parts."


def plain(case: Case) -> Scenario:
    """No fault; one turn is slow."""
    return Scenario({INSTRUCTION: case.script()}, FILES, {SLOW: Reply(delay_s=_TOKEN_S)})


def faulty(case: Case) -> Scenario:
    """The engine refuses, dies within an answer, and then the client's connection breaks."""
    faults = {0: Reply(status=503), 1: Reply(cut_after=CUT), 2: Reply(delay_s=_TOKEN_S)}
    return Scenario({INSTRUCTION: case.script()}, FILES, faults, broken=frozenset({2}))


def late_error(case: Case) -> Scenario:
    """The engine fails in the second turn, when the headers of the answer have been sent."""
    tuning = CallSettings(tries=1, headers_within_s=0.0)
    faults = {1: Reply(status=503)}
    return Scenario({INSTRUCTION: case.script()}, FILES, faults, tuning=tuning)


def budget(case: Case) -> Scenario:
    """The budget ends after two of four turns."""
    return Scenario({INSTRUCTION: case.script()}, FILES, max_turns=BUDGET, timeout_s=_BUDGET_S)


def slow_start(case: Case) -> Scenario:
    """The first token comes after 70 s, longer than some clients wait; then 30 s of answer."""
    faults = {0: Reply(first_s=70.0), 1: Reply(delay_s=0.5)}
    return Scenario({INSTRUCTION: case.script()}, FILES, faults, timeout_s=240.0)


def team(case: Case) -> Scenario:
    """The program starts a sub-agent and waits for it."""
    sub = (ScriptedTurn(calls=(case.call("cat one.txt"),)), ScriptedTurn("A walrus."))
    name, ask, options = _AGENT_TOOLS[case.harness]

    def wait(prompt: str) -> ScriptedTurn:
        agents = re.findall(r'"agent_id":\s*"([^"]+)"', prompt)
        return ScriptedTurn(calls=(("multi_agent_v1__wait_agent", {"targets": agents[-1:]}),))

    waits = [wait] if case.harness == "codex" else []
    turns = (ScriptedTurn("I ask.", calls=((name, ask),)), *waits, ScriptedTurn(LAST_WORDS))
    return Scenario({_TEAM: turns, _SUB_TASK: sub}, FILES, options=options)


def overflowing(case: Case) -> Scenario:
    """The history outgrows the window, and the program replaces it with a summary."""
    window, options = _SMALL_WINDOWS[case.harness]

    def answer(prompt: str) -> ScriptedTurn:
        if any(words in prompt[-12_000:] for words in _SUMMARISE):
            return ScriptedTurn(f"<state_snapshot>\n{INSTRUCTION} {_SUMMARY}\n</state_snapshot>")
        if _SUMMARY in prompt:
            return ScriptedTurn(LAST_WORDS)
        return ScriptedTurn("I read on.", calls=(case.call("cat big.txt"),))

    lines = "\n".join(f"line {number} of walruses and herons" for number in range(330))
    files = FILES | {"big.txt": lines}
    return Scenario({INSTRUCTION: (answer,) * 20}, files, options=options, window=window)


def titled(case: Case) -> Scenario:
    """The harness requests a title, too."""
    return Scenario({INSTRUCTION: case.script()}, FILES, options={"title": True})

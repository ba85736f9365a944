"""The sessions that a harness goes through: what the model says, and what goes wrong.

A plain one of four turns, the same with faults at every turn, and one whose budget ends in the
middle; some harnesses have one more for what only they do. The first answer has reasoning, text and
two tool calls at once, which is what breaks histories.
"""

from __future__ import annotations

import re

from tugline.conformance.cells import Case
from tugline.conformance.rehearsal import Stage
from tugline.conformance.script import Fault, Turn

INSTRUCTION = "Read one.txt and two.txt, then write both into both.txt."
FILES = {"one.txt": "walrus\n", "two.txt": "heron\n"}
SLOW = 1
"""The turn whose first words must leave before its last are sampled."""
BUDGET = 2
CUT = 12
"""Tokens after which the engine dies."""
LAST_WORDS = "All done, both words are in."
_TOKEN_S = 0.03
_BUDGET_S = 90.0
_TEAM = "Have one agent of yours look at one.txt, then say what it found."
_SUB_TASK = "Agent: look at one.txt."


def script(cell: Case) -> tuple[Turn, ...]:
    """Four turns, in the words of this harness's shell tool."""

    def run(command: str) -> tuple[str, dict[str, object]]:
        return cell.tool, {cell.argument: command, **cell.arguments}

    last = Turn(LAST_WORDS)
    if cell.ends_by_command:
        last = Turn(LAST_WORDS, calls=(run("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),))
    return (
        Turn(
            "First I read both files.",
            reasoning="They may be long. I look at each.",
            calls=(run("cat one.txt; sleep 0.2"), run("cat two.txt; sleep 0.2")),
        ),
        Turn(
            "Both files are short, so I write them into a third one, in the order I was given.",
            calls=(run("cat one.txt two.txt > both.txt"),),
        ),
        Turn(reasoning="I make sure.", calls=(run("cat both.txt"),)),
        last,
    )


def plain(cell: Case) -> Stage:
    """Everything goes well; one turn is slow."""
    return Stage({INSTRUCTION: script(cell)}, FILES, {SLOW: Fault(token_s=_TOKEN_S)})


def faulty(cell: Case) -> Stage:
    """The engine refuses, then dies within an answer; then the line to the client breaks in one."""
    hitches = {0: Fault(refuse=503), 1: Fault(cut_after=CUT), 2: Fault(token_s=_TOKEN_S)}
    return Stage({INSTRUCTION: script(cell)}, FILES, hitches, broken=frozenset({2}))


def short(cell: Case) -> Stage:
    """The budget ends after two of four turns."""
    return Stage({INSTRUCTION: script(cell)}, FILES, max_turns=BUDGET, timeout_s=_BUDGET_S)


def patient(cell: Case) -> Stage:
    """The first token comes after 70 s, which is longer than some wait; then 30 s of answer."""
    hitches = {0: Fault(first_s=70.0), 1: Fault(token_s=0.5)}
    return Stage({INSTRUCTION: script(cell)}, FILES, hitches, timeout_s=240.0)


def team(cell: Case) -> Stage:
    """Codex starts an agent of its own and waits for it."""

    def wait(prompt: str) -> Turn:
        agents = re.findall(r'"agent_id":\s*"([^"]+)"', prompt)
        return Turn(calls=(("multi_agent_v1__wait_agent", {"targets": agents[-1:]}),))

    start = ("multi_agent_v1__spawn_agent", {"message": _SUB_TASK})
    sub = (Turn(calls=((cell.tool, {cell.argument: "cat one.txt"}),)), Turn("A walrus."))
    scripts = {_TEAM: (Turn("I ask.", calls=(start,)), wait, Turn(LAST_WORDS)), _SUB_TASK: sub}
    return Stage(scripts, FILES, options={"sub_agents": True})


def titled(cell: Case) -> Stage:
    """The harness asks for a title, too."""
    return Stage({INSTRUCTION: script(cell)}, FILES, options={"title": True})


def free(_: Case) -> Stage:
    """For a model of its own mind: it may take a dozen turns."""
    return Stage({INSTRUCTION: ()}, FILES, max_turns=12, timeout_s=400.0)

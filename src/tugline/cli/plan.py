"""``tugline plan``: the machines that a run needs, and which of its parts will be the narrowest.

What is computed is written down in docs/deploy.md; the constants are of the benchmarks there. They
are of one kind of processor, so a plan may be wrong by half: it says what to look at first.
"""

import math
from typing import Annotated, NamedTuple

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from tugline.cli.options import Json
from tugline.cli.output import format_counts, print_report, print_text
from tugline.errors import UsageError


class Agent(NamedTuple):
    """What a program costs on the machine it runs on."""

    start_s: float
    """CPU time."""
    turn_s: float
    """CPU time of a model call and its tool."""
    memory_mb: int
    """Of its largest process."""


AGENTS = {
    "claude_code": Agent(1.3, 0.14, 215),
    "codex": Agent(0.4, 0.08, 145),
    "gemini_cli": Agent(2.6, 0.065, 790),
    "opencode": Agent(8.2, 0.37, 750),
    "pi": Agent(0.8, 0.034, 145),
    "qwen_code": Agent(4.2, 0.2, 1940),
}
"""Measured with a scripted model, 2 and 22 calls of the shell (versions of docs/harnesses.md)."""

CALL_S, TURN_S, TOKEN_S = 0.0016, 0.0000068, 0.000043
"""CPU time of a gateway: of a call, more for each earlier turn, and of a streamed token."""
SESSION_S = 0.0066
"""CPU time of a node for what is left of a session."""
SERVER_S, DATABASE_S = 0.0025, 0.0011
"""CPU time of a session on the server and in PostgreSQL."""
CALL_MEMORY = 20_000
"""Bytes that a call keeps in memory while its session is open."""
ID_BYTES, SAMPLED_BYTES = 1.5, 7.0
"""Of a recording: for each id, and more for each sampled one."""
BUSY = 0.7
"""Share of a core or of memory that is planned with."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs."""

    sessions_per_hour: float
    """That keep the engines busy."""
    session_s: float
    open_sessions: int
    """At once: slots of all nodes."""
    busy: float
    """Share of the engines that the sessions of a step keep busy."""
    kv_tokens: int
    """That the engines hold if every open session keeps its context there."""
    nodes: int
    slots: int
    """Of each node."""
    nodes_for: dict[str, int]
    """Nodes that each of their limits asks for; the largest decides."""
    agent_cores: float
    gateway_cores: float
    memory_gb: float
    """Of agents and gateways."""
    servers: int
    server_cores: float
    """Of servers and database."""
    disk_gb_per_day: float
    """Recordings."""


Above = Annotated[float, Parameter(validator=Number(gt=0))]
Count = Annotated[int, Parameter(validator=Number(gt=0))]
NotLess = Annotated[float, Parameter(validator=Number(gte=0))]


def plan(
    *,
    gpus: Count,
    model_tps: Above,
    harness: str = "claude_code",
    sessions: Count = 512,
    turns: Count = 30,
    turn_tokens: Count = 300,
    result_tokens: Count = 500,
    prompt: Count = 15_000,
    token_ms: Above = 20.0,
    tool_s: NotLess = 2.0,
    tool_cpu_s: NotLess = 0.5,
    eval_s: NotLess = 30.0,
    cores: Count = 64,
    memory_gb: Count = 256,
    as_json: Json = False,
) -> None:
    """Say how many machines a run needs, and what will be the narrowest.

    Args:
        gpus: GPUs of the engines.
        model_tps: Tokens a second that each of them samples with a full batch.
        harness: A preset; it decides what an agent costs.
        sessions: Sessions of a step, with those of later steps that run meanwhile.
        turns: Model calls of a session.
        turn_tokens: Tokens sampled in one.
        result_tokens: Tokens that a tool's result adds.
        prompt: Tokens of the first prompt.
        token_ms: Time for one token of one answer.
        tool_s: Time in tools for each turn.
        tool_cpu_s: Processor time of them.
        eval_s: Time of an evaluation, and processor time.
        cores: Processors of a node's machine.
        memory_gb: Memory of it.
    """
    if harness not in AGENTS:
        raise UsageError(f"--harness is {harness!r}, must be one of {', '.join(AGENTS)}")
    agent = AGENTS[harness]
    sampled, ids = turns * turn_tokens, prompt + turns * (turn_tokens + result_tokens)
    rate = gpus * model_tps / sampled
    start_s, answers_s = agent.start_s + turns * agent.turn_s, sampled * token_ms / 1000
    session_s = start_s + answers_s + turns * tool_s + eval_s
    agent_s = start_s + turns * tool_cpu_s + eval_s
    gateway_s = turns * (CALL_S + TURN_S * turns / 2) + sampled * TOKEN_S + SESSION_S
    at_once = math.ceil(rate * session_s)
    memory = at_once * (agent.memory_mb / 1e3 + CALL_MEMORY * turns / 2 / 1e9)
    nodes_for = {
        "processors": math.ceil(rate * (agent_s + gateway_s) / cores / BUSY),
        "memory": math.ceil(memory / memory_gb / BUSY),
        "gateways": math.ceil(rate * gateway_s / BUSY),
    }
    nodes = max(nodes_for.values())
    found = Plan(
        sessions_per_hour=rate * 3600,
        session_s=session_s,
        open_sessions=at_once,
        busy=min(1.0, sessions / at_once),
        kv_tokens=at_once * (prompt + ids) // 2,
        nodes=nodes,
        slots=math.ceil(at_once / nodes),
        nodes_for=nodes_for,
        agent_cores=rate * agent_s,
        gateway_cores=rate * gateway_s,
        memory_gb=memory,
        servers=math.ceil(rate * SERVER_S / BUSY),
        server_cores=rate * (SERVER_S + DATABASE_S),
        disk_gb_per_day=rate * 86400 * (ids * ID_BYTES + sampled * SAMPLED_BYTES) / 1e9,
    )
    print_report(found, lambda: _show(found, sessions, cores, memory_gb), as_json=as_json)


def _show(found: Plan, sessions: int, cores: int, memory_gb: int) -> None:
    binds = max(found.nodes_for, key=lambda name: found.nodes_for[name])
    lines = {
        "sessions": f"{found.sessions_per_hour:,.0f} an hour keep the engines busy:"
        f" {found.open_sessions:,} at once, {found.session_s:,.0f} s each",
        "engines": f"{found.kv_tokens:,} tokens of context, if all of it is to stay in their cache",
        "nodes": f"{found.nodes} of {cores} processors and {memory_gb} GB, --slots {found.slots};"
        f" {binds} decide: {format_counts(found.nodes_for)}",
        "processors": f"{found.agent_cores:.1f} for agents, tools and evaluations,"
        f" {found.gateway_cores:.1f} for gateways (one process a node)",
        "memory": f"{found.memory_gb:,.0f} GB",
        "servers": f"{found.servers}; {found.server_cores:.2f} processors, PostgreSQL's included",
        "disk": f"{found.disk_gb_per_day:,.1f} GB of recordings a day, as much again on the server",
    }
    if found.busy < 1:
        lines["too few"] = f"{sessions} sessions a step keep {found.busy:.0%} of the engines busy"
    for name, text in lines.items():
        print_text(f"{name:<12}{text}")

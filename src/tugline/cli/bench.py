"""``tugline bench`` and ``tugline plan``: what parts cost, and what machines a run needs of them.

Benchmarks are separate programs beside the package, with stub engines and load generators that no
installation needs.

A plan is made as docs/deploy.md says, with constants of the benchmarks, which are of one kind of
processor: it says what to look at first.
"""

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from tugline.cli.options import Count, Json, NotNegative
from tugline.cli.output import format_counts, print_report, print_text
from tugline.errors import UsageError
from tugline.schema import decode, read_values


def bench(part: str, *options: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Measure what a part costs, next to the least that it could.

    Args:
        part: What to measure: gateway, trajectories, builders, server, cluster (up to a thousand
            nodes), console, utilisation, runtimes, hostile (one agent against the
            others) or learn (what several agents learn, in hours).
        options: Options of the benchmark, such as --quick and --json.
    """
    programs = Path(__file__).parents[3] / "benchmarks"
    program = programs / part / "run.py"
    if not programs.is_dir():
        raise UsageError(f"{program} is missing with this package: run this in a checkout")
    if not program.is_file():
        known = ", ".join(sorted(each.parent.name for each in programs.glob("*/run.py")))
        raise UsageError(f"there is no benchmark of {part!r}; it must be one of {known}")
    done = subprocess.run([sys.executable, str(program), *options], check=False)
    if done.returncode:
        sys.exit(2 if done.returncode == 2 else 1)


# --------------------------------------------------------------------------- plans
class Agent(NamedTuple):
    """What a program costs on the machine it runs on."""

    start_s: float
    """CPU time."""
    turn_s: float
    """CPU time of a model call and its tool."""
    memory_mb: int
    """Of its largest process."""


AGENTS = decode(read_values(Path(__file__).with_name("plan_agents.toml")), dict[str, Agent])
"""Measured with a scripted model, 2 and 22 calls of the shell (versions of docs/harnesses.md)."""

CALL_S, TURN_S, TOKEN_S = 0.0016, 0.0000068, 0.000043
"""CPU time of a gateway: of a call, more for each earlier turn, and of a streamed token."""
SESSION_S = 0.05
"""CPU time of a node for what is left of a session, a sandbox of bubblewrap included."""
SERVER_S, DATABASE_S = 0.0025, 0.0011
"""CPU time of a session on the server and in PostgreSQL."""
CALL_MEMORY = 12_000
"""Bytes that a call keeps in memory while its session is open."""
ID_BYTES, SAMPLED_BYTES = 1.5, 7.0
"""Of a recording: for each id, and more for each sampled one."""
BUSY = 0.7
"""Share of a core or of memory that is planned with."""


class Needs(msgspec.Struct, frozen=True, kw_only=True):
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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sessions of a run, and machines for its agents."""

    gpus: Count
    """GPUs of the engines."""
    model_tps: Above
    """Tokens a second that each of them samples with a full batch."""
    harness: str = "claude_code"
    """A preset; it decides what an agent costs."""
    sessions: Count = 512
    """Sessions of a step, with those of later steps that run meanwhile."""
    turns: Count = 30
    """Model calls of a session."""
    turn_tokens: Count = 300
    """Tokens sampled in one."""
    result_tokens: Count = 500
    """Tokens that a tool's result adds."""
    prompt: Count = 15_000
    """Tokens of the first prompt."""
    token_ms: Above = 20.0
    """Time for one token of one answer."""
    tool_s: NotNegative = 2.0
    """Time in tools for each turn."""
    tool_cpu_s: NotNegative = 0.5
    """Processor time of them."""
    eval_s: NotNegative = 30.0
    """Time of an evaluation, and processor time."""
    cores: Count = 64
    """Processors of a node's machine."""
    memory_gb: Count = 256
    """Memory of it."""

    def compute(self) -> Needs:
        """What it needs. Raises `UsageError` for a harness that was not measured."""
        if self.harness not in AGENTS:
            raise UsageError(f"--harness is {self.harness!r}, must be one of {', '.join(AGENTS)}")
        agent, turns, sampled = AGENTS[self.harness], self.turns, self.turns * self.turn_tokens
        ids = self.prompt + sampled + turns * self.result_tokens
        rate = self.gpus * self.model_tps / sampled
        own_s = agent.start_s + turns * agent.turn_s
        session_s = own_s + sampled * self.token_ms / 1000 + turns * self.tool_s + self.eval_s
        agent_s = own_s + turns * self.tool_cpu_s + self.eval_s
        gateway_s = turns * (CALL_S + TURN_S * turns / 2) + sampled * TOKEN_S + SESSION_S
        at_once = math.ceil(rate * session_s)
        memory = at_once * (agent.memory_mb / 1e3 + CALL_MEMORY * turns / 2 / 1e9)
        nodes_for = {
            "processors": math.ceil(rate * (agent_s + gateway_s) / self.cores / BUSY),
            "memory": math.ceil(memory / self.memory_gb / BUSY),
        }
        nodes = max(nodes_for.values())
        return Needs(
            sessions_per_hour=rate * 3600,
            session_s=session_s,
            open_sessions=at_once,
            busy=min(1.0, self.sessions / at_once),
            kv_tokens=at_once * (self.prompt + ids) // 2,
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


def plan(load: Workload, *, as_json: Json = False) -> None:
    """Say how many machines a run needs, and what will be the narrowest."""
    needs = load.compute()
    print_report(needs, lambda: _show(needs, load), as_json=as_json)


def _show(needs: Needs, load: Workload) -> None:
    binds = max(needs.nodes_for, key=lambda name: needs.nodes_for[name])
    lines = {
        "sessions": f"{needs.sessions_per_hour:,.0f} an hour keep the engines busy:"
        f" {needs.open_sessions:,} at once, {needs.session_s:,.0f} s each",
        "engines": f"{needs.kv_tokens:,} tokens of context, if all of it is to stay in their cache",
        "nodes": f"{needs.nodes} of {load.cores} processors and {load.memory_gb} GB,"
        f" --slots {needs.slots}; {binds} decide: {format_counts(needs.nodes_for)}",
        "processors": f"{needs.agent_cores:.1f} for agents, tools and evaluations,"
        f" {needs.gateway_cores:.1f} for gateways (`gateway.workers`)",
        "memory": f"{needs.memory_gb:,.0f} GB",
        "servers": f"{needs.servers}; {needs.server_cores:.2f} processors, PostgreSQL's included",
        "disk": f"{needs.disk_gb_per_day:,.1f} GB of recordings a day, as much again on the server",
    }
    if needs.busy < 1:
        lines["too few"] = (
            f"{load.sessions} sessions a step keep {needs.busy:.0%} of the engines busy"
        )
    for name, text in lines.items():
        print_text(f"{name:<12}{text}")

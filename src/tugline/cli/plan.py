"""``tugline plan``: machines that a run needs.

A plan follows docs/deploy.md, with constants of the benchmarks, which were measured on one kind of
processor: it is an estimate that shows the bottlenecks.
"""

import math
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


class Agent(NamedTuple):
    """Cost of an agent program on its machine."""

    start_s: float
    """CPU time of a start."""
    turn_s: float
    """CPU time of a model call and its tool."""
    memory_mb: int
    """Memory of its largest process."""


AGENTS = decode(read_values(Path(__file__).with_name("plan_agents.toml")), dict[str, Agent])
"""Measured with a scripted model, 2 and 22 calls of the shell (versions of docs/harnesses.md)."""

CALL_S = 0.0016
"""CPU time of a gateway per call."""
TURN_S = 0.0000068
"""CPU time that each earlier turn adds to a call."""
TOKEN_S = 0.000043
"""CPU time of a gateway per streamed token."""
SESSION_S = 0.05
"""CPU time of a node for the rest of a session, including a bubblewrap sandbox."""
SERVER_S = 0.0025
"""CPU time of a session on the server."""
DATABASE_S = 0.0011
"""CPU time of a session in PostgreSQL."""
CALL_MEMORY = 12_000
"""Bytes of memory per call of an open session."""
ID_BYTES = 1.5
"""Bytes of a recording per id."""
SAMPLED_BYTES = 7.0
"""Bytes that each sampled id adds."""
BUSY = 0.7
"""Target utilisation of cores and memory."""


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements of a run."""

    sessions_per_hour: float
    """Sessions that keep the engines busy."""
    session_s: float
    open_sessions: int
    """Concurrent sessions: slots of all nodes."""
    busy: float
    """Share of the engines that the sessions of a step keep busy."""
    kv_tokens: int
    """Cached tokens of the engines if the contexts of all open sessions stay in the cache."""
    nodes: int
    slots: int
    """Slots per node."""
    nodes_for: dict[str, int]
    """Nodes needed by each resource; the largest number decides."""
    agent_cores: float
    gateway_cores: float
    memory_gb: float
    """Memory of agents and gateways."""
    servers: int
    server_cores: float
    """Cores of servers and database."""
    disk_gb_per_day: float
    """Size of recordings."""


Above = Annotated[float, Parameter(validator=Number(gt=0))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sessions of a run, and machines for its agents."""

    gpus: Count
    """GPUs of the engines."""
    model_tps: Above
    """Tokens per second that each GPU samples with a full batch."""
    harness: str = "claude_code"
    """Harness preset, which determines the cost of an agent."""
    sessions: Count = 512
    """Sessions of a step, and of later steps that run at the same time."""
    turns: Count = 30
    """Model calls per session."""
    turn_tokens: Count = 300
    """Tokens sampled per model call."""
    result_tokens: Count = 500
    """Tokens of a tool's result."""
    prompt: Count = 15_000
    """Tokens of the first prompt."""
    token_ms: Above = 20.0
    """Time per sampled token of a session."""
    tool_s: NotNegative = 2.0
    """Time in tools per turn."""
    tool_cpu_s: NotNegative = 0.5
    """CPU time in tools per turn."""
    eval_s: NotNegative = 30.0
    """Time, and CPU time, of an evaluation."""
    cores: Count = 64
    """Processors of a node's machine."""
    memory_gb: Count = 256
    """Memory of a node's machine."""

    def compute(self) -> Needs:
        """Estimate the requirements. Raises `UsageError` for a harness without measurements."""
        if self.harness not in AGENTS:
            raise UsageError(f"--harness is {self.harness!r}, must be one of {', '.join(AGENTS)}")
        agent = AGENTS[self.harness]
        turns = self.turns
        sampled = self.turns * self.turn_tokens
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


def plan(workload: Workload, *, as_json: Json = False) -> None:
    """Estimate the machines that a run needs, and its bottlenecks."""
    needs = workload.compute()
    print_report(needs, lambda: _show(needs, workload), as_json=as_json)


def _show(needs: Needs, workload: Workload) -> None:
    limiting = max(needs.nodes_for, key=lambda name: needs.nodes_for[name])
    lines = {
        "sessions": f"{needs.sessions_per_hour:,.0f} per hour keep the engines busy:"
        f" {needs.open_sessions:,} concurrently, {needs.session_s:,.0f} s each",
        "engines": f"{needs.kv_tokens:,} tokens of KV cache hold the contexts of all open sessions",
        "nodes": f"{needs.nodes} of {workload.cores} processors and {workload.memory_gb} GB,"
        f" --slots {needs.slots}; the bottleneck is {limiting}: {format_counts(needs.nodes_for)}",
        "processors": f"{needs.agent_cores:.1f} for agents, tools and evaluations,"
        f" {needs.gateway_cores:.1f} for gateways (`node.processes`)",
        "memory": f"{needs.memory_gb:,.0f} GB",
        "servers": f"{needs.servers}; {needs.server_cores:.2f} processors, including PostgreSQL",
        "disk": f"{needs.disk_gb_per_day:,.1f} GB of recordings per day, and as much on the server",
    }
    if needs.busy < 1:
        lines["too few"] = (
            f"{workload.sessions} sessions a step keep {needs.busy:.0%} of the engines busy"
        )
    for name, text in lines.items():
        print_text(f"{name:<12}{text}")

"""``tugline plan``: machines that a run needs, and with a training file, the GPUs.

The machines follow docs/deploy.md, with constants of the benchmarks, which were measured on one
kind of processor; the GPUs follow docs/training.md. Both are estimates that show the bottlenecks.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from tugline.cli.key_values import parse_options
from tugline.cli.options import DEMO_MODEL, Changes, Count, Json, NotNegative
from tugline.cli.output import format_counts, print_report, print_text
from tugline.cli.training_run import name_missing_extra
from tugline.errors import UsageError
from tugline.schema import decode, read_values
from tugline.trainers.config import TrainConfig, read_config


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
_HARNESS = "claude_code"
_SESSIONS = 512
_EMBEDDED_SHARE = 0.4
"""Share of a GPU's memory for an engine in the process of the trainer."""


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

    gpus: Count | None = None
    """GPUs of the engines (with FILE: by default one for each of its engines)."""
    model_tps: Above | None = None
    """Tokens per second that each GPU samples with a full batch (with FILE: estimated by
    default)."""
    harness: str | None = None
    """Harness preset, which determines the cost of an agent (default: that of FILE, else
    claude_code)."""
    sessions: Count | None = None
    """Sessions of a step, and of later steps that run at the same time (default: those of FILE,
    else 512)."""
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

    @property
    def sampled(self) -> int:
        """Sampled tokens of a session."""
        return self.turns * self.turn_tokens

    @property
    def ids(self) -> int:
        """Tokens of a session's last context, answer included."""
        return self.prompt + self.sampled + self.turns * self.result_tokens

    @property
    def recording(self) -> float:
        """Bytes of a session's recording."""
        return self.ids * ID_BYTES + self.sampled * SAMPLED_BYTES

    def find_agent(self) -> Agent:
        """Return the cost of the agent. Raises `UsageError` for a harness without measurements."""
        name = self.harness or _HARNESS
        if name not in AGENTS:
            raise UsageError(f"--harness is {name!r}, must be one of {', '.join(AGENTS)}")
        return AGENTS[name]

    def count_other_s(self) -> float:
        """Return the seconds in which a session samples nothing."""
        agent = self.find_agent()
        own_s = agent.start_s + self.turns * agent.turn_s
        return own_s + self.turns * self.tool_s + self.eval_s

    def compute(self) -> Needs:
        """Estimate the requirements. Raises `UsageError` for a missing or unknown value."""
        agent = self.find_agent()
        for name, value in (("--gpus", self.gpus), ("--model-tps", self.model_tps)):
            if value is None:
                raise UsageError(f"{name} is missing; give it, or the file of a training")
        assert self.gpus is not None and self.model_tps is not None  # noqa: PT018, S101 - checked
        turns = self.turns
        sampled = self.sampled
        ids = self.ids
        rate = self.gpus * self.model_tps / sampled
        own_s = agent.start_s + turns * agent.turn_s
        session_s = sampled * self.token_ms / 1000 + self.count_other_s()
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
            busy=min(1.0, (self.sessions or _SESSIONS) / at_once),
            kv_tokens=at_once * (self.prompt + ids) // 2,
            nodes=nodes,
            slots=math.ceil(at_once / nodes),
            nodes_for=nodes_for,
            agent_cores=rate * agent_s,
            gateway_cores=rate * gateway_s,
            memory_gb=memory,
            servers=math.ceil(rate * SERVER_S / BUSY),
            server_cores=rate * (SERVER_S + DATABASE_S),
            disk_gb_per_day=rate * 86400 * self.recording / 1e9,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingGpus:
    """GPUs of a training; these options need FILE."""

    ranks: Count = 1
    """Processes of torchrun, each with a GPU."""
    gpu_memory: Above = 80.0
    """Memory of a GPU in GiB."""
    engine_share: Annotated[float, Parameter(validator=Number(gt=0, lt=1))] | None = None
    """Share of the memory of the trainer's GPUs for engines on them (default: engines have GPUs of
    their own)."""
    engine_gpus: Count = 1
    """GPUs of each engine (tensor parallelism)."""
    longest: Count | None = None
    """Tokens of the longest trace (default: the context window of FILE, else a session)."""
    price: Above | None = None
    """Price of a GPU for an hour (default: prices.gpu_hour of FILE)."""


def plan(
    config: Path | None = None,
    /,
    *,
    workload: Workload | None = None,
    training: TrainingGpus | None = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Estimate the machines and GPUs that a run needs, and its bottlenecks.

    Args:
        config: YAML or TOML file of `tugline train`, to plan its GPUs, time and cost as well.
    """
    load = workload or Workload()
    gpus = training or TrainingGpus()
    if config is None:
        if changes or training:
            given = f"--set {changes[0]}" if changes else "an option of a training's GPUs"
            raise UsageError(f"{given} requires the file of a training")
        needs = load.compute()
        print_report(needs, lambda: _show(needs, load), as_json=as_json)
        return
    with name_missing_extra("train"):
        from tugline.trainers.plan import text  # noqa: PLC0415 - needs the extra

        settings = read_config(config, DEMO_MODEL, changes=parse_options(changes, "--set"))
        planned, load = _plan_training(settings, load, gpus)
    needs = load.compute()

    def show() -> None:
        for subject, sentence in text.describe_plan(planned):
            print_text(f"{subject:<12}{sentence}")
        print_text("")
        _show(needs, load)

    print_report(
        {"training": planned, "agents": needs}, show, as_json=as_json, failed=not planned.fits
    )


def _plan_training(
    settings: TrainConfig, load: Workload, gpus: TrainingGpus
) -> tuple[Any, Workload]:
    """Return the plan of a training, and the workload of its sessions at the planned rate."""
    from tugline.trainers.plan import estimate, run  # noqa: PLC0415 - needs the extra

    load = _complete(load, settings, gpus.engine_gpus)
    serving = load.gpus or gpus.engine_gpus
    # without the URL of an engine, it runs in the process of the trainer, on its GPU
    share = gpus.engine_share or (None if settings.engine.urls else _EMBEDDED_SHARE)
    layout = estimate.Layout(
        ranks=gpus.ranks,
        engines=max(1, serving // gpus.engine_gpus),
        engine_gpus=gpus.engine_gpus,
        share=share,
        gpu_memory=int(gpus.gpu_memory * 2**30),
        price=gpus.price or settings.prices.gpu_hour or None,
    )
    session = estimate.Session(
        tokens=load.ids,
        sampled=load.sampled,
        other_s=load.count_other_s(),
        recording=load.recording,
        longest=gpus.longest,
        rate=load.model_tps,
    )
    planned = run.plan_training(settings, layout, session)
    rate = planned.tokens["sampled"] / planned.seconds["sampling"] / serving
    return planned, replace(load, model_tps=load.model_tps or rate)


def _complete(workload: Workload, settings: TrainConfig, engine_gpus: int) -> Workload:
    """Return the workload with what is not given taken from a training file."""
    harness = settings.template.get("harness", {}).get("name")
    schedule = settings.schedule
    return replace(
        workload,
        gpus=workload.gpus or engine_gpus * max(1, len(settings.engine.urls)),
        harness=workload.harness or (harness if harness in AGENTS else None),
        sessions=workload.sessions
        or schedule.tasks_per_step * schedule.samples * (1 + schedule.staleness),
    )


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
        sessions = workload.sessions or _SESSIONS
        lines["too few"] = f"{sessions} sessions a step keep {needs.busy:.0%} of the engines busy"
    for name, text in lines.items():
        print_text(f"{name:<12}{text}")

"""Failures: where a session failed, why, and what follows from it (I5)."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Boundary(StrEnum):
    """The component that failed; decides about retries and whether the policy is charged."""

    ENGINE = "engine"
    HARNESS = "harness"
    AGENT = "agent"
    RUNTIME = "runtime"
    EVALUATOR = "evaluator"
    INFRASTRUCTURE = "infrastructure"


RETRIES: dict[Boundary, int | None] = {
    Boundary.INFRASTRUCTURE: None,
    Boundary.RUNTIME: None,
    Boundary.HARNESS: 1,
    Boundary.ENGINE: 0,
    Boundary.AGENT: 0,
    Boundary.EVALUATOR: 0,
}
"""Attempts to repeat after a failure at each boundary; None: as many as the task allows."""


class Cause(StrEnum):
    """Specific cause of a failure; `HANDLING` defines its consequences."""

    SANDBOX = "sandbox"
    """The sandbox of the agent or the evaluator could not be created, or was lost."""
    NETWORK = "network"
    """The sandbox could not be connected to the gateway or to an allowed host."""
    IMAGE = "image"
    """A container image is missing, cannot be pulled, or its Dockerfile is broken."""
    WORKSPACE = "workspace"
    """A repository, commit or folder that the task starts from is not available."""
    DISK = "disk"
    """The node's disk is full."""
    NODE = "node"
    """The node was lost, or failed unexpectedly."""
    INIT_TIMEOUT = "init_timeout"
    """`Limits.init_s` expired before the agent could start."""
    WAIT_TIMEOUT = "wait_timeout"
    """`Limits.total_s` expired while the session waited, or while its traces were built."""
    ENGINE = "engine"
    """The model server failed, or refused the harness's request."""
    INSTALL = "install"
    """The agent program cannot be installed or configured."""
    CRASH = "crash"
    """The agent program crashed, according to its output and its recorded calls."""
    AGENT_TIMEOUT = "agent_timeout"
    """`Limits.agent_s` expired; recorded calls are built into traces and the work is evaluated."""
    TOTAL_TIMEOUT = "total_timeout"
    """`Limits.total_s` expired while the agent ran; recorded calls are built into traces."""
    AGENT_MEMORY = "agent_memory"
    """The agent's programs exceeded the sandbox's memory."""
    AGENT_DISK = "agent_disk"
    """The agent's programs exceeded the sandbox's disk."""
    EVALUATOR = "evaluator"
    """The evaluator failed, twice."""
    EVAL_TIMEOUT = "eval_timeout"
    """`Limits.eval_s` expired without a verdict, twice."""
    TASK = "task"
    """The task is invalid: no node can run it."""


class Handling(msgspec.Struct, frozen=True):
    """Consequences of one cause of failure."""

    boundary: Boundary
    """Boundary at which such a failure is reported."""
    retries: int | None
    """Attempts to repeat; None: as many as `Group.attempts` allows."""
    elsewhere: bool = False
    """Whether it is retried on another node, where there is one."""
    evaluated: bool = False
    """Whether the session counts for the policy: evaluated and trained on; else masked."""


HANDLING: dict[Cause, Handling] = {
    Cause.SANDBOX: Handling(Boundary.RUNTIME, None, elsewhere=True),
    Cause.NETWORK: Handling(Boundary.RUNTIME, None, elsewhere=True),
    Cause.IMAGE: Handling(Boundary.RUNTIME, 1, elsewhere=True),
    Cause.WORKSPACE: Handling(Boundary.RUNTIME, 1, elsewhere=True),
    Cause.DISK: Handling(Boundary.INFRASTRUCTURE, None, elsewhere=True),
    Cause.NODE: Handling(Boundary.INFRASTRUCTURE, None, elsewhere=True),
    Cause.INIT_TIMEOUT: Handling(Boundary.INFRASTRUCTURE, None, elsewhere=True),
    Cause.WAIT_TIMEOUT: Handling(Boundary.INFRASTRUCTURE, None),
    Cause.ENGINE: Handling(Boundary.ENGINE, 0),
    Cause.INSTALL: Handling(Boundary.HARNESS, 1, elsewhere=True),
    Cause.CRASH: Handling(Boundary.HARNESS, 1),
    Cause.AGENT_TIMEOUT: Handling(Boundary.AGENT, 0, evaluated=True),
    Cause.TOTAL_TIMEOUT: Handling(Boundary.AGENT, 0),
    Cause.AGENT_MEMORY: Handling(Boundary.AGENT, 0, evaluated=True),
    Cause.AGENT_DISK: Handling(Boundary.AGENT, 0, evaluated=True),
    Cause.EVALUATOR: Handling(Boundary.EVALUATOR, 0),
    Cause.EVAL_TIMEOUT: Handling(Boundary.EVALUATOR, 0),
    Cause.TASK: Handling(Boundary.RUNTIME, 0),
}
"""One row per cause. An evaluation is repeated once by itself before it counts as failed."""


class Failure(msgspec.Struct, frozen=True):
    """Why a session did not complete."""

    boundary: Boundary
    message: str
    cause: Cause | None = None
    """None if the cause is not known more closely."""

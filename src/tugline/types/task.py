"""Tasks: problems to be attempted, as they are submitted."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class PluginSpec(msgspec.Struct, frozen=True):
    """A named plug-in (harness, runtime, evaluator or builder) with its options."""

    name: str
    """Built in, an entry point of an installed package, or ``module:Class``."""
    options: dict[str, Any] = {}
    """Arguments of its constructor; each plug-in documents its own."""


class Workspace(msgspec.Struct, frozen=True):
    """Initial content of the agent's folder, below `Task.files`.

    Paths are those of the node. Each session has a copy-on-write view; the source never changes.
    """

    image: str | None = None
    """Container image to run in; without `repo` and `folder`, also the source of the files."""
    build: str | None = None
    """In place of `image`: folder with a Dockerfile to build one from."""
    repo: str | None = None
    """Git repository: URL or path."""
    commit: str | None = None
    """What to check out of `repo`: a full hash, a tag or a branch. Without `repo`, of the image's
    own repository: a full hash in the history of its HEAD, or ``HEAD``. Later commits are removed.
    """
    folder: str | None = None
    """In place of `repo`: folder with the files."""
    path: str | None = None
    """Path of the files in the sandbox; None: the image's working directory, or ``/workspace``."""


class Limits(msgspec.Struct, frozen=True):
    """Budgets of one session. Times are seconds of one stage; None means no limit."""

    init_s: float = 60.0
    """Seconds to create the sandbox and start the harness, without its installation."""
    agent_s: float = 600.0
    """Seconds for the agent to work."""
    eval_s: float = 120.0
    """Seconds for the evaluation."""
    max_turns: int | None = None
    """Model calls a session may make."""
    max_sampled_tokens: int | None = None
    """Tokens a session may sample."""
    total_s: float | None = None
    """Seconds from INIT to the end of EVAL, including time spent waiting: a safety net."""
    calls_s: float | None = None
    """Seconds after the first model call during which further calls are accepted."""


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters. In a contract, None leaves the choice to the harness."""

    temperature: float | None = None
    """0 is greedy, 1 the model's own distribution."""
    top_p: float | None = None
    """1 disables it."""
    top_k: int | None = None
    """0 disables it."""
    max_tokens: int | None = None
    """Most tokens of one response."""
    seed: int | None = None
    """Seed of a session; each call derives its own from this and its number."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""


class Policy(StrEnum):
    """Handling of a request whose sampling parameters differ from the contract."""

    ENFORCE = "enforce"
    """Use the contract; record the request."""
    ALLOW = "allow"
    """Use the request, and the contract for what it leaves out."""
    REFUSE = "refuse"
    """Refuse the call, naming the field."""


class Stale(StrEnum):
    """Handling of a session that falls too many weight versions behind."""

    MARK = "mark"
    """Continue; the trace has the version of each token."""
    ABORT = "abort"
    """Stop and start again with the new weights, while attempts are left."""


class Group(msgspec.Struct, frozen=True):
    """Rules for the samples of a task as a group. None means no bound."""

    min_usable: int | None = None
    """Usable (evaluated) samples after which the remaining ones are cancelled."""
    deadline_s: float | None = None
    """Seconds from submission after which finished samples are released and others cancelled."""
    attempts: int = 3
    """Most attempts of a sample that infrastructure failures interrupt."""
    max_staleness: int | None = None
    """Weight versions that a session may fall behind after its start."""
    on_stale: Stale = Stale.MARK
    """Handling of a session that falls further behind."""


class Callback(msgspec.Struct, frozen=True):
    """Webhook for each result and for the release of the group; signed by the server."""

    url: str
    """``http://`` or ``https://``."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One problem, to be attempted `samples` times (the GRPO group)."""

    id: str
    """Chosen by the submitter; submitting the same task again has no effect."""
    instruction: str
    """Prompt for the agent."""
    harness: PluginSpec
    """The agent program."""
    evaluator: PluginSpec
    """Scores the result."""
    runtime: PluginSpec = PluginSpec("auto")
    """The sandbox it runs in."""
    workspace: Workspace = Workspace()
    """Repository, folder or image to start from."""
    builder: PluginSpec = PluginSpec("prefix_merging")
    """Turns its model calls into traces."""
    files: dict[str, str] = {}
    """Files written into the workspace: relative POSIX path to text."""
    samples: int = 1
    """Number of independent sessions."""
    limits: Limits = Limits()
    """Budgets of each session."""
    sampling: Sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0)
    """The sampling contract; a field that is None leaves the choice to the harness."""
    sampling_policy: Policy = Policy.ENFORCE
    """Handling of requests with other sampling parameters."""
    tenant: str = "default"
    """Account for scheduling: tenants share the nodes by their weights."""
    priority: int = 0
    """-10 to 10: each step moves a task one minute ahead in its tenant's queue."""
    group: Group = Group()
    """When the group is released, and what happens to its remaining samples."""
    callback: Callback | None = None
    """Webhook for results; without one they are read from the server."""
    tags: dict[str, str] = {}
    """User-defined labels to find tasks by; stored with their results."""

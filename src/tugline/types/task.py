"""Tasks: problems for agents, in the form in which they are submitted."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

_WEEK_S = 7 * 86_400
BIG = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly."""
INT32 = 2**31 - 1
Seconds = Annotated[float, Meta(gt=0, le=_WEEK_S)]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Label = dict[
    Annotated[str, Meta(min_length=1, max_length=128)], Annotated[str, Meta(max_length=1024)]
]
Labels = Annotated[Label, Meta(max_length=64)]
HELD_OUT = "held_out"
"""Tag of tasks whose sessions evaluate a trained model, and are not for training."""
INSTANCE = "instance"
"""Tag with the name of an instance."""
_STEP = re.compile(r"^(.*-)?(g\d{7}|eval\d{6})-")
"""Beginning of a task's id in a training run, which is another one in every step."""
_EVALUATION = re.compile(r"^(.*-)?eval\d{6}-")
Tenant = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]

# Bounds of sampling parameters, in tasks, requests of clients, and recordings.
Temperature = Annotated[float, Meta(ge=0, le=10)]
MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0; below it float32 logits overflow, and engines refuse or raise it."""
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=0, le=INT32)]
MinP = Annotated[float, Meta(ge=0, le=1)]
MaxTokens = Annotated[int, Meta(ge=1, le=INT32)]
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class PluginSpec(msgspec.Struct, frozen=True):
    """A named plug-in (harness, runtime, evaluator or builder) with its options."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """Built in, an entry point of an installed package, or ``module:Class``."""
    options: dict[str, Any] = {}
    """Arguments of its constructor; each plug-in documents its own."""


class Workspace(msgspec.Struct, frozen=True):
    """Initial content of the agent's folder, below `Task.files`.

    Paths are those of the node. Each session has a copy-on-write view; the source never changes.
    """

    image: Path | None = None
    """Container image to run in; without `repo` and `folder`, also the source of the files."""
    build: Path | None = None
    """In place of `image`: folder with a Dockerfile to build one from."""
    repo: Path | None = None
    """Git repository: URL or path."""
    commit: Path | None = None
    """Commit of `repo`: a full hash, a tag or a branch. Without `repo`, of the image's
    own repository: a full hash in the history of its HEAD, or ``HEAD``. Later commits are removed.
    """
    folder: Path | None = None
    """In place of `repo`: folder with the files."""
    path: Path | None = None
    """Path of the files in the sandbox; None: the image's working directory, or ``/workspace``."""

    @property
    def has_base(self) -> bool:
        """Whether there are files besides `Task.files`."""
        return any((self.image, self.build, self.repo, self.folder))


class Limits(msgspec.Struct, frozen=True):
    """Budgets of one session. Times are seconds of one stage; None means no limit."""

    init_s: Seconds = 60.0
    """Seconds to create the sandbox and start the harness, without its installation."""
    agent_s: Seconds = 600.0
    """Seconds for the agent to work."""
    eval_s: Seconds = 120.0
    """Seconds for the evaluation."""
    max_turns: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Model calls a session may make."""
    max_sampled_tokens: Count | None = None
    """Tokens a session may sample."""
    total_s: Annotated[float, Meta(gt=0, le=4 * _WEEK_S)] | None = None
    """Seconds from INIT to the end of EVAL, with waiting and without installing: a safety net."""
    calls_s: Seconds | None = None
    """Seconds after the first model call during which further calls are accepted."""


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """Sampling parameters. In a contract, None leaves the choice to the harness."""

    temperature: Temperature | None = None
    """0 is greedy, 1 the model's own distribution."""
    top_p: TopP | None = None
    """1 disables it."""
    top_k: TopK | None = None
    """0 disables it."""
    max_tokens: MaxTokens | None = None
    """Maximum number of tokens of one response."""
    seed: Annotated[int, Meta(ge=0, le=BIG)] | None = None
    """Seed of a session; each call derives its own from this and its number."""
    stop: Annotated[tuple[_Stop, ...], Meta(max_length=MAX_STOPS)] = ()
    """Strings that end a response."""
    min_p: MinP | None = None
    """Least probability of a token, relative to the likeliest one's; 0 disables it."""


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

    min_usable: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """Usable (evaluated) samples after which the remaining ones are cancelled. This prefers fast
    samples: the mean reward is biased if failing takes longer than solving, or less long."""
    deadline_s: Annotated[float, Meta(gt=0, le=52 * _WEEK_S)] | None = None
    """Seconds from submission after which finished samples are released and others cancelled."""
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Maximum number of attempts of a sample that stale weights interrupt. Infrastructure failures
    spend none, but a sample is tried this often before it may end with such a failure."""
    retry_s: Annotated[float, Meta(ge=0, le=52 * _WEEK_S)] = 3600.0
    """Seconds from a sample's first infrastructure failure during which the sample is retried."""
    max_staleness: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    """Weight versions that a session may fall behind after its start."""
    on_stale: Stale = Stale.MARK
    """Handling of a session that falls further behind."""


class Callback(msgspec.Struct, frozen=True):
    """Webhook for each result and for the release of the group; signed by the server."""

    url: str
    """``http://`` or ``https://``."""


class RecordingRef(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded session that is judged again, and by what."""

    session: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,160}$")]
    epoch: Annotated[int, Meta(ge=0, le=INT32)]
    """Epoch of the recording."""
    node: Annotated[str, Meta(min_length=1, max_length=100)]
    """Name of the node that has the recording."""
    digest: Annotated[str, Meta(min_length=1, max_length=64)]
    """Digest of the evaluator."""
    round: Annotated[int, Meta(ge=1, le=10)] = 1
    """2 for the second verdict of the same evaluator."""


SERVER_FIELDS = frozenset({"judges"})
"""Fields of a task that only a server sets."""


class MalformedCalls(StrEnum):
    """How a tool call that cannot be parsed is delivered to the harness."""

    TEXT = "text"
    """As the text it was written as."""
    RAW = "raw"
    """As a call with the sampled argument text, if it names a declared tool; else as text."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A problem to be attempted `samples` times (the GRPO group)."""

    id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
    """Chosen by the submitter; submitting the same task again has no effect."""
    instruction: Annotated[str, Meta(max_length=4 << 20)]
    """Prompt for the agent."""
    harness: PluginSpec
    """Agent program."""
    evaluator: PluginSpec
    """Evaluator that scores the result."""
    runtime: PluginSpec = PluginSpec("auto")
    """Runtime that creates the sandbox."""
    workspace: Workspace = Workspace()
    """Repository, folder or image to start from."""
    builder: PluginSpec = PluginSpec("prefix_merging")
    """Builder that converts model calls to traces."""
    files: dict[str, str] = {}
    """Files written into the workspace: relative POSIX path to text."""
    samples: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Number of independent sessions."""
    limits: Limits = Limits()
    """Budgets of each session."""
    sampling: Sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    """The sampling contract; a field that is None leaves the choice to the harness."""
    sampling_policy: Policy = Policy.ENFORCE
    """Handling of requests with other sampling parameters."""
    malformed: MalformedCalls = MalformedCalls.RAW
    """How a tool call that cannot be parsed is delivered to the harness, in exact mode."""
    tenant: Tenant = "default"
    """Account for scheduling: tenants share the nodes by their weights."""
    priority: Annotated[int, Meta(ge=-10, le=10)] = 0
    """-10 to 10: each step moves a task one minute ahead in its tenant's queue."""
    group: Group = Group()
    """Rules for the release of the group and for its remaining samples."""
    callback: Callback | None = None
    """Webhook for results; without one they are read from the server."""
    tags: Labels = {}
    """User-defined labels to find tasks by; stored with their results."""
    judges: RecordingRef | None = None
    """Recorded session that is judged in place of running an agent; only the server sets it."""


def name_problem(task: str, tags: Mapping[str, str]) -> str:
    """Return the name that all submissions of a task share, from its id and tags."""
    return tags.get(INSTANCE) or _STEP.sub("", task)


def is_held_out(task: str, tags: Mapping[str, str]) -> bool:
    """Whether the sessions of a task evaluate a trained model, and are not for training."""
    return HELD_OUT in tags or _EVALUATION.search(task) is not None

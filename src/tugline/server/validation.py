"""Validation of tasks, nodes and results before anything is stored.

The types say what a value is; this says what is sensible, so that a mistake is an error at
submission that names the field, its value and what would be right, never a session that fails an
hour later.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import PurePosixPath
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit

import msgspec
import zstandard

from tugline.errors import ConfigError, Invalid, UsageError
from tugline.plugins import pack_options
from tugline.protocol import NodeRegistration
from tugline.protocol.nodes import BIG
from tugline.server.store.groups import End
from tugline.server.store.tasks import Packed, pack
from tugline.types import TERMINAL, PluginSpec, Status, Task, Trajectory, Workspace, decode

ID = r"[A-Za-z0-9._-]{1,128}"
TENANT = r"[A-Za-z0-9._-]{1,64}"
WEEK_S = 7 * 86400.0
MAX_TEXT = 4 << 20
"""Characters of an instruction, and bytes of a plug-in's options."""
MAX_FILES = 10_000
MAX_FILE_BYTES = 32 << 20
"""Of all files of a task together."""
MAX_TAGS = 64


class Bound(NamedTuple):
    """A number's range."""

    field: str
    low: float
    high: float
    above: bool = False
    """Whether `low` itself is too low."""

    @property
    def must(self) -> str:
        """In words."""
        if self.above:
            return f"more than {self.low:g} and at most {self.high:,.15g}"
        return f"from {self.low:g} to {self.high:,.15g}"

    def holds(self, value: float | None) -> bool:
        """Whether `value` is in range; None is no bound, and NaN never is."""
        if value is None:
            return True
        return (self.low < value if self.above else self.low <= value) and value <= self.high


BOUNDS = (
    Bound("samples", 1, 10_000),
    Bound("priority", -10, 10),
    Bound("limits.init_s", 0, WEEK_S, above=True),
    Bound("limits.agent_s", 0, WEEK_S, above=True),
    Bound("limits.eval_s", 0, WEEK_S, above=True),
    Bound("limits.total_s", 0, 4 * WEEK_S, above=True),
    Bound("limits.calls_s", 0, WEEK_S, above=True),
    Bound("limits.max_turns", 1, 1_000_000),
    Bound("limits.max_sampled_tokens", 1, 1_000_000_000),
    Bound("sampling.temperature", 0, 10),
    Bound("sampling.top_p", 0, 1, above=True),
    Bound("sampling.top_k", 0, 10_000_000),
    Bound("sampling.max_tokens", 1, 1_000_000_000),
    Bound("sampling.seed", 0, BIG),
    Bound("group.min_usable", 1, 10_000),
    Bound("group.deadline_s", 0, 52 * WEEK_S, above=True),
    Bound("group.attempts", 1, 100),
    Bound("group.max_staleness", 0, 1_000_000),
)
"""Of the numbers in a task."""
_TASK = tuple((bound, attrgetter(bound.field)) for bound in BOUNDS)

_ID = re.compile(ID)
_TENANT = re.compile(TENANT)

MAX_TRAJECTORY = 1 << 30
"""Bytes of an encoded trajectory before compression."""
_BATCH_IN_LOOP = 16
"""Tasks that are packed in the event loop; larger batches use a thread."""
_TRAJECTORY_IN_LOOP = 1 << 16
"""Bytes of a result that is decoded in the event loop; a larger one uses a thread."""

Check = Callable[[Task], None]
"""Raises `Invalid` or `UsageError` for a task that could not be run."""


# --------------------------------------------------------------------------- tasks
def check_task(task: Task) -> None:
    """Raises `Invalid` for the first field that cannot be right."""
    _check_pattern("id", task.id, _ID, "1 to 128 of A-Z a-z 0-9 . _ -")
    _check_pattern("tenant", task.tenant, _TENANT, "1 to 64 of A-Z a-z 0-9 . _ -")
    for bound, value_of in _TASK:
        _check_number(bound, value_of(task))
    _check_length("instruction", task.instruction, 0, MAX_TEXT)
    if not task.instruction.strip():
        _refuse("instruction", repr(task.instruction), "a text that says what to do")
    min_usable = task.group.min_usable
    if min_usable is not None and min_usable > task.samples:
        must = f"at most samples, which is {task.samples}"
        _refuse("group.min_usable", repr(min_usable), must)
    for name in ("harness", "evaluator", "runtime", "builder"):
        _check_plugin(name, getattr(task, name))
    if len(task.sampling.stop) > 64:
        _refuse("sampling.stop", f"{len(task.sampling.stop)} strings", "at most 64")
    for number, text in enumerate(task.sampling.stop):
        _check_length(f"sampling.stop.{number}", text, 1, 1024)
    _check_files(task.files)
    _check_workspace(task.workspace)
    _check_tags(task.tags)
    if task.callback is not None:
        _check_callback(task.callback.url)


def _check_plugin(field: str, part: PluginSpec) -> None:
    _check_length(f"{field}.name", part.name, 1, 256)
    try:
        size = len(pack_options(f"{field}.options", part.options))
    except ConfigError as error:
        raise Invalid(str(error), field=f"{field}.options") from error
    if size > MAX_TEXT:
        _refuse(f"{field}.options", f"{size} bytes", f"at most {MAX_TEXT}")


def _check_files(files: dict[str, str]) -> None:
    if len(files) > MAX_FILES:
        _refuse("files", f"{len(files)} files", f"at most {MAX_FILES}")
    size = sum(map(len, files.values()))
    if size > MAX_FILE_BYTES:
        _refuse("files", f"{size} characters", f"at most {MAX_FILE_BYTES}")
    for name in files:
        parts = name.split("/")
        if len(name) > 1024 or "\0" in name or any(part in {"", ".", ".."} for part in parts):
            must = "a relative path with / between its parts, none of them empty, . or .."
            _refuse("files", repr(name), must)
        for folder in PurePosixPath(name).parents:
            if str(folder) in files:
                _refuse("files", repr(name), f"outside of {str(folder)!r}, which is a file")


def _check_workspace(workspace: Workspace) -> None:
    for name, value in msgspec.structs.asdict(workspace).items():
        if value is not None:
            _check_length(f"workspace.{name}", value, 1, 4096)
    for one, other in (("image", "build"), ("repo", "folder")):
        if getattr(workspace, one) is not None and getattr(workspace, other) is not None:
            _refuse(
                f"workspace.{other}", repr(getattr(workspace, other)), f"left out beside `{one}`"
            )
    if workspace.commit is not None and workspace.repo is None:
        _refuse("workspace.commit", repr(workspace.commit), "left out without `repo`")
    if workspace.path is not None and (
        not workspace.path.startswith("/") or ".." in workspace.path.split("/")
    ):
        _refuse("workspace.path", repr(workspace.path), "an absolute path without '..'")


def _check_tags(tags: dict[str, str]) -> None:
    if len(tags) > MAX_TAGS:
        _refuse("tags", f"{len(tags)} tags", f"at most {MAX_TAGS}")
    for name, value in tags.items():
        if not 1 <= len(name) <= 128 or "=" in name or "\0" in name:
            _refuse("tags", repr(name), "a name of 1 to 128 characters without =")
        if len(value) > 1024 or "\0" in value:
            _refuse(f"tags.{name}", repr(value), "at most 1024 characters")


def _check_callback(url: str) -> None:
    must = "an http:// or https:// URL of at most 2048 characters, without a user name"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # the port raises when it is none
    except ValueError:
        _refuse("callback.url", repr(url), must)
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= 2048
    if parts.scheme not in {"http", "https"} or not host or "@" in parts.netloc or not plain:
        _refuse("callback.url", repr(url), must)


async def pack_tasks(batch: Sequence[Task], check: Check) -> list[Packed]:
    """Check and encode tasks. Raises `Invalid`, with the number of the task in the field."""
    if len(batch) <= _BATCH_IN_LOOP:
        return _pack_tasks(batch, check)
    return await asyncio.to_thread(_pack_tasks, batch, check)


def _pack_tasks(batch: Sequence[Task], check: Check) -> list[Packed]:
    for n, task in enumerate(batch):
        try:
            _check_number(Bound("samples", 1, 10_000), task.samples)
            check(task)
        except Invalid as error:
            raise Invalid(str(error), field=f"{n}.{error.field}".rstrip(".")) from error
        except UsageError as error:
            raise Invalid(str(error), field=str(n)) from error
    return [pack(task) for task in batch]


# --------------------------------------------------------------------------- nodes and results
def check_registration(registration: NodeRegistration) -> None:
    """Hold a registration made in this process to the bounds of its type. Raises `Invalid`."""
    try:
        msgspec.convert(msgspec.to_builtins(registration), NodeRegistration)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].rstrip("`")
        raise Invalid(str(error), field=field) from error


async def read_end(session: str, epoch: int, data: bytes) -> End:
    """Outcome of a session, read from its encoded trajectory. Raises `Invalid`."""
    if len(data) <= _TRAJECTORY_IN_LOOP:
        return _read_end(session, epoch, data)
    return await asyncio.to_thread(_read_end, session, epoch, data)


def _read_end(session: str, epoch: int, data: bytes) -> End:
    trajectory = _decode_trajectory(data)
    status = trajectory.status
    if trajectory.session != session or status not in TERMINAL:
        msg = (
            f"a result of session {session} must name it and be final,"
            f" this one is {trajectory.session} {status}"
        )
        raise Invalid(msg, field="session" if status in TERMINAL else "status")
    digest = hashlib.sha256(data).hexdigest()
    failure = trajectory.failure
    if status is Status.FAILED and failure is None:
        msg = f"session {session} has failed, and its result does not say why"
        raise Invalid(msg, field="failure")
    return End(
        status=status,
        failure=failure,
        reward=trajectory.reward.value if trajectory.reward else None,
        sampled=trajectory.ledger.sampled,
        trained=trajectory.ledger.trained,
        bytes=len(data),
        seconds=trajectory.seconds,
        digest=digest,
        blob=f"{session}.{epoch}.{digest[:12]}",
    )


def _decode_trajectory(data: bytes) -> Trajectory:
    try:
        size = zstandard.frame_content_size(data)
        if size > MAX_TRAJECTORY:
            msg = f"a result has {size} bytes, {MAX_TRAJECTORY} are taken"
            raise Invalid(msg)
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_TRAJECTORY)
        return decode(plain, Trajectory)
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        msg = f"not a trajectory, encoded and compressed with zstd: {error}"
        raise Invalid(msg) from error


# --------------------------------------------------------------------------- errors
def _check_number(bound: Bound, value: float | None) -> None:
    if not bound.holds(value):
        _refuse(bound.field, repr(value), bound.must)


def _check_pattern(field: str, value: str, pattern: re.Pattern[str], must: str) -> None:
    if not pattern.fullmatch(value):
        _refuse(field, repr(value), must)


def _check_length(field: str, value: str, low: int, high: int) -> None:
    if not low <= len(value) <= high:
        _refuse(field, f"{len(value)} characters long", f"{low} to {high:,}")
    if "\0" in value:
        _refuse(field, repr(value), "without zero bytes")


def _refuse(field: str, shown: str, must: str) -> NoReturn:
    text = shown if len(shown) <= 80 else f"{shown[:60]}..."
    msg = f"{field} is {text}, must be {must}"
    raise Invalid(msg, field=field)

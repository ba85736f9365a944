"""Validation of tasks, nodes and results before anything is stored.

The types say what a value is; this says what is sensible, so that a mistake is an error at
submission that names the field, its value and what would be right, never a session that fails an
hour later.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec
import zstandard

from tugline.errors import ConfigError, Invalid, UsageError
from tugline.plugins import pack_options
from tugline.schema import decode as decode_strictly
from tugline.server.store.results import End
from tugline.server.store.tasks import Packed, pack
from tugline.types import TERMINAL, Status, Task, Trajectory, Workspace, decode

MAX_TEXT = 4 << 20
"""Bytes of a plug-in's options."""
MAX_FILES = 10_000
MAX_FILE_BYTES = 32 << 20
"""Of all files of a task together."""
MAX_TRAJECTORY = 1 << 30
"""Bytes of an encoded trajectory before compression."""
_BATCH_IN_LOOP = 16
"""Tasks that are packed in the event loop; larger batches use a thread."""
_IN_LOOP = 1 << 16
"""Bytes of a result that is read in the event loop; a larger one uses a thread."""

T = TypeVar("T")
Check = Callable[[Task], None]
"""Raises `Invalid` or `UsageError` for a task that could not be run."""


# --------------------------------------------------------------------------- tasks
def check_task(task: Task) -> None:
    """Raises `Invalid` for the first field that cannot be right."""
    for name in ("harness", "evaluator", "runtime", "builder"):
        _check_options(f"{name}.options", getattr(task, name).options)
    check_bounds(task)
    if not task.instruction.strip():
        _refuse("instruction", repr(task.instruction), "a text that says what to do")
    min_usable = task.group.min_usable
    if min_usable is not None and min_usable > task.samples:
        _refuse("group.min_usable", repr(min_usable), f"at most samples, which is {task.samples}")
    _check_files(task.files)
    _check_workspace(task.workspace)
    for name in task.tags:
        if "=" in name:
            _refuse("tags", repr(name), "a name without =")
    if task.callback is not None:
        _check_callback(task.callback.url)


def check_bounds(value: msgspec.Struct) -> None:
    """Hold a struct made in this process to the bounds of its type. Raises `Invalid`."""
    try:
        decode_strictly(msgspec.to_builtins(value), type(value))
    except ConfigError as error:
        raise Invalid(str(error), field=error.field) from error


def _check_options(field: str, options: dict[str, Any]) -> None:
    try:
        size = len(pack_options(field, options))
    except ConfigError as error:
        raise Invalid(str(error), field=field) from error
    if size > MAX_TEXT:
        _refuse(field, f"{size} bytes", f"at most {MAX_TEXT}")


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
        if "\0" in (value or ""):
            _refuse(f"workspace.{name}", repr(value), "without zero bytes")
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
    return await _run(partial(_pack_tasks, batch, check), in_thread=len(batch) > _BATCH_IN_LOOP)


def _pack_tasks(batch: Sequence[Task], check: Check) -> list[Packed]:
    for n, task in enumerate(batch):
        try:
            check_bounds(task)
            check(task)
        except Invalid as error:
            raise Invalid(str(error), field=f"{n}.{error.field}".rstrip(".")) from error
        except UsageError as error:
            raise Invalid(str(error), field=str(n)) from error
    return [pack(task) for task in batch]


# --------------------------------------------------------------------------- nodes and results
async def compute_digest(data: bytes) -> str:
    """SHA-256 of an encoded trajectory, hex."""
    return await _run(lambda: hashlib.sha256(data).hexdigest(), in_thread=len(data) > _IN_LOOP)


async def read_end(session: str, epoch: int, data: bytes, digest: str) -> End:
    """Outcome of a session, read from its encoded trajectory. Raises `Invalid`."""
    read = partial(_read_end, session, epoch, data, digest)
    return await _run(read, in_thread=len(data) > _IN_LOOP)


def _read_end(session: str, epoch: int, data: bytes, digest: str) -> End:
    trajectory = decode_trajectory(data)
    status = trajectory.status
    if trajectory.session != session or status not in TERMINAL:
        msg = f"a result of {session} must name it and be final, not {trajectory.session} {status}"
        raise Invalid(msg, field="session" if status in TERMINAL else "status")
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


def decode_trajectory(data: bytes) -> Trajectory:
    """A trajectory from its compressed bytes. Raises `Invalid`, also for too large a one."""
    try:
        size = zstandard.frame_content_size(data)
        if size > MAX_TRAJECTORY:
            raise Invalid(f"a result has {size} bytes, {MAX_TRAJECTORY} are taken")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_TRAJECTORY)
        return decode(plain, Trajectory)
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise Invalid(f"not a trajectory, encoded and compressed with zstd: {error}") from error


async def _run(work: Callable[[], T], *, in_thread: bool) -> T:
    return await asyncio.to_thread(work) if in_thread else work()


# --------------------------------------------------------------------------- errors
def _refuse(field: str, value: str, must: str) -> NoReturn:
    text = value if len(value) <= 80 else f"{value[:60]}..."
    raise Invalid(f"{field} is {text}, must be {must}", field=field)

"""Validation of tasks, nodes and results before anything is stored.

Decoding checks types; this module checks values, so that a mistake is an error at submission, with
the field, its value and the accepted values, and not a session that fails an hour later.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zstandard

from tugline.errors import ConfigError, Invalid, UsageError
from tugline.plugins import pack_options
from tugline.sandbox.cache import find_contradictions
from tugline.schema import MAX_PROBLEMS, copy_fields
from tugline.schema import decode as decode_strictly
from tugline.server.store.results import End
from tugline.server.store.tasks import Packed, pack
from tugline.types import TERMINAL, Status, Task, Trajectory, decode

MAX_TEXT = 4 << 20
"""Maximum size of a plug-in's options in bytes."""
MAX_FILES = 10_000
MAX_FILE_BYTES = 32 << 20
"""Maximum total size of the files of a task."""
MAX_TRAJECTORY = 1 << 30
"""Maximum size of an encoded trajectory in bytes, before compression."""

Check = Callable[[Task], None]
"""Function that raises `Invalid` or `UsageError` for a task that cannot be run."""


# --------------------------------------------------------------------------- tasks
def check_task(task: Task) -> None:
    """Check the values of a task. Raises one `Invalid` with all invalid fields."""
    check_bounds(task)
    problems = list(_check_files(task.files))
    problems += [_wrong(*each) for each in find_contradictions(task.workspace)]
    for kind in ("harness", "evaluator", "runtime", "builder"):
        problems += _check_options(f"{kind}.options", getattr(task, kind).options)
    if not task.instruction.strip():
        problems.append(_wrong("instruction", task.instruction, "a non-empty text"))
    min_usable = task.group.min_usable
    if min_usable is not None and min_usable > task.samples:
        must = f"at most samples, which is {task.samples}"
        problems.append(_wrong("group.min_usable", min_usable, must))
    problems += [_wrong("tags", name, "a name without =") for name in task.tags if "=" in name]
    if task.callback is not None:
        problems += _check_callback(task.callback.url)
    if problems:
        raise Invalid.combine(problems[:MAX_PROBLEMS])


def check_bounds(value: msgspec.Struct) -> None:
    """Check a struct created in this process against the bounds of its type. Raises `Invalid`."""
    try:
        decode_strictly(msgspec.to_builtins(value), type(value))
    except ConfigError as error:
        raise Invalid.combine(
            [Invalid(str(each), field=each.field) for each in error.problems]
        ) from error


def _check_options(field: str, options: dict[str, Any]) -> Iterator[Invalid]:
    try:
        size = len(pack_options(field, options))
        if size > MAX_TEXT:
            yield _wrong(field, size, f"at most {MAX_TEXT} bytes")
    except ConfigError as error:
        yield Invalid(str(error), field=field)


def _check_files(files: dict[str, str]) -> Iterator[Invalid]:
    if len(files) > MAX_FILES:
        yield Invalid(f"files has {len(files)} entries; the limit is {MAX_FILES}", field="files")
        return
    size = sum(map(len, files.values()))
    if size > MAX_FILE_BYTES:
        yield Invalid(f"files hold {size} characters; the limit is {MAX_FILE_BYTES}", field="files")
    for name in files:
        parts = name.split("/")
        if len(name) > 1024 or "\0" in name or any(part in {"", ".", ".."} for part in parts):
            must = "a relative path with / between its parts, none of which is empty, . or .."
            yield _wrong("files", name, must)
        for folder in PurePosixPath(name).parents:
            if str(folder) in files:
                yield _wrong("files", name, f"outside of {str(folder)!r}, which is a file")


def _check_callback(url: str) -> Iterator[Invalid]:
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port  # raises for an invalid port
        sound = parts.scheme in {"http", "https"} and bool(host) and "@" not in parts.netloc
    except ValueError:
        sound = False
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= 2048
    if not (sound and plain):
        must = "an http:// or https:// URL of at most 2048 characters, without a user name"
        yield _wrong("callback.url", url, must)


def pack_tasks(batch: Sequence[Task], check: Check) -> list[Packed]:
    """Check and encode tasks. Raises `Invalid`, with the number of the task in the field."""
    problems: list[Invalid] = []
    for n, task in enumerate(batch):
        try:
            check_bounds(task)
            check(task)
        except (Invalid, UsageError) as error:
            for each in error.problems:
                field = f"{n}.{getattr(each, 'field', '')}".rstrip(".")
                problems.append(Invalid(str(each), field=field))
    if problems:
        raise Invalid.combine(problems[:MAX_PROBLEMS])
    return [pack(task) for task in batch]


# --------------------------------------------------------------------------- nodes and results
def compute_digest(data: bytes) -> str:
    """Return the SHA-256 of an encoded trajectory in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_end(session: str, epoch: int, data: bytes, digest: str) -> End:
    """Read the outcome of a session from its encoded trajectory. Raises `Invalid`."""
    trajectory = decode_trajectory(data)
    status = trajectory.status
    if trajectory.session != session or status not in TERMINAL:
        msg = f"the result is of {trajectory.session} and {status}, must be of {session} and final"
        raise Invalid(msg, field="session" if status in TERMINAL else "status")
    failure = trajectory.failure
    if status is Status.FAILED and failure is None:
        msg = "failure is null, but a failed session must have one"
        raise Invalid(msg, field="failure")
    reward = trajectory.reward.value if trajectory.reward else None
    blob = f"{session}.{epoch}.{digest[:12]}"
    stored = {"reward": reward, "bytes": len(data), "digest": digest, "blob": blob}
    verdict = trajectory.reward
    return copy_fields(End, trajectory, trajectory.ledger, verdict=verdict, **stored)


def decode_trajectory(data: bytes) -> Trajectory:
    """Decompress and decode a trajectory. Raises `Invalid`, also for one that is too large."""
    try:
        size = zstandard.frame_content_size(data)
        if size > MAX_TRAJECTORY:
            raise Invalid(f"the result has {size} bytes; the limit is {MAX_TRAJECTORY}")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_TRAJECTORY)
        return decode(plain, Trajectory)
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise Invalid(f"the body is not a trajectory compressed with zstd: {error}") from error


# --------------------------------------------------------------------------- errors
def _wrong(field: str, value: object, must: str) -> Invalid:
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:60]}..."
    return Invalid(f"{field} is {text}, must be {must}", field=field)

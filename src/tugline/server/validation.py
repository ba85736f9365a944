"""What comes in, checked before anything is kept: tasks, nodes and results."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence

import msgspec
import zstandard

from tugline.errors import Invalid, UsageError
from tugline.protocol import NodeRegistration
from tugline.server.store.groups import End
from tugline.server.store.tasks import Packed, pack
from tugline.types import TERMINAL, Status, Task, Trajectory, decode

LARGEST = 1 << 30
"""Bytes of an encoded trajectory before compression."""
_AT_ONCE = 16
_SMALL = 1 << 16
_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")

Check = Callable[[Task], None]
"""Raises `Invalid` or `UsageError` for a task that could not be run."""


async def packed(batch: Sequence[Task], check: Check) -> list[Packed]:
    """Tasks as they are kept. Raises `Invalid`, with the number of the task in the field."""
    if len(batch) <= _AT_ONCE:
        return _packed(batch, check)
    return await asyncio.to_thread(_packed, batch, check)


async def ended(session: str, epoch: int, data: bytes) -> End:
    """How a session ended, read from its encoded trajectory. Raises `Invalid`."""
    if len(data) <= _SMALL:
        return _ended(session, epoch, data)
    return await asyncio.to_thread(_ended, session, epoch, data)


def greet(hello: NodeRegistration) -> None:
    """Check what a node says of itself. Raises `Invalid`."""
    if not _NODE_NAME.fullmatch(hello.name):
        msg = f"name is {hello.name!r}, must be 1 to 100 letters, digits, '.', '_' or '-'"
        raise Invalid(msg, field="name")
    for field, value in (("slots", hello.slots), ("capacity", hello.capacity)):
        if value < 1:
            msg = f"{field} is {value}, must be 1 or more"
            raise Invalid(msg, field=field)


def _packed(batch: Sequence[Task], check: Check) -> list[Packed]:
    for n, task in enumerate(batch):
        try:
            _countable(task)
            check(task)
        except Invalid as error:
            raise Invalid(str(error), field=f"{n}.{error.field}".rstrip(".")) from error
        except UsageError as error:
            raise Invalid(str(error), field=str(n)) from error
    return [pack(task) for task in batch]


def _countable(task: Task) -> None:
    if task.samples < 1:
        msg = f"samples is {task.samples}, must be 1 or more"
        raise Invalid(msg, field="samples")


def _ended(session: str, epoch: int, data: bytes) -> End:
    trajectory = _trajectory(data)
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


def _trajectory(data: bytes) -> Trajectory:
    try:
        size = zstandard.frame_content_size(data)
        if size > LARGEST:
            msg = f"a result has {size} bytes, {LARGEST} are taken"
            raise Invalid(msg)
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=LARGEST)
        return decode(plain, Trajectory)
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        msg = f"not a trajectory, encoded and compressed with zstd: {error}"
        raise Invalid(msg) from error

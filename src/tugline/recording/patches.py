"""Store what agents changed beside the recordings: each patch once, in a file named by its digest.

A result names its patch by the digest.
"""

import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import zstandard

from tugline.atomic import write_file
from tugline.errors import CaptureError
from tugline.patch import format_patch, unpack_patch
from tugline.recording.folder import patch_name
from tugline.recording.records import Header
from tugline.types import Failure, Status


def save_patch(data: bytes, folder: Path) -> str:
    """Store a packed patch in `folder`, unless it is there; return its SHA-256 in hex.

    It is on disk when this returns. Raises `CaptureError` if it cannot be written. Blocks.
    """
    digest = hashlib.sha256(data).hexdigest()
    path = folder / patch_name(digest)
    try:
        if path.exists():
            os.utime(path)  # the oldest files are removed first, and this one is in use again
        else:
            draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
            write_file(path, zstandard.ZstdCompressor().compress(data), draft=draft)
    except OSError as error:
        raise CaptureError(f"cannot write patch {path}: {error.strerror}") from error
    return digest


def load_patch(recording: Path, digest: str) -> bytes:
    """Read the packed patch of a recording's result. Raises `CaptureError` for a wrong one."""
    path = recording.parent / patch_name(digest)
    try:
        data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    except OSError as error:
        raise CaptureError(f"cannot read patch {path}: {error.strerror}") from error
    except zstandard.ZstdError as error:
        raise CaptureError(f"{path} is damaged: {error}") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise CaptureError(f"{path} is damaged: its digest differs from its name")
    return data


class EndedSession(Protocol):
    """What a result tells about the end of its session."""

    @property
    def status(self) -> Status:
        """Final state."""

    @property
    def failure(self) -> Failure | None:
        """Why it failed."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by stage that was begun."""

    @property
    def patch(self) -> str:
        """Digest of the patch; empty without one."""


def read_diff(recording: Path, header: Header | None, result: EndedSession | None) -> str:
    """Return what the agent changed as a unified diff, or the reason why there is none.

    Of a task with a base, changed files are whole, as the agent left them.
    """
    if header is None or result is None or not result.patch:
        return f"# no patch is stored: {describe_no_patch(result)}\n"
    try:
        patch = unpack_patch(load_patch(recording, result.patch))
    except CaptureError as error:
        return f"# no patch is shown: {error}\n"
    if not patch.files and not patch.notes:
        return "# the agent changed nothing\n"
    whole = "# files of the workspace are shown whole, as the agent left them\n"
    prefix = whole if header.task.workspace.has_base else ""
    return prefix + format_patch(header.task.files, patch)


def refuse_result(result: EndedSession) -> str:
    """Return why a session with this result cannot be judged again; empty if it can."""
    if Status.EVAL.value not in result.seconds or result.status is Status.CANCELLED:
        reason = result.failure.message if result.failure else f"it was {result.status.value}"
        return f"it was not evaluated: {reason}"
    return "" if result.patch else describe_no_patch(result)


def describe_no_patch(result: EndedSession | None) -> str:
    """Return why a result names no patch."""
    if result is None:
        return "no result is recorded"
    if Status.EVAL.value in result.seconds:
        return "it was recorded by a version that stored no patches"
    return f"it {result.status.value} before its changes were collected"

"""What a task, and what a node says of itself, must be to be let in.

The types say what a value is; this says what is sensible, so that a mistake is an error at the
door that names the field, its value and what would be right, never a session that fails an hour
later. `BOUNDS` is also what the OpenAPI document tells of these fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import attrgetter
from pathlib import PurePosixPath
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit

import msgspec

from tugline.errors import ConfigError, Invalid
from tugline.plugins import pack_options
from tugline.protocol import (
    LEASE_WAIT_S,
    HeldSession,
    LeaseRequest,
    NodeRegistration,
    Pause,
    Release,
    Version,
)
from tugline.types import PluginSpec, Task, Workspace

ID = r"[A-Za-z0-9._-]{1,128}"
TENANT = r"[A-Za-z0-9._-]{1,64}"
WEEK_S = 7 * 86400.0
BIG = 2**53 - 1
"""The largest integer that every JSON reader keeps."""
MAX_TEXT = 4 << 20
"""Characters of an instruction, and bytes of a part's options."""
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
_SESSION = re.compile(r"[A-Za-z0-9._-]{1,160}")
_NODE = re.compile(r"[A-Za-z0-9._-]{1,100}")


# --------------------------------------------------------------------------- tasks
def check_task(task: Task) -> None:
    """Raises `Invalid` for the first field that cannot be right."""
    _matches("id", task.id, _ID, "1 to 128 of A-Z a-z 0-9 . _ -")
    _matches("tenant", task.tenant, _TENANT, "1 to 64 of A-Z a-z 0-9 . _ -")
    for bound, value_of in _TASK:
        _within(bound, value_of(task))
    _sized("instruction", task.instruction, 0, MAX_TEXT)
    if not task.instruction.strip():
        _refuse("instruction", repr(task.instruction), "a text that says what to do")
    enough = task.group.min_usable
    if enough is not None and enough > task.samples:
        must = f"at most samples, which is {task.samples}"
        _refuse("group.min_usable", repr(enough), must)
    for name in ("harness", "evaluator", "runtime", "builder"):
        _part(name, getattr(task, name))
    if len(task.sampling.stop) > 64:
        _refuse("sampling.stop", f"{len(task.sampling.stop)} strings", "at most 64")
    for number, text in enumerate(task.sampling.stop):
        _sized(f"sampling.stop.{number}", text, 1, 1024)
    _files(task.files)
    _workspace(task.workspace)
    _tags(task.tags)
    if task.callback is not None:
        _callback(task.callback.url)


def _part(field: str, part: PluginSpec) -> None:
    _sized(f"{field}.name", part.name, 1, 256)
    try:
        size = len(pack_options(f"{field}.options", part.options))
    except ConfigError as error:
        raise Invalid(str(error), field=f"{field}.options") from error
    if size > MAX_TEXT:
        _refuse(f"{field}.options", f"{size} bytes", f"at most {MAX_TEXT}")


def _files(files: dict[str, str]) -> None:
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


def _workspace(told: Workspace) -> None:
    for name, value in msgspec.structs.asdict(told).items():
        if value is not None:
            _sized(f"workspace.{name}", value, 1, 4096)
    for one, other in (("image", "build"), ("repo", "folder")):
        if getattr(told, one) is not None and getattr(told, other) is not None:
            _refuse(f"workspace.{other}", repr(getattr(told, other)), f"left out beside `{one}`")
    if told.commit is not None and told.repo is None:
        _refuse("workspace.commit", repr(told.commit), "left out without `repo`")
    if told.path is not None and (not told.path.startswith("/") or ".." in told.path.split("/")):
        _refuse("workspace.path", repr(told.path), "an absolute path without '..'")


def _tags(tags: dict[str, str]) -> None:
    if len(tags) > MAX_TAGS:
        _refuse("tags", f"{len(tags)} tags", f"at most {MAX_TAGS}")
    for name, value in tags.items():
        if not 1 <= len(name) <= 128 or "=" in name or "\0" in name:
            _refuse("tags", repr(name), "a name of 1 to 128 characters without =")
        if len(value) > 1024 or "\0" in value:
            _refuse(f"tags.{name}", repr(value), "at most 1024 characters")


def _callback(url: str) -> None:
    must = "an http:// or https:// URL of at most 2048 characters, without a user name"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # the port raises when it is none
    except ValueError:
        _refuse("callback.url", repr(url), must)
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= 2048
    if parts.scheme not in {"http", "https"} or not host or "@" in parts.netloc or not plain:
        _refuse("callback.url", repr(url), must)


# --------------------------------------------------------------------------- nodes and weights
def check_hello(hello: NodeRegistration) -> None:
    """Raises `Invalid` for a node that cannot be taken in as it describes itself."""
    _matches("name", hello.name, _NODE, "1 to 100 of A-Z a-z 0-9 . _ -")
    _within(Bound("slots", 1, 100_000), hello.slots)
    _within(Bound("capacity", 1, 1_000_000), hello.capacity)
    _sized("gateway", hello.gateway, 0, 2048)
    for field, table in (("labels", hello.labels), ("versions", hello.versions)):
        if len(table) > MAX_TAGS:
            _refuse(field, f"{len(table)} entries", f"at most {MAX_TAGS}")
        for name, value in table.items():
            _sized(f"{field}.{name[:64]}", name, 1, 128)
            _sized(f"{field}.{name[:64]}", value, 0, 1024)


def check_ask(ask: LeaseRequest) -> None:
    """Raises `Invalid` for a question that cannot be answered."""
    _within(Bound("capacity", 0, 1_000_000), ask.capacity)
    _within(Bound("wait_s", 0, 2 * LEASE_WAIT_S), ask.wait_s)
    check_held(ask.held, ask.applied)


def check_held(held: Iterable[HeldSession], applied: int) -> None:
    """Raises `Invalid` where a node names sessions that cannot be."""
    _within(Bound("applied", 0, BIG), applied)
    for number, one in enumerate(held):
        _matches(f"held.{number}.session", one.session, _SESSION, "the id of a session")
        _within(Bound(f"held.{number}.epoch", 0, 2**31 - 1), one.epoch)


def check_release(back: Release) -> None:
    """Raises `Invalid` for a session given back without a sensible reason."""
    _within(Bound("epoch", 0, 2**31 - 1), back.epoch)
    _sized("reason", back.reason, 1, 4096)


def check_version(version: Version) -> None:
    """Raises `Invalid` for a number that no weights can have."""
    _within(Bound("version", 0, BIG), version.version)


def check_pause(pause: Pause) -> None:
    """Raises `Invalid` for a wait that is none, or without end."""
    _within(Bound("within_s", 0, 3600), pause.within_s)


# --------------------------------------------------------------------------- in words
def _within(bound: Bound, value: float | None) -> None:
    if not bound.holds(value):
        _refuse(bound.field, repr(value), bound.must)


def _matches(field: str, value: str, pattern: re.Pattern[str], must: str) -> None:
    if not pattern.fullmatch(value):
        _refuse(field, repr(value), must)


def _sized(field: str, value: str, low: int, high: int) -> None:
    if not low <= len(value) <= high:
        _refuse(field, f"{len(value)} characters long", f"{low} to {high:,}")
    if "\0" in value:
        _refuse(field, repr(value), "without zero bytes")


def _refuse(field: str, shown: str, must: str) -> NoReturn:
    text = shown if len(shown) <= 80 else f"{shown[:60]}..."
    msg = f"{field} is {text}, must be {must}"
    raise Invalid(msg, field=field)

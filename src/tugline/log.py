"""Structured logging to stderr or a file: an event name, then key=value.

Keys and contents of sessions are never logged, however logging is configured: an unexpected error
is logged as its `describe_error`, never as ``exc_info``, whose default format in structlog has the
local variables of each frame.

Code that starts the work of a node or a session binds ids once, with `about`; all later events, in
any module, task or thread, have these ids. Log records of other libraries are converted.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import structlog

T = TypeVar("T")

MAX_BYTES = 64 << 20
"""Size at which a log file begins anew."""
KEPT = 3
"""Number of full log files that are kept."""
NEWLINE = "↵"
configured: dict[str, Any] = {}
"""Arguments of the last `configure`, for processes that this one starts."""
_VISIBLE = {"\n": NEWLINE, "\t": "⇥", " ": " "}


def configure(*, level: str = "warning", path: Path | None = None) -> None:
    """Write events of at least `level` to `path` as JSON lines, or to stderr as text for people.

    The file is rotated: see `RotatingFile`.
    """
    configured.update(level=level, path=path)
    renderer: Any = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    # Looked up for each event, so that a replaced sys.stderr is honoured.
    factory: Any = lambda *_: structlog.WriteLogger(sys.stderr)  # noqa: E731
    if path is not None:
        renderer = structlog.processors.JSONRenderer()
        factory = structlog.WriteLoggerFactory(file=cast("TextIO", RotatingFile(path)))
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _show_traceback,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=factory,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    if not any(isinstance(handler, _LibraryHandler) for handler in root.handlers):
        root.addHandler(_LibraryHandler())


class RotatingFile:
    """A log that begins anew at `max_bytes`; the last `KEPT` are renamed to ``.1``, ``.2``, ...

    Several processes may write to it: each notices when another one has renamed it.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8")

    def write(self, text: str) -> None:
        """Write an event, after renaming a file that is full."""
        with self._lock:
            if os.fstat(self._file.fileno()).st_size >= self._max_bytes:
                self._rotate()
            self._file.write(text)

    def flush(self) -> None:
        """Hand everything to the system."""
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rotate(self) -> None:
        try:
            own = os.fstat(self._file.fileno())
            if self._path.exists() and os.path.samestat(self._path.stat(), own):
                for number in range(KEPT - 1, 0, -1):
                    with contextlib.suppress(FileNotFoundError):
                        self._numbered(number).replace(self._numbered(number + 1))
                self._path.replace(self._numbered(1))
            file = self._path.open("a", encoding="utf-8")
        except OSError:  # a full disk or a lost folder: go on with the old file
            return
        self._file.close()
        self._file = file

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _show_traceback(_logger: object, _method: str, event: Any) -> Any:
    """Rename a traceback to the key that renderers print below the event."""
    if "traceback" in event:
        event["exception"] = event.pop("traceback")
    return event


class _LibraryHandler(logging.Handler):
    """Handler that logs records of libraries as events, with ``part`` set to the logger's name."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage()
        shown = {}
        if error is not None:
            text = text.partition("\n")[0]  # asyncio adds a line with the error
            shown["traceback"] = describe_error(error)
        get(record.name).log(record.levelno, text, **shown)


@contextmanager
def isolate(event: str, *, part: str) -> Iterator[None]:
    """Log an unexpected error as `event`, and leave the block."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - isolates one request from the next
        get(part).error(event, traceback=describe_error(error))


def describe_error(error: BaseException) -> str:
    """Describe an error by the types and source lines of its chain.

    Its text and its local variables are left out, because they may hold keys and contents.
    """
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts = [] if before is None else [describe_error(before), "\nwhich led to:\n"]
    parts += traceback.format_tb(error.__traceback__)
    parts.append(type(error).__name__)
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return "".join([*parts, *(f"\nof:\n{describe_error(each)}" for each in inner)])


def start_task(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a background task; an error that ends it is logged at once, whoever awaits it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report_failure)
    return task


def _report_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        what = "background task failed"
        get("tasks").error(what, task=task.get_name(), traceback=describe_error(error))


def get(name: str) -> Any:
    """Make a logger whose events have ``part=name``."""
    return structlog.get_logger(part=name)


def about(**ids: object) -> AbstractContextManager[None]:
    """Add `ids` to events of this task, and of tasks and threads it starts, during the block."""
    return structlog.contextvars.bound_contextvars(**ids)


def bind(**ids: object) -> None:
    """Add `ids` to events of this task until its end."""
    structlog.contextvars.bind_contextvars(**ids)


def bound() -> dict[str, Any]:
    """Return the ids of the current context."""
    return structlog.contextvars.get_contextvars()


def visible(text: str) -> str:
    """Return `text` on one line, with control characters replaced by their codes.

    So escape sequences and direction marks in model output are never sent to a terminal.
    """
    if text.isprintable():
        return text
    return "".join(
        _VISIBLE.get(char) or (char if char.isprintable() else repr(char)[1:-1]) for char in text
    )

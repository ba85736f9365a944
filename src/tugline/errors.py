"""Errors that Tugline raises. The class names the component that failed.

TuglineError
 +- UsageError            the caller: a flag, a config key, a missing program; exit code 2
 |   +- ConfigError       names the key, the value and the expected value
 |   +- UnknownPlugin     lists the known names
 |   +- CheckpointError   a checkpoint cannot be written or is damaged; names its path
 +- RequestError          a refused model call; has the HTTP status
 |   +- Unsupported, NotFound, TooLarge  cannot be done (400), no such route (404), too long (413)
 |   +- UpgradeRequired, ContextOverflow  no websocket (426); beyond the context window (400)
 |   +- BudgetExhausted   the session has spent its turns, tokens or time (400)
 |   +- Unauthorized      unknown, closed or wrong session secret (401)
 |   +- ClientGone        the client disconnected (499)
 +- EngineError           the model server failed or sent an invalid response; retried elsewhere
 |   +- Overloaded        too much is in flight (429, 503)
 +- HarnessError          the agent program cannot be installed or started
 +- SandboxError          the sandbox cannot be created or used
 |   +- SandboxNetworkError, ImageError, WorkspaceError, DiskFull
 +- EvaluatorError        the evaluation failed; says nothing about the agent
 +- CaptureError          a recording cannot be written or read; RecordingVersionError
 +- ServerError           the rollout server cannot be reached or refuses a request
 |   +- Invalid, Missing, Conflict  an invalid field, an unknown or a taken id (422, 404, 409)
 |   +- FencedError, QuotaExceeded  a lease was lost (409); a tenant is at a limit (429)
 +- BadSignature          a webhook is not from the server, was changed or is old
 +- StoreError            the database is unavailable: full, locked, restarting (503)
"""

import copy
from typing import Self


def first_line(error: Exception) -> str:
    """Return the first line of an error's text; the other lines are details for programmers."""
    return str(error).strip().partition("\n")[0]


class TuglineError(Exception):
    """Base class; the text is one line that says what to do, also for several `problems`."""

    problem = "fault"
    """Name in the server's responses: the last part of `Problem.type`."""
    parts: tuple[Self, ...] = ()
    """Combined errors, set by `combine`; empty for a single error."""

    @property
    def problems(self) -> tuple[Self, ...]:
        """The combined errors, such as all mistakes of a file; for a single error, itself."""
        return self.parts or (self,)

    @classmethod
    def combine(cls, problems: list[Self], prefix: str = "") -> Self:
        """Combine errors into the first one, with the prefixed texts of all."""
        start = f"{prefix}: " if prefix else ""
        parts = [copy.copy(each) for problem in problems for each in problem.problems]
        texts = [str(part) for part in parts]
        for part, text in zip(parts, texts, strict=True):
            part.args = (start + text,)
        whole = copy.copy(parts[0])
        whole.args = (start + "; ".join(texts),)
        whole.parts = tuple(parts) if len(parts) > 1 else ()
        return whole


class UsageError(TuglineError):
    """A mistake that the caller can correct."""

    problem = "invalid"


class ConfigError(UsageError, ValueError):
    """A key or value is unknown or wrong.

    `field` is the dotted path; `known` lists the valid keys or values if the list is closed.
    """

    def __init__(self, message: str, field: str = "", known: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.field = field
        self.known = known


class UnknownPlugin(UsageError):
    """No plug-in has this name."""


class CheckpointError(UsageError):
    """A trainer's checkpoint cannot be written or read."""


class RequestError(TuglineError):
    """A refused model call; each dialect formats `status` and `code` in its own way."""

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unsupported(RequestError):
    """A valid request that this engine or template cannot fulfil."""

    code = "unsupported_value"


class NotFound(RequestError):
    """No such route or model."""

    status = 404
    code = "not_found"


class TooLarge(RequestError):
    """The body exceeds the limit."""

    status = 413
    code = "request_too_large"


class UpgradeRequired(RequestError):
    """A websocket was requested; only plain HTTP is served."""

    status = 426
    code = "upgrade_required"


class ContextOverflow(RequestError):
    """Prompt, or prompt and response, exceed the context window; `prompt`, `window` in tokens."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        prompt: int | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.prompt, self.window = prompt, window


class BudgetExhausted(RequestError):
    """The session's budget is spent; `status` is a status at which the harness stops."""

    code = "budget_exhausted"

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Unauthorized(RequestError):
    """The secret belongs to no live session."""

    status = 401
    code = "invalid_api_key"


class ClientGone(RequestError):
    """The harness disconnected; tokens sampled until then are recorded."""

    status = 499
    code = "client_gone"


_TEMPORARY = frozenset({404, 408, 409, 425, 429})


def is_temporary(status: int) -> bool:
    """Whether a model server's HTTP status says nothing about the request, so a retry may help.

    404 is the answer of a server that is loading the model, or of a proxy in front of one.
    """
    return status >= 500 or status in _TEMPORARY


class EngineError(TuglineError):
    """The engine failed; `status` is its HTTP status, None if it could not be reached."""

    def __init__(
        self, message: str, *, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    @property
    def temporary(self) -> bool:
        """Whether the same request may succeed later, or elsewhere."""
        return self.status is None or is_temporary(self.status)


class Overloaded(EngineError):
    """A session (429) or the whole gateway (503) has too many calls in flight for another one."""


class HarnessError(TuglineError):
    """The agent program cannot be installed, configured or started."""


class SandboxError(TuglineError):
    """The sandbox cannot be created or used."""


class SandboxNetworkError(SandboxError):
    """The sandbox cannot be connected to the gateway."""


class ImageError(SandboxError):
    """A container image cannot be pulled, built or used."""


class WorkspaceError(SandboxError):
    """The initial workspace of a task is not available."""


class DiskFull(SandboxError):
    """The node's disk is full."""


class EvaluatorError(TuglineError):
    """The evaluation failed."""


class CaptureError(TuglineError):
    """A recording is damaged, has an unknown format, or cannot be written."""


class RecordingVersionError(CaptureError):
    """A recording is of a version that cannot be read; the message names it."""

    problem = "recording-version"


class ServerError(TuglineError):
    """The rollout server refused a request or could not be reached.

    `status` is the HTTP status, None without a response; `field` names the invalid field.
    """

    status: int | None = None

    def __init__(self, message: str, *, status: int | None = None, field: str = "") -> None:
        super().__init__(message)
        self.status = status if status is not None else type(self).status
        self.field = field


class Invalid(ServerError):
    """A field is invalid."""

    status = 422
    problem = "invalid"


class Missing(ServerError):
    """No object has this id."""

    status = 404
    problem = "missing"


class Conflict(ServerError):
    """Another object has this id."""

    status = 409
    problem = "conflict"


class FencedError(ServerError):
    """The lease of this session was lost."""

    status = 409
    problem = "fenced"


class QuotaExceeded(ServerError):
    """A tenant is at a limit; retry after `retry_s` seconds, 0 if its sessions must end first."""

    status = 429
    problem = "quota"
    retry_s = 0


class BadSignature(TuglineError):
    """A webhook is not from the server that shares the secret, was changed, or is old."""


class StoreError(TuglineError):
    """The database is unavailable; nothing acknowledged is lost."""

    problem = "unavailable"

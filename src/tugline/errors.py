"""Every error that Tugline raises on purpose. The class names the boundary that was crossed.

TuglineError
 +- UsageError            the person: a flag, a config key, a missing program; exit code 2
 |   +- ConfigError       names the key, the value and what would be right
 |   +- UnknownPlugin     lists the known names
 |   +- CheckpointError   a checkpoint cannot be written, or is damaged; names its path
 +- RequestError          one model call is refused; carries the HTTP status
 |   +- Unsupported       asks for something this engine or template cannot do (400)
 |   +- NotFound, TooLarge  no such route or model (404); beyond its bound (413)
 |   +- UpgradeRequired, ContextOverflow  no websocket (426); beyond the engine's window (400)
 |   +- BudgetExhausted   the session has spent its turns, tokens or time (400)
 |   +- Unauthorized      unknown, closed or wrong session secret (401)
 |   +- ClientGone        nobody waits for the answer any more (499)
 +- EngineError           the model server failed or answered nonsense; retried elsewhere
 +- HarnessError          the agent program cannot be installed or started
 +- RuntimeFault          the sandbox cannot be made or used
 |   +- NetworkFault, ImageFault, WorkspaceFault, DiskFull  what of it
 +- EvaluatorError        the verdict could not be had; says nothing about the agent
 +- CaptureError          a recording cannot be written or read; names file and offset
 +- ServerError           the rollout server cannot be reached or refuses; carries the problem
 |   +- Invalid, Missing, Conflict  a field is wrong, an id unknown or taken (422, 404, 409)
 |   +- FencedError       a lease was lost; what came with its epoch is refused (409)
 +- BadSignature          a callback is not from our server, was changed or is old
 +- StoreError            the database cannot be used now: full, locked, restarting (503)
"""

from __future__ import annotations


class TuglineError(Exception):
    """Base of all; its text is one line that says what to do."""


class UsageError(TuglineError):
    """The caller can mend this."""


class ConfigError(UsageError, ValueError):
    """A key or value is unknown or wrong.

    `field` is its dotted path; `known` lists the right keys or values, where the list is closed.
    """

    def __init__(self, message: str, field: str = "", known: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.field = field
        self.known = known


class UnknownPlugin(UsageError):
    """No plug-in of that name."""


class CheckpointError(UsageError):
    """A trainer's checkpoint cannot be written or read."""


class RequestError(TuglineError):
    """A model call that is refused, with the status that any dialect turns into its own shape."""

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unsupported(RequestError):
    """What is asked for is well-formed and cannot be honoured here."""

    code = "unsupported_value"


class NotFound(RequestError):
    """Nothing is at this address."""

    status = 404
    code = "not_found"


class TooLarge(RequestError):
    """More than is accepted."""

    status = 413
    code = "request_too_large"


class UpgradeRequired(RequestError):
    """Only plain HTTP is spoken here."""

    status = 426
    code = "upgrade_required"


class ContextOverflow(RequestError):
    """The prompt, or prompt plus answer, exceeds the engine's window (both in tokens)."""

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
    """The session may not make this call any more; `status` is what its harness stops on."""

    code = "budget_exhausted"

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Unauthorized(RequestError):
    """The secret opens no live session."""

    status = 401
    code = "invalid_api_key"


class ClientGone(RequestError):
    """The harness hung up; what was sampled until then is recorded."""

    status = 499
    code = "client_gone"


class EngineError(TuglineError):
    """The engine failed; `status` is its own HTTP status, None when it could not be reached."""

    def __init__(
        self, message: str, *, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class HarnessError(TuglineError):
    """The agent program cannot be installed, configured or started."""


class SandboxError(TuglineError):
    """The place where agents run is at fault."""


class SandboxNetworkError(SandboxError):
    """The sandbox cannot be given its way to the gateway."""


class ImageError(SandboxError):
    """A container image cannot be pulled, built or used."""


class WorkspaceError(SandboxError):
    """What a task begins with cannot be had."""


class DiskFull(SandboxError):
    """The node's disk has no room left."""


class EvaluatorError(TuglineError):
    """No verdict could be had."""


class CaptureError(TuglineError):
    """A recording is damaged, foreign or cannot be written."""


class ServerError(TuglineError):
    """The rollout server did not do what it was asked to.

    `status` is that of its answer, None when there was none; `field` names what is wrong.
    """

    status: int | None = None

    def __init__(self, message: str, *, status: int | None = None, field: str = "") -> None:
        super().__init__(message)
        self.status = status if status is not None else type(self).status
        self.field = field


class Invalid(ServerError):
    """A field is not what it must be."""

    status = 422


class Missing(ServerError):
    """Nothing has this id."""

    status = 404


class Conflict(ServerError):
    """Something else has this id."""

    status = 409


class FencedError(ServerError):
    """Somebody else owns this session by now."""

    status = 409


class BadSignature(TuglineError):
    """A callback is not from the server that shares the secret, or was changed, or is old."""


class StoreError(TuglineError):
    """What is kept cannot be read or written at the moment; nothing acknowledged is lost."""

"""Run the stages of one session: slots, times, and the failures that end it early."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable

from tugline import log
from tugline.errors import TuglineError
from tugline.plugins import refuse_endings
from tugline.rollout.failures import EarlyEnd, classify, make_total_timeout
from tugline.rollout.stages import Ending, ScopeEnded, StageSlots
from tugline.types import Failure, Status

OnStage = Callable[[Status], None]
"""Called before each stage."""
_log = log.get("node")


class StageRunner:
    """Runs stages of `session`, with its `slots`; `seconds` has the time of each."""

    def __init__(self, session: str, on_stage: OnStage, slots: StageSlots) -> None:
        self.seconds: dict[str, float] = {}
        self._session = session
        self._on_stage = on_stage
        self._slots = slots

    @contextlib.asynccontextmanager
    async def run(self, status: Status) -> AsyncIterator[None]:
        """Wait for a slot (for RUN, this is READY), time the stage, classify its failure.

        Raises `EarlyEnd`.
        """
        current: Status = Status.READY if status is Status.RUN else status
        self._on_stage(current)
        began = time.monotonic()
        started = False
        try:
            with refuse_endings(f"a plug-in of {status.value}"):
                async with self._slots.cancel_scope.enforce(), self._slots.acquire(status):
                    started = True
                    if current is not status:
                        self.seconds[current.value] = time.monotonic() - began
                        current = status
                        self._on_stage(current)
                    began = time.monotonic()
                    yield
        except EarlyEnd as early:
            self._log_failure(current, early.end.failure, early)
            raise
        except ScopeEnded as ended:
            if ended.ending is Ending.CANCELLED:
                raise EarlyEnd(None, Status.CANCELLED) from ended
            failure = make_total_timeout(current if started else Status.READY)
            raise EarlyEnd(failure, Status.TIMED_OUT) from ended
        except Exception as error:
            failure = classify(current, error)
            self._log_failure(current, failure, error)
            raise EarlyEnd(failure) from error
        finally:
            self.seconds[current.value] = time.monotonic() - began

    def _log_failure(self, stage: Status, failure: Failure | None, error: Exception) -> None:
        """Log where and why a stage failed; of an error of no known kind also the places."""
        about: dict[str, object] = {"session": self._session, "stage": stage}
        if failure is not None:
            about |= {"boundary": failure.boundary, "cause": failure.cause}
        if not isinstance(error, TuglineError | TimeoutError | EarlyEnd):
            about["traceback"] = log.describe_error(error)
        _log.warning("stage failed", **about)

"""Health of a node: failures only make it suspected, and a session of its own decides.

What a session contains never decides its node's fate (I5), so no number of failures does. After one
that may be the node's, the node runs its **canary**: a session of its own that opens a sandbox,
runs a program in it, makes one model call through the gateway, and reads its recording. Only if the
canary fails because of the node, the node reports a problem, for which the server puts it in
quarantine. It repeats the canary until one succeeds, or until another session does.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tugline import log, plugins
from tugline.errors import UsageError
from tugline.gateway.app import Gateway
from tugline.rollout.failures import make_failure
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.sandbox.base import Runtime
from tugline.sandbox.files import remove
from tugline.types import (
    Cause,
    Failure,
    Limits,
    PluginSpec,
    Sampling,
    Session,
    Task,
    Trajectory,
    is_by_agent,
)

SUSPICIOUS = frozenset(
    {
        *(Cause.SANDBOX, Cause.NETWORK, Cause.DISK, Cause.NODE),
        *(Cause.INIT_TIMEOUT, Cause.RECORDING),
    }
)
"""Causes that may be the node's: of a session they are a reason for a canary, of a canary proof."""
FIRST_PAUSE_S = 5.0
"""First pause, in seconds, before a failed canary is repeated; it doubles."""
LAST_PAUSE_S = 300.0
"""Longest pause."""
AGAIN_S = 30.0
"""Shortest pause between a canary that did not fail and the next one."""
DEFAULT_RUNTIME = "auto"
_MAX_PROBLEM = 2000
"""Maximum characters of a problem."""
_LIMITS = Limits(init_s=60.0, agent_s=60.0, eval_s=60.0, max_turns=1, max_sampled_tokens=4)
_PROGRAM = """
import json, os, urllib.request
message = {"role": "user", "content": "Answer with one word."}
body = {"model": os.environ["OPENAI_MODEL"], "max_tokens": 1, "messages": [message]}
headers = {
    "authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"
}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
urllib.request.urlopen(request, timeout=50).read()
"""
_log = log.get("node.health")

RunCanary = Callable[[str], Awaitable[Failure | None]]
"""Runs a canary in the runtime of that name; returns its failure, None if it succeeded."""


class Health:
    """Whether this node can run sessions; `run` tests it when there is a reason to."""

    def __init__(
        self,
        run_canary: RunCanary,
        on_change: Callable[[], None],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`on_change` is called when `problem` has changed."""
        self.sleep = sleep
        self.problem = ""
        """Why the node cannot run sessions; empty if it can, as far as is known."""
        self._run_canary = run_canary
        self._on_change = on_change
        self._since = 0.0
        """Unix time of the problem."""
        self._working = {DEFAULT_RUNTIME}
        """Runtimes that this node must offer: the default, and those that have worked here."""
        self._suspected = asyncio.Event()
        self._runtime = DEFAULT_RUNTIME

    def set_problem(self, problem: str) -> None:
        """Set the result of a test of this node; empty if it works."""
        if bool(problem) is not bool(self.problem):
            self._since = time.time()
            report = _log.error if problem else _log.warning
            report("in quarantine" if problem else "out of quarantine", problem=problem)
        if problem[:_MAX_PROBLEM] != self.problem:
            self.problem = problem[:_MAX_PROBLEM]
            self._on_change()
        (self._suspected.set if problem else self._suspected.clear)()

    def note_result(self, task: Task, trajectory: Trajectory, began: float) -> None:
        """Take notice of a session that began at Unix time `began`."""
        failure = trajectory.failure
        if failure is not None and failure.cause in SUSPICIOUS:
            # A runtime that never worked here may be unknown to this machine.
            known = task.runtime.name in self._working
            self._runtime = task.runtime.name if known else DEFAULT_RUNTIME
            self._suspected.set()
        elif is_by_agent(trajectory.status, failure):
            if ":" not in task.runtime.name:  # the class of a task may fail on purpose
                self._working.add(task.runtime.name)
            if self.problem and began > self._since:
                self.set_problem("")

    async def run(self) -> None:
        """Run canaries when there is a suspicion, until cancelled."""
        while True:
            await self._suspected.wait()
            if not self.problem:
                await self._test()
            pause_s = FIRST_PAUSE_S
            while self.problem:
                await self.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
                if self.problem:  # else another session worked meanwhile
                    await self._test()
            await self.sleep(AGAIN_S)

    async def _test(self) -> None:
        self._suspected.clear()
        failure = await self._run_canary(self._runtime)
        if failure is None:
            self.set_problem("")
        elif failure.cause in SUSPICIOUS:
            self.set_problem(f"{failure.cause}: {failure.message}")
        else:  # such as an engine that is down: not this node's fault
            _log.info("canary without a result", failure=failure.message)


class Canary:
    """Runs the canaries of a node, each below `sessions`."""

    def __init__(self, gateway: Gateway, parts: Parts, sessions: Path) -> None:
        self._gateway = gateway
        self._parts = parts
        self._sessions = sessions

    async def run(self, runtime: str) -> Failure | None:
        """Run one session in `runtime`; return its failure, None if it succeeded."""
        session = Session(id=f"canary-{secrets.token_hex(4)}", task="canary", sample=0)
        name = f"{session.id}.{session.epoch}"
        try:
            trajectory = await roll_out(
                make_task(runtime),
                session,
                gateway=self._gateway,
                directory=self._sessions / name,
                parts=self._parts,
            )
        except Exception as error:  # noqa: BLE001 - it tells nothing about the node
            _log.error("canary raised", traceback=log.describe_error(error))
            return make_failure(Cause.TASK, type(error).__name__)
        finally:
            await asyncio.to_thread(self._clear, session.id, name)
        failure = trajectory.failure
        if failure is not None and failure.cause is Cause.TASK:  # it needs an image
            problem = await asyncio.to_thread(_check_runtime, runtime)
            return make_failure(Cause.SANDBOX, problem) if problem else None
        return failure

    def _clear(self, session: str, name: str) -> None:
        with contextlib.suppress(OSError):
            remove(self._sessions, name)
        with contextlib.suppress(OSError, KeyError):  # it was never opened in the gateway
            self._gateway.describe(session).path.unlink(missing_ok=True)
            self._gateway.forget(session)


def make_task(runtime: str) -> Task:
    """Return the task of a canary: one model call of one token."""
    return Task(
        id="canary",
        instruction="Make one model call.",
        harness=PluginSpec("shell", {"command": ["python3", "-I", "-c", _PROGRAM]}),
        evaluator=PluginSpec("session_completed"),
        runtime=PluginSpec(runtime),
        sampling=Sampling(max_tokens=1),
        limits=_LIMITS,
    )


def _check_runtime(runtime: str) -> str:
    """Return why a runtime does not work, asked anew; empty if it does."""
    try:
        return plugins.make("runtime", PluginSpec(runtime), Runtime).check_available() or ""
    except UsageError:  # it has options that only tasks know
        return ""

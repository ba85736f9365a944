"""Run the sessions of a step again while they all fail for a reason outside the policy.

A step without any reward cannot be trained. If a judge, an engine or a disk is the reason, the step
waits for it, and the run ends with that reason after `schedule.patience`; a resumed run starts with
the failed sessions (I3). Sessions that failed because of their agents are data (I5).
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from tugline.errors import EngineError
from tugline.trainers.progress import RunProgress
from tugline.trainers.rollouts import RolloutServer
from tugline.types import Boundary, Task, Trajectory

_TEXT = 200
"""Maximum length of a failure's text."""
_FIRST_PAUSE_S = 1.0
_LAST_PAUSE_S = 300.0


async def run_patiently(
    server: RolloutServer,
    tasks: Sequence[Task],
    name: str,
    *,
    patience_s: float,
    progress: RunProgress,
    sleep: Callable[[float], Awaitable[None]],
) -> list[Trajectory]:
    """Run the unfinished sessions of `tasks`; return the results of all sessions.

    While none has a reward and some failed outside the policy, those are run again after a pause.
    Raises `EngineError` with the most frequent failure when `patience_s` is over.
    """
    pauses = back_off(patience_s)
    while True:
        results = await server.run(tasks, partial(progress.count_sessions, name))
        if any(each.reward for each in results) or not any(map(is_outside_policy, results)):
            return results
        cause = f"no session of {name} has a reward: {summarize_failures(results)}"
        pause_s = next(pauses, None)
        if pause_s is None:
            raise EngineError(cause)
        progress.report(f"{cause}; retrying in {pause_s:g} s")
        await sleep(pause_s)
        if not await server.run_again([task.id for task in tasks]):
            return results


def is_outside_policy(result: Trajectory) -> bool:
    """Whether a session has no reward for a reason that is not its agent's."""
    failure = result.failure
    return result.reward is None and failure is not None and failure.boundary is not Boundary.AGENT


def summarize_failures(results: Sequence[Trajectory]) -> str:
    """Return how many sessions have no reward, and the most frequent text of their failures."""
    failed = [result for result in results if result.reward is None]
    texts = Counter(
        f"{each.failure.boundary}: {each.failure.message[:_TEXT]}" if each.failure else each.status
        for each in failed
    )
    most = "".join(f", {text} ({count} times)" for text, count in texts.most_common(1))
    return f"{len(failed)} of {len(results)} sessions{most}"


def back_off(patience_s: float) -> Iterator[float]:
    """Yield pauses that double, from 1 s to 5 minutes; their sum is `patience_s`."""
    pause_s = _FIRST_PAUSE_S
    while patience_s > 0:
        yield min(pause_s, patience_s)
        patience_s -= pause_s
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)

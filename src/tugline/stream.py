"""Graded groups of a rollout server, for any training loop. Needs neither torch nor asyncio.

    with GroupStream("my-trainer") as stream:
        for group in stream:
            update(group.samples)
            save_checkpoint()
            stream.acknowledge(group)

Groups are complete and in the order of their release. After a restart, groups that were read but
not acknowledged are delivered again, acknowledged groups never (I3); so acknowledge after the
checkpoint. One page of results is in memory.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from tugline.client.streams import GroupResults
from tugline.client.sync import SyncClient
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.samples import read_group
from tugline.types import Reason, Sample, Trajectory


class GradedGroup:
    """Sessions of a finished task."""

    def __init__(self, results: GroupResults) -> None:
        self.id = results.view.id
        """Id of the task."""
        self.cursor = results.cursor
        """Position to acknowledge."""
        self.revision = sum(result.view.revision for result in results.results)
        """Number of changes of rewards by other verdicts. Above 0, this consumer may have got the
        group before, with other rewards."""
        self.missing = results.view.missing
        """Samples without a reward, for a reason that says nothing about the policy."""
        every = (result.trajectory for result in results.results)
        self.trajectories: tuple[Trajectory, ...] = tuple(t for t in every if t is not None)
        """Trajectories of the sessions that ran, with or without a reward, by sample."""

    @property
    def masked(self) -> dict[Reason, int]:
        """Number of sampled tokens of all sessions that are masked, by reason."""
        counts = Counter[Reason]()
        for trajectory in self.trajectories:
            counts.update(trajectory.ledger.masked)
        return dict(counts)

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Samples of all traces with tokens to train on, of all sessions with a reward.

        Advantages are ``(r - mean) / (std + 1e-4)`` over the sessions, 0 if all are equal; a
        trainer that computes its own uses `Sample.reward`.
        """
        return tuple(read_group(self.trajectories, GrpoConfig()))


@dataclass(eq=False, repr=False)
class GroupStream:
    """Context manager that iterates over a consumer's groups, after the acknowledged ones.

    `consumer` is any name; the server stores its position. The server is found as by `Client`.
    """

    consumer: str
    server: str | None = None
    token: str | None = None
    _: KW_ONLY
    folder: Path | str | None = None
    tasks: Sequence[str] = ()
    """Ids of the tasks whose groups are read; empty: all tasks."""
    follow: bool = True
    """Whether to wait for further groups."""
    deadline_s: float = 600.0
    """Seconds to wait while the server cannot be reached."""

    def __post_init__(self) -> None:
        self._client = SyncClient(
            self.server, self.token, folder=self.folder, deadline_s=self.deadline_s
        )

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.__exit__(*exc)

    def __iter__(self) -> Iterator[GradedGroup]:
        """Yield the groups. Raises `ServerError` if the server cannot be reached for too long."""
        for results in self._client.groups(self.consumer, tasks=self.tasks, follow=self.follow):
            yield GradedGroup(results)

    def acknowledge(self, group: GradedGroup) -> None:
        """Acknowledge this group and all earlier ones; call this after the checkpoint."""
        self._client.ack(self.consumer, group.cursor)

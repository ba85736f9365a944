"""Graded groups of a rollout server, for the loop of any trainer. Needs neither torch nor asyncio.

    with GroupStream("my-trainer") as stream:
        for group in stream:
            update(group.samples)
            save_checkpoint()
            stream.acknowledge(group)

Groups come whole, in the order of their release. What was read and not acknowledged comes again
after a restart, what was acknowledged never does (I3); so acknowledge after the checkpoint. In
memory is one page of results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from tugline.client.streams import GroupResults
from tugline.client.sync import SyncClient
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.samples import read_group
from tugline.types import Sample, Trajectory


class GradedGroup:
    """All sessions of one task that has ended."""

    def __init__(self, results: GroupResults) -> None:
        self.id = results.view.id
        """The task."""
        self.cursor = results.cursor
        """Position to acknowledge."""
        self.missing = results.view.missing
        """Samples without a reward, for a reason that says nothing about the policy."""
        found = (result.trajectory for result in results.results)
        self.trajectories: tuple[Trajectory, ...] = tuple(one for one in found if one is not None)
        """Of the sessions that ran, with or without a reward, by sample."""

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Each trace with something to train on, of each session with a reward.

        Advantages are ``(r - mean) / (std + 1e-4)`` over the sessions, 0 if all earned the same;
        a trainer that computes its own has `reward`.
        """
        return tuple(read_group(self.trajectories, GrpoConfig()))


@dataclass(eq=False, repr=False)
class GroupStream:
    """Groups of one consumer, from the first that it has not acknowledged; a context manager.

    `consumer` is a name of your choice, kept by the server; the server is found as by `Client`.
    """

    consumer: str
    server: str | None = None
    token: str | None = None
    _: KW_ONLY
    folder: Path | str | None = None
    tasks: Sequence[str] = ()
    """Only groups of these."""
    follow: bool = True
    """Without it, only those of now."""
    deadline_s: float = 600.0
    """The server may be away for that long."""

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
        """Yield the groups. Raises `ServerError` if the server is away for too long."""
        for results in self._client.groups(self.consumer, tasks=self.tasks, follow=self.follow):
            yield GradedGroup(results)

    def acknowledge(self, group: GradedGroup) -> None:
        """Acknowledge this group and all before it; call it after the checkpoint that has them."""
        self._client.ack(self.consumer, group.cursor)

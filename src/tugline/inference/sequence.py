"""State of a request of the embedded engine, and the chunks of its answer.

The engine's thread writes a `Sequence`; a `ChunkReader` on the event loop's thread reads it. What a
reader takes does not change again: elements of arrays are written before the count that covers
them, and new weights begin new `Routes` instead of overwriting the old ones.
"""

from collections.abc import Iterator

import numpy as np

from tugline.inference.base import GenerateRequest, SampledChunk
from tugline.types import Experts, Finish, Ids, Kept, VersionSpan


class Routes:
    """Experts of a sequence's tokens under the same weights, from the prompt's first on."""

    def __init__(self, length: int, begin: int) -> None:
        """`length` is the maximum number of tokens."""
        self._length = length
        self._rows: Experts = np.empty((0, 0, 0), np.uint8)
        self.count = 0
        self.begin = begin
        """Number of tokens that were sampled before."""

    def add(self, rows: Experts) -> None:
        """Append the experts of the next tokens."""
        if not self.count:
            self._rows = np.empty((self._length, *rows.shape[1:]), rows.dtype)
        end = self.count + len(rows)
        self._rows[self.count : end] = rows
        self.count = end

    def get(self, start: int, end: int) -> Experts:
        """Return those of the tokens from `start` to `end`, as a view."""
        return self._rows[start:end]


class Sequence:
    """A request and the tokens sampled for it."""

    def __init__(self, request: GenerateRequest, *, limit: int, stops: frozenset[int]) -> None:
        self.request = request
        self.limit = limit
        self.stops = stops
        self.prompt_len = len(request.prompt_ids)
        self.ids = np.empty(self.prompt_len + limit, np.int32)
        self.ids[: self.prompt_len] = request.prompt_ids
        self.logprobs = np.empty(limit, np.float32)
        self.kept: list[Ids] = []
        """Ids that each token was chosen from; none if sampling is not truncated."""
        self.count = 0
        self.versions: list[tuple[int, int]] = []
        """First position and version of each span."""
        self.routes: list[Routes] = []
        """One for each time that the sequence was started: at first, and after new weights."""
        self.finish: Finish | None = None
        self.stop_id: int | None = None
        self.seed = int(np.random.default_rng(request.seed).integers(2**63))

    @property
    def context(self) -> Ids:
        """The prompt and the tokens sampled so far, as a view."""
        return self.ids[: self.prompt_len + self.count]

    def push(self, token: int, logprob: float, version: int, kept: Ids | None) -> None:
        """Append a sampled token; set the finish reason if it is the last."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((self.count, version))
        self.ids[self.prompt_len + self.count] = token
        self.logprobs[self.count] = logprob
        if kept is not None:
            self.kept.append(kept)
        self.count += 1
        if token in self.stops:
            self.finish = Finish.STOP
            self.stop_id = token
        elif self.count == self.limit:
            self.finish = Finish.LENGTH

    @property
    def is_due(self) -> bool:
        """Whether the tokens of a stream that is not finished are to be sent."""
        every = self.request.stream_interval
        return self.request.stream and self.count % every == 1 % every


class ChunkReader:
    """Takes the new tokens of a sequence, with the experts computed since the last ones."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._start = 0
        """Number of tokens taken."""
        self._routes = 0
        """Index of the routes that are read."""
        self._rows = 0
        """Number of their tokens that were taken."""

    def take(self) -> Iterator[SampledChunk]:
        """Yield the new tokens, those before and after new weights in chunks of their own."""
        sequence = self._sequence
        finish = sequence.finish  # read before the count, which is final once there is a finish
        end = sequence.count
        for routes in sequence.routes[self._routes + 1 :]:
            if routes.begin > end:
                break
            if routes.begin > self._start:
                yield self._read(routes.begin, None)
            self._routes += 1
            self._rows = 0
        if finish or end > self._start:
            yield self._read(end, finish)

    def _read(self, end: int, finish: Finish | None) -> SampledChunk:
        """Read the tokens up to `end`, as views."""
        sequence, start = self._sequence, self._start
        self._start = end
        bounds = [*sequence.versions, (end, 0)]
        spans = tuple(
            VersionSpan(version, max(begin, start), min(bounds[index + 1][0], end))
            for index, (begin, version) in enumerate(bounds[:-1])
            if begin < end and bounds[index + 1][0] > start
        )
        experts_start = self._rows
        return SampledChunk(
            ids=sequence.ids[sequence.prompt_len + start : sequence.prompt_len + end],
            logprobs=sequence.logprobs[start:end],
            versions=spans,
            experts=self._read_experts(end),
            experts_start=experts_start,
            kept=Kept.of(sequence.kept[start:end]) if sequence.kept else None,
            finish=finish,
            stop_id=sequence.stop_id if finish else None,
        )

    def _read_experts(self, end: int) -> Experts | None:
        """Return the experts of the tokens before the last one, if they were not taken."""
        sequence = self._sequence
        if not sequence.routes:
            return None
        routes = sequence.routes[self._routes]
        start = self._rows
        self._rows = max(start, min(routes.count, sequence.prompt_len + end - 1))
        return routes.get(start, self._rows) if self._rows > start else None

"""A session, or a group of them, as one prefix tree: each token once, with a view per branch.

Traces that begin alike share the tokens they begin with, so a trainer that packs tries computes
them once. Equal means equal ids after equal ids, and nothing else.

A token that was sampled is somebody's: it has one log probability, one policy version, one session
whose reward it earns. So where two calls sampled the same ids in the same place (twins, samples of
a group), they stand side by side as runs of their own, and each is trained once. Where one call
sampled what is context for another, they share the token, and it is trained as the sampled one.
Ids do not tell which picture they stand for, so only traces with the same pictures share any.

Invariants: the tokens before a token on its way from the root are its exact context (I1); a sampled
token is in one run and trained in one view (I2); making a tree costs O(tokens in the traces) (I7).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from tugline.traces.base import Builder, Built, Options, shared
from tugline.traces.ledger import balance
from tugline.traces.prefix_merging import exact_traces
from tugline.types import Call, Ids, Logprobs, Mask, Reason, Span, Trace


class Source(msgspec.Struct, frozen=True):
    """Who sampled a token: a call, under one policy version."""

    session: str
    trace: int
    """Index in `Tree.members` of the trace that holds the answer."""
    call: int
    version: int
    masked: Reason | None = None
    """Why it is not trained; None if it is."""


class Run(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` of a tree, which follow the last token of the run `parent`."""

    start: int
    end: int
    parent: int | None
    """Index of an earlier run; None at a root."""
    depth: int
    """How many tokens stand before the first one, on the way from the root."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that was put into a tree: the way from the root to the end of a run."""

    session: str
    run: int
    """Index of the run that it ends with."""
    length: int
    parent: int | None
    """Index of the member that it forked from or was started by."""
    about: Trace
    """Its kind, thread and so on; the tokens are left out."""


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix tree in flat arrays, all of shape ``(n,)``; a parent's tokens precede its own."""

    ids: Ids
    mask: Mask
    """True where a token is trained."""
    logprobs: Logprobs
    """As captured; 0 where nothing was sampled."""
    source: Ids
    """Index in `sources`; -1 where nothing was sampled."""
    runs: tuple[Run, ...]
    sources: tuple[Source, ...]
    members: tuple[Member, ...]

    @property
    def laid_out(self) -> int:
        """Tokens of the same traces one by one, to compare with the ``len(ids)`` of the tree."""
        return sum(member.length for member in self.members)

    def positions(self) -> Ids:
        """How many tokens stand before each, on its way from the root; shape ``(n,)``."""
        parts = [np.arange(r.end - r.start, dtype=np.int32) + r.depth for r in self.runs]
        return np.concatenate([np.empty(0, np.int32), *parts], dtype=np.int32)

    def path(self, run: int | None) -> list[slice]:
        """Where the tokens from the root to the end of a run are."""
        return [slice(self.runs[i].start, self.runs[i].end) for i in self._up(run)][::-1]

    def views(self) -> dict[str, tuple[Trace, ...]]:
        """By session: a trace per branch; each sampled token is covered in one of them.

        A trace that another one of its session goes on with is part of that one's view.
        """
        owner = self._owners()
        of_source = np.array([owner[source.trace] for source in self.sources], np.int32)
        made: dict[str, list[Trace]] = {}
        index: dict[int, int] = {}
        for first, view in enumerate(owner):
            if view in index:
                continue
            mine = made.setdefault(self.members[first].session, [])
            above = self.members[first].parent
            parent = None if above is None else index.get(owner[above])
            trace = self._view(view, of_source, parent)
            common = 0 if parent is None else shared(mine[parent], trace)
            trace = msgspec.structs.replace(trace, shared=common)
            index[view] = len(mine)
            mine.append(trace)
        return {session: tuple(traces) for session, traces in made.items()}

    def _owners(self) -> list[int]:
        """For each member the one whose view holds it: itself, or one of its session beyond it."""
        owner = [0] * len(self.members)
        passed: dict[tuple[str, int], int] = {}
        deepest_first = sorted(enumerate(self.members), key=lambda one: (-one[1].length, one[0]))
        for number, member in deepest_first:
            owner[number] = passed.get((member.session, member.run), number)
            for run in self._up(member.run):
                if passed.setdefault((member.session, run), number) != number:
                    break
        return owner

    def _up(self, run: int | None) -> Iterator[int]:
        """From a run to its root."""
        while run is not None:
            yield run
            run = self.runs[run].parent

    def _view(self, number: int, of_source: Ids, parent: int | None) -> Trace:
        member = self.members[number]
        at = self.path(member.run)
        source = np.concatenate([self.source[part] for part in at])
        mine = source >= 0
        mine[mine] = of_source[source[mine]] == number
        source[~mine] = -1
        return msgspec.structs.replace(
            member.about,
            ids=np.concatenate([self.ids[part] for part in at]),
            mask=np.concatenate([self.mask[part] for part in at]) & mine,
            logprobs=np.where(mine, np.concatenate([self.logprobs[part] for part in at]), 0),
            spans=tuple(self._spans(source)),
            parent=parent,
        )

    def _spans(self, source: Ids) -> Iterator[Span]:
        edges = [0, *(np.flatnonzero(np.diff(source)) + 1).tolist(), len(source)]
        for start, end in pairwise(edges):
            if source[start] >= 0:
                one = self.sources[source[start]]
                yield Span(one.call, start, end, one.version, one.masked)


# --------------------------------------------------------------------------- growing one
class _Node:
    """A run while the tree grows."""

    __slots__ = ("children", "ids", "index", "logprobs", "source")

    def __init__(self, ids: Ids, logprobs: Logprobs, source: Ids) -> None:
        self.ids, self.logprobs, self.source = ids, logprobs, source
        self.children: list[_Node] = []
        self.index = -1

    def same(self, ids: Ids, source: Ids) -> int:
        """How many of these tokens can be this run's: equal ids, and at most one was sampled."""
        if self.ids[0] != ids[0] or (self.source[0] >= 0 and source[0] >= 0):
            return 0  # as for most; the arrays need not be looked at
        n = min(len(self.ids), len(ids))
        differs = self.ids[:n] != ids[:n]
        differs |= (self.source[:n] >= 0) & (source[:n] >= 0)
        first = int(differs.argmax())
        return first if differs[first] else n

    def adopt(self, logprobs: Logprobs, source: Ids) -> None:
        """Take over what was sampled here; as many tokens as this run has."""
        sampled = source >= 0
        if sampled.any():
            self.source = np.where(sampled, source, self.source)
            self.logprobs = np.where(sampled, logprobs, self.logprobs)

    def split(self, at: int) -> _Node:
        """Keep what follows `at`; returns the run of what stands before, with this as its child."""
        front = _Node(self.ids[:at], self.logprobs[:at], self.source[:at])
        front.children.append(self)
        self.ids, self.logprobs = self.ids[at:], self.logprobs[at:]
        self.source = self.source[at:]
        return front

    def put(self, ids: Ids, logprobs: Logprobs, source: Ids) -> _Node:
        """Add a sequence below this run; returns the run that it ends with."""
        node = self
        while len(ids):
            fits = [(child.same(ids, source), i) for i, child in enumerate(node.children)]
            same, i = max(fits, key=lambda fit: fit[0], default=(0, 0))
            if not same:
                leaf = _Node(ids, logprobs, source)
                node.children.append(leaf)
                return leaf
            if same < len(node.children[i].ids):
                node.children[i] = node.children[i].split(same)
            node = node.children[i]
            node.adopt(logprobs[:same], source[:same])
            ids, logprobs, source = ids[same:], logprobs[same:], source[same:]
        return node


def grow(sessions: Mapping[str, Sequence[Trace]]) -> Tree:
    """One tree of the traces of a session, or of all samples of a group, by session id.

    Takes what any builder made.
    """
    roots: dict[tuple[str, ...], _Node] = {}
    sources: list[Source] = []
    ends: list[tuple[str, int, Trace, _Node]] = []
    empty = np.empty(0, np.int32)
    for session, traces in sessions.items():
        first = len(ends)
        for trace in traces:
            source = np.full(len(trace.ids), -1, np.int32)
            for span in trace.spans:
                source[span.start : span.end] = len(sources)
                sources.append(Source(session, len(ends), span.call, span.version, span.masked))
            root = roots.setdefault(trace.images, _Node(empty, np.empty(0, np.float32), empty))
            ends.append((session, first, trace, root.put(trace.ids, trace.logprobs, source)))
    nodes, runs = _numbered(roots.values())
    source = np.concatenate([empty, *(node.source for node in nodes)], dtype=np.int32)
    trained = np.array([*(one.masked is None for one in sources), False], np.bool_)
    return Tree(
        ids=np.concatenate([empty, *(node.ids for node in nodes)], dtype=np.int32),
        mask=trained[source],
        logprobs=np.concatenate(
            [np.empty(0, np.float32), *(node.logprobs for node in nodes)], dtype=np.float32
        ),
        source=source,
        runs=tuple(runs),
        sources=tuple(sources),
        members=tuple(_member(*one) for one in ends),
    )


def _numbered(roots: Iterable[_Node]) -> tuple[list[_Node], list[Run]]:
    """Every run in an order in which parents come first."""
    nodes: list[_Node] = []
    runs: list[Run] = []
    waiting: list[tuple[_Node, int | None]] = [
        (child, None) for root in reversed(list(roots)) for child in reversed(root.children)
    ]
    while waiting:
        node, parent = waiting.pop()
        node.index = len(nodes)
        start = runs[-1].end if runs else 0
        depth = 0 if parent is None else runs[parent].depth + len(nodes[parent].ids)
        nodes.append(node)
        runs.append(Run(start, start + len(node.ids), parent, depth))
        waiting += [(child, node.index) for child in reversed(node.children)]
    return nodes, runs


def _member(session: str, first: int, trace: Trace, end: _Node) -> Member:
    none = np.empty(0, np.int32), np.empty(0, np.bool_), np.empty(0, np.float32)
    return Member(
        session=session,
        run=end.index,
        length=len(trace.ids),
        parent=None if trace.parent is None else first + trace.parent,
        about=msgspec.structs.replace(trace, ids=none[0], mask=none[1], logprobs=none[2], spans=()),
    )


class PrefixTree(Builder):
    """The traces are the branches of the session's tree; `tree` gives the tree itself."""

    def __init__(self, **options: object) -> None:
        self.options = Options.read("tree", options)

    def tree(self, calls: Sequence[Call]) -> Tree:
        """The session as one prefix tree."""
        session = calls[0].session if calls else ""
        return grow({session: exact_traces(calls, self.options)})

    def build(self, calls: Sequence[Call]) -> Built:
        """A trace per branch; where none forks, the same as `prefix_merging` makes."""
        made = self.tree(calls).views().get(calls[0].session, ()) if calls else ()
        return Built(made, balance(calls, made))

"""The built-in builders: a trace per call, a trace per exact chain of calls, or a prefix tree.

All train the same tokens in the same contexts. `PerRequest` is the simplest reading of a session,
and the reference for the others; it costs O(turns x tokens), the others O(tokens) (I7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from tugline.traces import base
from tugline.traces.lineage import Answer, build_chains
from tugline.types import Call, Ids, Logprobs, Mask, Span, Trace, TraceKind


class PerRequest(base.Builder):
    """One trace per model call: its prompt as context, its answer to train on.

    Traces are in the order of the calls; a trace's parent is that of the call before.
    """

    def build(self, calls: Sequence[Call]) -> base.Built:
        """Give every call a trace of its own."""
        answers: list[tuple[Answer, TraceKind, int | None]] = []
        for chain in build_chains(calls):
            previous = chain.forked_after
            for answer in chain.place_answers(train_side=self.train_side):
                answers.append((answer, chain.kind, previous))
                previous = answer.call.number
        answers.sort(key=lambda numbered: numbered[0].call.number)
        index = {answer.call.number: i for i, (answer, _, _) in enumerate(answers)}
        traces: list[Trace] = []
        for answer, kind, previous in answers:
            ids = np.concatenate([answer.call.prompt_ids, answer.call.sampled_ids])
            parent = None if previous is None else index.get(previous)
            traces.append(base.make_trace(ids, [answer], kind, parent, self.max_length, traces))
        return base.Built(tuple(traces), base.count_session(calls, traces))


class PrefixMerging(base.Builder):
    """One trace per exact chain of calls, in the order of their first calls.

    The idea is Polar's (arXiv 2605.24220): calls whose prompts each begin with the prompt and
    answer before are one sequence. Here it is applied strictly: ids are compared, never text, and
    a call that does not fit forks into a trace of its own with its whole context. The copied
    context of a fork is not trained a second time: it has mask False, logprob 0 and no span.
    """

    def build(self, calls: Sequence[Call]) -> base.Built:
        """Give every chain of calls a trace."""
        chains = build_chains(calls)
        index = {call.number: i for i, chain in enumerate(chains) for call in chain.calls}
        traces: list[Trace] = []
        for chain in chains:
            last, after = chain.calls[-1], chain.forked_after
            ids = np.concatenate([last.prompt_ids, last.sampled_ids])
            parent = None if after is None else index.get(after)
            answers = chain.place_answers(train_side=self.train_side)
            trace = base.make_trace(ids, answers, chain.kind, parent, self.max_length, traces)
            traces.append(trace)
        return base.Built(tuple(traces), base.count_session(calls, traces))


# --------------------------------------------------------------------------- prefix trees
class TreeSource(msgspec.Struct, frozen=True):
    """Where sampled tokens come from."""

    branch: int
    """Index in `Tree.branches` of the trace that holds them."""
    span: Span
    """Their span in that trace."""


class TreeNode(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` of a tree, which follow the last token of the node `parent`."""

    start: int
    end: int
    parent: int | None
    """Index of an earlier node; None at a root."""
    depth: int
    """Number of tokens before the first one, on the path from the root."""


class TreeBranch(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that was added to a tree: the path from the root to the end of a node."""

    session: str
    node: int
    """Index of the last node."""
    length: int
    parent: int | None
    """Index of the branch that it forked from or was started by."""
    trace: Trace
    """Its kind, thread and so on, without tokens."""


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix tree in flat arrays, all of shape ``(n,)``; parents precede their children.

    The tokens on the path from the root to a token are its exact context (I1); a sampled token is
    in one node (I2).
    """

    ids: Ids
    mask: Mask
    """True where a token is trained."""
    logprobs: Logprobs
    """As captured; 0 where nothing was sampled."""
    source: Ids
    """Index in `sources`; -1 where nothing was sampled."""
    nodes: tuple[TreeNode, ...]
    sources: tuple[TreeSource, ...]
    branches: tuple[TreeBranch, ...]

    def positions(self) -> Ids:
        """Return each token's distance from its root; shape ``(n,)``."""
        parts = [np.arange(n.end - n.start, dtype=np.int32) + n.depth for n in self.nodes]
        return np.concatenate([np.empty(0, np.int32), *parts], dtype=np.int32)

    def path(self, node: int | None) -> list[slice]:
        """Return the slices of the tokens from the root to the end of a node."""
        path: list[slice] = []
        while node is not None:
            path.append(slice(self.nodes[node].start, self.nodes[node].end))
            node = self.nodes[node].parent
        return path[::-1]


# --------------------------------------------------------------------------- building
class _GrowingNode:
    """A node while the tree is built."""

    __slots__ = ("children", "ids", "index", "logprobs", "source")

    def __init__(self, ids: Ids, logprobs: Logprobs, source: Ids) -> None:
        self.ids, self.logprobs, self.source = ids, logprobs, source
        self.children: list[_GrowingNode] = []
        self.index = -1

    def count_shared(self, ids: Ids, source: Ids) -> int:
        """Return how many tokens can be shared: equal ids, of which at most one was sampled."""
        if self.ids[0] != ids[0] or (self.source[0] >= 0 and source[0] >= 0):
            return 0  # the common case, without a look at the arrays
        n = min(len(self.ids), len(ids))
        differs = self.ids[:n] != ids[:n]
        differs |= (self.source[:n] >= 0) & (source[:n] >= 0)
        first = int(differs.argmax())
        return first if differs[first] else n

    def merge(self, logprobs: Logprobs, source: Ids) -> None:
        """Take over the sampled tokens of another trace for all tokens of this node."""
        sampled = source >= 0
        if sampled.any():
            self.source = np.where(sampled, source, self.source)
            self.logprobs = np.where(sampled, logprobs, self.logprobs)

    def split(self, at: int) -> _GrowingNode:
        """Split off the first `at` tokens; returns their node, with this one as its child."""
        front = _GrowingNode(self.ids[:at], self.logprobs[:at], self.source[:at])
        front.children.append(self)
        self.ids, self.logprobs = self.ids[at:], self.logprobs[at:]
        self.source = self.source[at:]
        return front

    def insert(self, ids: Ids, logprobs: Logprobs, source: Ids) -> _GrowingNode:
        """Add a sequence below this node; returns the node that it ends with."""
        node = self
        while len(ids):
            counts = [(one.count_shared(ids, source), i) for i, one in enumerate(node.children)]
            shared, i = max(counts, key=lambda count: count[0], default=(0, 0))
            if not shared:
                leaf = _GrowingNode(ids, logprobs, source)
                node.children.append(leaf)
                return leaf
            if shared < len(node.children[i].ids):
                node.children[i] = node.children[i].split(shared)
            node = node.children[i]
            node.merge(logprobs[:shared], source[:shared])
            ids, logprobs, source = ids[shared:], logprobs[shared:], source[shared:]
        return node


_NO_IDS = np.empty(0, np.int32)
_NO_MASK = np.empty(0, np.bool_)
_NO_LOGPROBS = np.empty(0, np.float32)


def build_tree(sessions: Mapping[str, Sequence[Trace]]) -> Tree:
    """Build one tree of the traces of a session, or of all samples of a group, by session id.

    Each token is there once, so a trainer that packs prefix trees computes it once: tokens are
    shared if their ids and all ids before them are equal. A sampled token belongs to one call.
    Where two calls sampled the same ids at the same place (twins, samples of a group), each has
    nodes of its own and is trained once. Where one call sampled what is context for another, they
    share the token, and it is trained as the sampled one. Ids do not say which image they stand
    for, so only traces with the same images share any. The traces may come from any builder.
    """
    roots: dict[tuple[str, ...], _GrowingNode] = {}
    sources: list[TreeSource] = []
    leaves: list[tuple[str, int, Trace, _GrowingNode]] = []
    for session, traces in sessions.items():
        first = len(leaves)
        for trace in traces:
            source = np.full(len(trace.ids), -1, np.int32)
            for span in trace.spans:
                source[span.start : span.end] = len(sources)
                sources.append(TreeSource(len(leaves), span))
            root = roots.setdefault(trace.images, _GrowingNode(_NO_IDS, _NO_LOGPROBS, _NO_IDS))
            leaf = root.insert(trace.ids, trace.logprobs, source)
            leaves.append((session, first, trace, leaf))
    growing, nodes = _number_nodes(roots.values())
    source = np.concatenate([_NO_IDS, *(node.source for node in growing)], dtype=np.int32)
    trained = np.array([*(one.span.masked is None for one in sources), False], np.bool_)
    return Tree(
        ids=np.concatenate([_NO_IDS, *(node.ids for node in growing)], dtype=np.int32),
        mask=trained[source],
        logprobs=np.concatenate(
            [_NO_LOGPROBS, *(node.logprobs for node in growing)], dtype=np.float32
        ),
        source=source,
        nodes=tuple(nodes),
        sources=tuple(sources),
        branches=tuple(_make_branch(*leaf) for leaf in leaves),
    )


def _number_nodes(roots: Iterable[_GrowingNode]) -> tuple[list[_GrowingNode], list[TreeNode]]:
    """Return every node in an order in which parents come first."""
    growing: list[_GrowingNode] = []
    nodes: list[TreeNode] = []
    pending: list[tuple[_GrowingNode, int | None]] = [
        (child, None) for root in reversed(list(roots)) for child in reversed(root.children)
    ]
    while pending:
        node, parent = pending.pop()
        node.index = len(growing)
        start = nodes[-1].end if nodes else 0
        depth = 0 if parent is None else nodes[parent].depth + len(growing[parent].ids)
        growing.append(node)
        nodes.append(TreeNode(start, start + len(node.ids), parent, depth))
        pending += [(child, node.index) for child in reversed(node.children)]
    return growing, nodes


def _make_branch(session: str, first: int, trace: Trace, leaf: _GrowingNode) -> TreeBranch:
    return TreeBranch(
        session=session,
        node=leaf.index,
        length=len(trace.ids),
        parent=None if trace.parent is None else first + trace.parent,
        trace=replace(trace, ids=_NO_IDS, mask=_NO_MASK, logprobs=_NO_LOGPROBS, spans=()),
    )


class PrefixTree(PrefixMerging):
    """The traces of `PrefixMerging`; `tree` lays them out as one prefix tree."""

    def tree(self, calls: Sequence[Call]) -> Tree:
        """Return the session as one prefix tree, with a branch for each trace."""
        return build_tree({calls[0].session: self.build(calls).traces} if calls else {})

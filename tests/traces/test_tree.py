"""The tree of a session and of a group, on examples small enough to draw."""

from __future__ import annotations

import numpy as np

from calls import make_call as call
from tugline.traces.builders import PrefixMerging, PrefixTree, Tree, build_tree
from tugline.types import TraceKind, decode, encode


def drawn(tree: Tree) -> list[tuple[list[int], int | None, list[int]]]:
    """Each run as ids, parent and who sampled them."""
    return [
        (tree.ids[r.start : r.end].tolist(), r.parent, tree.source[r.start : r.end].tolist())
        for r in tree.nodes
    ]


def test_a_fork_shares_what_comes_before_it() -> None:
    """Each token is there once; the branches are the traces."""
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 7, 9], [5], parent=0)]
    tree = PrefixTree().tree(calls)
    assert drawn(tree) == [
        ([1, 2, 3], None, [-1, -1, 0]),
        ([4], 0, [0]),
        ([7, 9, 5], 0, [-1, -1, 1]),
    ]
    assert tree.mask.tolist() == [False, False, True, True, False, False, True]
    assert tree.positions().tolist() == [0, 1, 2, 3, 3, 4, 5]
    assert (len(tree.ids), sum(branch.length for branch in tree.branches)) == (7, 10)
    paths = [
        np.concatenate([tree.ids[part] for part in tree.path(branch.node)]).tolist()
        for branch in tree.branches
    ]
    assert paths == [trace.ids.tolist() for trace in PrefixTree().build(calls).traces]
    second = tree.branches[1]
    assert (second.trace.kind, second.parent, second.length) == (TraceKind.BRANCH, 0, 6)


def test_twins_stand_side_by_side() -> None:
    """Two calls that sampled the same ids are two runs of equal ids, each trained once."""
    calls = [call(0, [1, 2], [3]), call(1, [1, 2], [3]), call(2, [1, 2, 3, 9], [5], parent=1)]
    tree = PrefixTree().tree(calls)
    assert drawn(tree) == [([1, 2], None, [-1, -1]), ([3], 0, [0]), ([3, 9, 5], 0, [1, -1, 2])]
    assert tree.mask.sum() == 3
    assert tree.logprobs[[2, 3]].tolist() == [np.float32(-0.01), np.float32(-1.01)]


def test_context_that_another_call_sampled_is_that_calls() -> None:
    """Where one trace has as context what another sampled, they share it and it is trained."""
    calls = [call(0, [1, 2, 3, 4, 9], [5]), call(1, [1, 2], [3, 4])]
    tree = PrefixTree().tree(calls)
    assert drawn(tree) == [([1, 2, 3, 4], None, [-1, -1, 1, 1]), ([9, 5], 0, [-1, 0])]
    assert tree.mask.tolist() == [False, False, True, True, False, True]


def test_a_group_shares_its_prompt() -> None:
    """The samples of a task begin with the same prompt; it is in their tree once."""
    sessions = {
        name: PrefixMerging().build([call(0, [1, 2, 3], [number], session=name)]).traces
        for number, name in enumerate("abc")
    }
    tree = build_tree(sessions)
    assert (len(tree.ids), sum(branch.length for branch in tree.branches)) == (6, 12)
    assert [tree.branches[source.branch].session for source in tree.sources] == ["a", "b", "c"]


def test_a_tree_travels_like_any_noun() -> None:
    """It can be encoded, and is the same when it is read again; so is that of nothing."""
    for tree in (PrefixTree().tree([call(0, [1, 2], [3, 4])]), build_tree({})):
        again = decode(encode(tree), Tree)
        assert encode(again) == encode(tree)
    assert PrefixTree().build([]).traces == ()

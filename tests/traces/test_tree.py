"""The tree of a session and of a group, on examples small enough to draw."""

from __future__ import annotations

import numpy as np

from calls import make_call as call
from tugline.traces.builders import PrefixMerging, PrefixTree, Tree, build_tree
from tugline.types import Trace, TraceKind, decode, encode


def drawn(tree: Tree) -> list[tuple[list[int], int | None, list[int]]]:
    """Each run as ids, parent and who sampled them."""
    return [
        (tree.ids[r.start : r.end].tolist(), r.parent, tree.source[r.start : r.end].tolist())
        for r in tree.nodes
    ]


def test_a_fork_shares_what_comes_before_it() -> None:
    """Each token is there once, and each sampled one is trained in one of the two views."""
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 7, 9], [5], parent=0)]
    tree = PrefixTree().tree(calls)
    assert drawn(tree) == [
        ([1, 2, 3], None, [-1, -1, 0]),
        ([4], 0, [0]),
        ([7, 9, 5], 0, [-1, -1, 1]),
    ]
    assert tree.mask.tolist() == [False, False, True, True, False, False, True]
    assert tree.positions().tolist() == [0, 1, 2, 3, 3, 4, 5]
    assert (len(tree.ids), tree.flat_length) == (7, 10)
    first, second = tree.views()["s"]
    assert (first.ids.tolist(), first.mask.tolist()) == ([1, 2, 3, 4], [False, False, True, True])
    assert (second.ids.tolist(), second.mask.sum()) == ([1, 2, 3, 7, 9, 5], 1)
    assert (second.kind, second.parent, second.shared) == (TraceKind.BRANCH, 0, 3)


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
    (view,) = tree.views()["s"]
    assert view.mask.tolist() == [False, False, True, True, False, True]
    assert [span.call for span in view.spans] == [1, 0]


def test_a_trace_inside_another_needs_no_view() -> None:
    """Also if the longer one comes later: a question aside, taken up by the work."""
    calls = [
        call(0, [1, 2, 7], [8], kind=TraceKind.SIDE),
        call(1, [1], [2]),
        call(2, [1, 2, 7, 8, 9], [3]),
    ]
    views, ledger, _ = PrefixTree().build(calls)
    assert [view.ids.tolist() for view in views] == [[1, 2, 7, 8, 9, 3]]
    assert [span.call for span in views[0].spans] == [1, 0, 2]
    assert ledger == PrefixMerging().build(calls).ledger


def test_a_group_shares_its_prompt() -> None:
    """The samples of a task begin with the same prompt; it is in their tree once."""
    sessions = {
        name: PrefixMerging().build([call(0, [1, 2, 3], [number], session=name)]).traces
        for number, name in enumerate("abc")
    }
    tree = build_tree(sessions)
    assert (len(tree.ids), tree.flat_length) == (6, 12)
    assert [tree.branches[source.branch].session for source in tree.sources] == ["a", "b", "c"]
    views = tree.views()
    assert [len(views[name]) for name in "abc"] == [1, 1, 1]
    assert [encode(views[name][0]) for name in "abc"] == [
        encode(sessions[name][0]) for name in "abc"
    ]


def test_each_session_keeps_its_own_views() -> None:
    """A trace of one session that lies on another's way is still a view of its own session."""
    context = PrefixMerging().build([call(0, [1, 2], [])]).traces
    answer = PrefixMerging().build([call(0, [1], [2])]).traces
    tree = build_tree({"a": context, "b": answer})
    assert len(tree.ids) == 2
    views = tree.views()
    assert [trace.mask.tolist() for trace in views["a"]] == [[False, False]]
    assert [trace.mask.tolist() for trace in views["b"]] == [[False, True]]


def test_a_tree_travels_like_any_noun() -> None:
    """It can be encoded, and is the same when it is read again; so is that of nothing."""
    for tree in (PrefixTree().tree([call(0, [1, 2], [3, 4])]), build_tree({})):
        again = decode(encode(tree), Tree)
        assert encode(again) == encode(tree)
        assert len(again.views()) == len(tree.branches)
    assert PrefixTree().build([]).traces == ()


def test_a_straight_session_is_built_as_by_prefix_merging() -> None:
    """Without forks the tree is one branch, and its view the same trace."""
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9], [5], parent=0)]
    ours: Trace = PrefixTree().build(calls).traces[0]
    assert encode(ours) == encode(PrefixMerging().build(calls).traces[0])

"""The benchmark of builders: counts over recorded sessions, and the error without any."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.programs import ROOT, measure
from support.calls import make_call, make_header, write_calls
from tugline.types import Branch, Call, EchoChange, PluginSpec, TraceKind

END = 9
Rows = dict[tuple[str, str], dict[str, Any]]


def call(number: int, prompt: Sequence[int], sampled: Sequence[int], **changes: Any) -> Call:
    """One model call that continues the one before it."""
    parent = number - 1 if number else None
    return make_call(number, prompt, sampled, **{"parent": parent, **changes})


def write(path: Path, task: str, calls: Sequence[Call]) -> None:
    """A recording as the gateway writes it."""
    harness = {"harness": PluginSpec("pi")}
    write_calls(path, calls, make_header(path.stem.partition(".")[0], task, task_fields=harness))


TURNS = [
    call(0, [1, 2], [3, END]),
    call(1, [1, 2, 3, END, 4], [5, END], echo_changes=(EchoChange.REASONING,)),
    call(2, [1, 2, 3, END, 4, 5, END, 6], [7, END]),
]
"""Prompts with answers of 4, 7 and 10 tokens; each is a prefix of the next."""
EDITED = [
    call(0, [1, 2], [3, END]),
    call(1, [1, 2, 8, END, 4], [5, END], branch=Branch.HISTORY_EDITED),
]
"""The harness replaced an answer in the history; the published rule does not detect that."""
TITLE = [
    call(0, [7, 7, 7], [3], kind=TraceKind.SIDE, parent=None),
    call(1, [1, 2], [3, END], parent=None),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Rows by harness and stage, of a folder as ``tugline harness check --keep`` leaves it."""
    folder = tmp_path_factory.mktemp("kept")
    stages = {"plain": TURNS, "team": EDITED, "title": TITLE, "budget": TURNS}
    for stage, calls in stages.items():
        write(folder / "pi-openai_chat" / stage / "recordings" / "check-0.0.rec", "check", calls)
    return {
        (row["harness"], row["stage"]): row
        for row in measure("builders", "run.py", "--json", "--sessions", folder)["rows"]
    }


def test_exact_turns_are_forwarded_once(rows: Rows) -> None:
    """Three calls are 4 + 7 + 10 tokens as requests and 10 as one trace; both turns are exact."""
    row = rows["pi", "plain"]
    assert (row["calls"], row["turns"]) == (3, 2)
    assert (row["exact_turns"], row["echo_changed_turns"]) == (2, 1)
    assert row["traces"] == {"per_request": 3, "prefix_merging": 1}
    assert row["forwarded"] == {"per_request": 21, "prefix_merging": 10, "packed": 10}
    assert (row["ratio"], row["trained"], row["sampled"]) == (2.1, 6, 6)
    assert (row["canonical_dropped"], row["canonical_false"]) == (0, 0)


def test_tokens_that_the_published_rule_trains_in_a_false_context_are_counted(rows: Rows) -> None:
    """An edited answer makes two traces; the published rule trains two tokens in a false context.

    With packing, the shared prefix of two tokens is computed once.
    """
    row = rows["pi", "team"]
    assert (row["turns"], row["exact_turns"]) == (1, 0)
    assert row["traces"] == {"per_request": 2, "prefix_merging": 2}
    assert row["forwarded"] == {"per_request": 11, "prefix_merging": 11, "packed": 9}
    assert row["canonical_false"] == 2


def test_traces_without_trained_tokens_are_not_counted_as_forwarded(rows: Rows) -> None:
    """The trace of a title is not forwarded; a stage outside of `STAGES` has no row."""
    row = rows["pi", "title"]
    assert row["traces"]["prefix_merging"] == 2
    assert row["forwarded"] == {"per_request": 4, "prefix_merging": 4, "packed": 4}
    assert (row["trained"], row["sampled"], row["turns"]) == (2, 3, 0)
    assert ("pi", "budget") not in rows


def test_the_synthetic_session_shows_the_effect_of_length(rows: Rows) -> None:
    """Forty turns of 600 tokens after 8,000 are forwarded once if merged, else every request."""
    row = rows["(synthetic)", ""]
    forwarded = row["forwarded"]
    assert forwarded["prefix_merging"] == forwarded["packed"] == 8000 + 40 * 600 - 300
    assert row["ratio"] > 20
    assert row["canonical_dropped"] == 0


def test_samples_of_a_task_share_prefixes(tmp_path: Path) -> None:
    """The common prompt of three samples is computed once, and so is the answer of two of them."""
    other = [call(0, [1, 2], [4, 4, END])]
    write(tmp_path / "recordings" / "a.1.rec", "t", TURNS[:1])
    write(tmp_path / "recordings" / "b.1.rec", "t", other)
    write(tmp_path / "recordings" / "c.1.rec", "t", other)
    (group,) = measure("builders", "run.py", "--json", "--sessions", tmp_path)["groups"]
    assert group == {"task": "t", "sessions": 3, "prefix_merging": 14, "tree": 14, "forest": 7}


def test_a_folder_without_sessions_is_an_error(tmp_path: Path) -> None:
    """A folder without sessions is exit code 2 and one line that names the folder."""
    command = [sys.executable, str(ROOT / "builders" / "run.py"), "--sessions", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"tugline: {tmp_path} contains no recordings")


@pytest.mark.slow
def test_training_cost_depends_on_the_builder() -> None:
    """Fifty turns are fifty traces or one; merged, the same tokens are trained in fewer updates."""
    rows = measure("builders", "run.py", "--json", "--train", "--scale", "0.002")["rows"]
    names = ("builder", "batching", "packed")
    alone = {tuple(row[name] for name in names): row for row in rows if row["shape"] == "alone"}
    assert len(alone) == 4
    separate = alone["per_request", "published", "no"]
    merged = alone["prefix_merging", "ours", "no"]
    packed = alone["prefix_merging", "ours", "yes"]
    assert (separate["traces"], separate["updates"]) == (200, 100)
    assert (merged["traces"], merged["updates"]) == (4, 2)
    assert separate["tokens_trained"] == merged["tokens_trained"] == 4 * 50 * 2
    assert separate["tokens_forwarded"] > 20 * merged["tokens_forwarded"]
    assert merged["tokens_forwarded"] - packed["tokens_forwarded"] == 2 * 16

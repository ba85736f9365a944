"""`examples/swe_gym` at toy size, with real parts, one harness a run.

A tiny model of Qwen3.5's architecture, the real harness, SWE-bench's grading and the embedded
engine. The core of the suite runs the harness whose turn it is by the commit's hash.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.commands import TUGLINE
from support.swe_gym import ROOT, STEPS, make_start, read_metrics, run
from tugline.recording.file import read
from tugline.recording.folder import list_recordings
from tugline.sandbox.bubblewrap import Bubblewrap

HARNESSES = ("pi", "codex", "claude_code", "qwen_code")


def find_turn() -> str:
    """The harness whose turn it is; the first one outside a clone."""
    head = ("git", "-C", str(ROOT), "rev-parse", "HEAD")
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    return HARNESSES[int(commit or "0", 16) % len(HARNESSES)]


TURN = find_turn()


def count_calls(run_folder: Path) -> dict[int, list[int]]:
    """Model calls of each session, by training step, of three groups each."""
    calls: dict[int, list[int]] = {}
    for path in list_recordings(run_folder):
        recording = read(path)
        assert recording.header is not None
        session = recording.header.session.id
        if session.startswith("g"):
            group = int(session[1:8])
            calls.setdefault(1 + group // 3, []).append(len(recording.calls))
    return calls


@pytest.mark.experiment
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "harness",
    [pytest.param(name, marks=() if name == TURN else pytest.mark.nightly) for name in HARNESSES],
)
def test_the_toy_is_trained_and_evaluated(harness: str, tmp_path: Path) -> None:
    """Two GRPO steps with a real harness have a signal, and change the weights that are served."""
    if reason := Bubblewrap().check_available():
        pytest.skip(reason)
    example = make_start(tmp_path, "--harness", harness)
    own = ("--set", f"template.harness.name={harness}")
    output = run(example, TUGLINE, "train", "toy/train.yaml", *own, "--out", "runs/toy")
    trained = example / "runs" / "toy"

    metrics = read_metrics(trained)
    assert {metrics[step]["heldout/attempts"] for step in (0, 2)} == {4.0}, output
    assert {metrics[step]["heldout/unrewarded"] for step in (0, 2)} == {0.0}
    calls = count_calls(trained)
    for step in STEPS:
        own_metrics = metrics[step]
        assert (own_metrics["rollout/sessions"], own_metrics["rollout/failed"]) == (12, 0), output
        assert own_metrics["rollout/signal"] >= 1, output
        assert own_metrics["update/updates"] == 1
        assert own_metrics["update/mismatch/total/max_abs"] <= 1e-4
        compared = own_metrics["update/mismatch/total/tokens"]
        assert compared == own_metrics["update/tokens_trained"] > 0
        assert own_metrics["publish/arrived"] == pytest.approx(1, abs=1e-2)
        assert own_metrics["publish/moved"] > 10 * own_metrics["publish/max_abs_dlogprob"]
        assert own_metrics["publish/max_abs_dlogprob"] <= 1e-4
        assert max(calls[step]) >= 5, Counter(calls[step])

    before, after = (
        load_file(folder / "model" / "model.safetensors")
        for folder in (example / "toy" / "start" / "sft", trained)
    )
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    seen = {name for name in before if ".visual." in name}
    assert seen
    assert not changed & seen
    assert any("linear_attn" in name for name in changed)
    assert any("self_attn" in name for name in changed)

    served = ("--model", trained / "model", "--renderer", "qwen3.5", "--slots", "2")
    limit = ("--set", "select.limit=1")
    measured = ("toy/verified.yaml", *served, *own, *limit, "--out", "runs/eval")
    run(example, TUGLINE, "eval", *measured)
    report = json.loads((example / "runs" / "eval" / "evaluation.json").read_text())["evaluation"]
    assert (report["attempts"], report["unrewarded"]) == (1, 0)

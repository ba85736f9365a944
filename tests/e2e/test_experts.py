"""A mixture of experts is trained with the real pi, on the experts that its engine used."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.conftest import end, kill_when, start
from support.commands import TUGLINE
from support.training import check_totals
from support.upcycle import save_mixture
from tugline.inference.routers import use_routers
from tugline.recording import file as recordings
from tugline.recording.folder import list_recordings
from tugline.trainers.config import MODEL
from tugline.trainers.sinks import METRICS, read_lines
from tugline.types import Call

STEPS = 3
MISMATCH = "update/mismatch/total/max_abs"
OWN_CHOICE = "update/mismatch/without_replay/max_abs"


def write_config(folder: Path, **sampling: Any) -> Path:
    """Write a run of three small steps on the demo's tasks, with pi, from a mixture of experts.

    Each second session of a task earns 1, whatever it did, so that every step has a signal. With
    more noise, float32 changes some tokens by more than 1e-4 nats, whoever computes them.
    """
    save_mixture(folder / "start", noise=0.02)
    tasks = {"split": "train", "seed": 0, "count": 2 * STEPS}
    config = {
        "model": "start",
        "tasks": {"taskset": {"name": "tugline.demo.tasks:RepairTasks", "options": tasks}},
        "template": {
            "harness": {"name": "pi"},
            "runtime": {"name": "local"},
            "evaluator": {"name": "function", "options": {"target": "support.training:by_sample"}},
            "limits": {"agent_s": 90, "max_turns": 6},
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 120}
            | sampling,
        },
        "engine": {"renderer": "qwen3"},
        "window": 2560,
        "node": {"slots": 3},
        "grpo": {"lr": 0.0005},
        "schedule": {"steps": STEPS, "tasks_per_step": 2, "samples": 3, "checkpoint_every": 1},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@torch.no_grad()
def recompute(model: Any, call: Call) -> np.ndarray:
    """Log probabilities of an answer by a plain forward pass with the recorded experts and sets."""
    ids = np.concatenate((call.prompt_ids, call.sampled_ids))
    assert call.experts is not None
    rows = torch.full((len(ids), *call.experts.shape[1:]), -1)
    rows[: len(call.experts)] = torch.from_numpy(call.experts.astype(np.int64))
    for layer, router in enumerate(use_routers(model)):
        router.replayed = rows[:, layer]
    start = len(call.prompt_ids) - 1
    logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, start:-1].double()
    logits /= call.sampling.temperature or 1.0
    if call.kept is not None:
        for at, kept in enumerate(call.kept):
            outside = torch.ones(logits.shape[1], dtype=torch.bool)
            outside[torch.from_numpy(kept.astype(np.int64))] = False
            logits[at, outside] = -torch.inf
    values = torch.log_softmax(logits, 1)
    sampled = torch.from_numpy(call.sampled_ids.astype(np.int64))
    return values.gather(1, sampled[:, None])[:, 0].numpy()


@pytest.mark.pi
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02}])
async def test_experts_are_trained_with_real_tools_across_a_crash(
    tmp_path: Path, sampling: dict[str, float]
) -> None:
    """Every trained token is recomputed, with its experts and its kept set, within 1e-4 nats.

    The run is killed with kill -9 after its first update and resumed. Truncated sampling leaves no
    token untrained, and the published weights are read by transformers under the hub's names.
    """
    write_config(tmp_path, **sampling)
    run = tmp_path / "run"
    train = (TUGLINE, "train", "config.json", "--out", "run")
    process = await start(tmp_path, *train)
    await kill_when(process, lambda: any("publish/version" in r for r in read_lines(run / METRICS)))
    out, _ = await end(await start(tmp_path, *train, "--resume", "--json"))
    state = json.loads(out)["state"]
    rows = check_totals(run, state, steps=STEPS, sessions=2 * 3 * STEPS)
    masked = Counter[str](state["ledger"]["masked"])
    assert not masked["unreproducible"] + masked["no_routes"] + masked["routes_changed"]
    assert state["updates"] == STEPS
    mismatch = [row[MISMATCH] for row in rows if MISMATCH in row]
    assert max(mismatch) <= 1e-4
    assert all(OWN_CHOICE in row for row in rows if MISMATCH in row)
    calls = [c for f in list_recordings(run / "recordings") for c in recordings.read(f).calls]
    first = [call for call in calls if {span.version for span in call.versions} == {0}]
    # in float64, so that the difference is the engine's alone
    exact = AutoModelForCausalLM.from_pretrained(
        tmp_path / "start", dtype=torch.float64, experts_implementation="eager"
    )
    distances = [np.abs(recompute(exact, call) - call.logprobs).max() for call in first]
    assert max(distances) <= 1e-4
    assert any(call.number > 0 for call in first), "several turns"
    trained = AutoModelForCausalLM.from_pretrained(run / MODEL, dtype=torch.float32)
    weights = trained.state_dict()
    assert any(
        not torch.equal(weights[name], value)
        for name, value in exact.float().state_dict().items()
        if name.endswith("mlp.gate.weight")
    ), "the routers are trained"

"""Losses and advantages, compared with TRL's own functions and with numbers of verl and prime-rl.

`foreign_losses.json` was made by `foreign_losses.py`, which names the versions. Its tokens are off
policy, of several versions, with stale ones and tool output left out, in sessions of one and two
traces.
"""

from __future__ import annotations

import importlib
import json
import types
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as change

from trainers.sessions import sample
from tugline.trainers.grpo.advantage import grade, whiten
from tugline.trainers.grpo.batch import MicroBatch, Row, collate
from tugline.trainers.grpo.config import ESTIMATORS, LOSSES, GrpoConfig
from tugline.trainers.grpo.loss import cross_entropy, token_terms
from tugline.trainers.grpo.objectives import BUILT_IN, find_loss
from tugline.trainers.grpo.shaping import penalise_length
from tugline.trainers.grpo.tokens import TrainedTokens
from tugline.trainers.grpo.train import sum_by_session
from tugline.trainers.grpo.update import Recomputed
from tugline.types import Ledger, Reward, Sample, Span, Status, Trace, Trajectory

FOREIGN = json.loads(Path(__file__).with_name("foreign_losses.json").read_text())
TRACES: list[dict[str, Any]] = FOREIGN["traces"]
DOUBLE = 1e-10
"""Largest difference of losses and gradients in float64."""
SINGLE = 1e-6
"""Largest relative difference, of norms, in float32."""


def make_samples() -> list[Sample]:
    """The traces of the file; tokens without a loss are masked."""
    made = []
    for trace in TRACES:
        mask = np.array([False, *trace["mask"]])
        row = sample([0] * len(mask), mask.tolist(), session=str(trace["session"]))
        row.logprobs[1:] = trace["behaviour"]
        row.advantages[mask] = trace["advantage"]
        made.append(row)
    return made


def select(name: str) -> np.ndarray:
    """A field of the trained tokens of all traces; float64."""
    parts = [np.array(trace[name], np.float64)[trace["mask"]] for trace in TRACES]
    return np.concatenate(parts)


def make_pass(dtype: torch.dtype, *, by_trace: bool) -> MicroBatch:
    """The traces as a pass; `by_trace` divides by the tokens of a trace, then by the traces."""
    samples = make_samples()
    total = sum(row.trained for row in samples)
    rows = []
    for row, trace in zip(samples, TRACES, strict=True):
        old = np.array(trace["old"], np.float32)[trace["mask"]]
        weight = 1 / (len(TRACES) * row.trained) if by_trace else 1 / total
        rows.append(Row(row, weight=weight, old=old))
    micro = collate(rows, tree=False, device=torch.device("cpu"))
    floats = {
        field.name: getattr(micro, field.name).to(dtype)
        for field in fields(micro)
        if isinstance(getattr(micro, field.name), torch.Tensor)
        and getattr(micro, field.name).is_floating_point()
    }
    weights = [row.weight for row in rows for _ in range(row.sample.trained)]
    return replace(micro, **floats | {"weight": torch.tensor(weights, dtype=dtype)})


def run_ours(
    config: GrpoConfig, dtype: torch.dtype, *, by_trace: bool
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of all tokens."""
    micro = make_pass(dtype, by_trace=by_trace)
    new = torch.tensor(select("new"), dtype=dtype).requires_grad_()
    reference = None
    if config.needs_reference:
        reference = torch.tensor(select("reference"), dtype=dtype)
    tokens = TrainedTokens.of(micro, reference, config)
    terms = token_terms(new, tokens, config, find_loss(config.loss))
    loss = (terms.loss * tokens.weights).sum()
    loss.backward()
    return loss.item(), new.grad.double()


def assert_equal(
    config: GrpoConfig, loss: float, gradient: torch.Tensor, *, by_trace: bool
) -> None:
    """Our loss and gradient are those given, in both precisions."""
    assert float(gradient.abs().max()) > 0
    own, slope = run_ours(config, torch.float64, by_trace=by_trace)
    assert abs(own - loss) < DOUBLE
    assert float((slope - gradient).abs().max()) < DOUBLE
    single, slope = run_ours(config, torch.float32, by_trace=by_trace)
    assert abs(single - loss) < SINGLE * max(abs(loss), float(gradient.norm()))
    assert float((slope - gradient).norm()) < SINGLE * float(gradient.norm())


@pytest.mark.parametrize("name", FOREIGN["losses"])
def test_losses_are_those_of_verl(name: str) -> None:
    """Loss and gradient of each case are the numbers that verl computed."""
    case = FOREIGN["losses"][name]
    gradient = torch.tensor(case["gradient"], dtype=torch.float64)
    assert_equal(GrpoConfig(**case["given"]), case["loss"], gradient, by_trace=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_cross_entropy_is_that_of_prime_rl(dtype: torch.dtype) -> None:
    """Its divisor are the chosen tokens, here all that have no policy loss."""
    case = FOREIGN["cross_entropy"]
    parts = [np.array(trace["new"], np.float64)[~np.array(trace["mask"])] for trace in TRACES]
    new = torch.tensor(np.concatenate(parts), dtype=dtype).requires_grad_()
    loss = cross_entropy(new, torch.full_like(new, case["weight"] / len(new))).sum()
    loss.backward()
    gradient = torch.tensor(case["gradient"], dtype=torch.float64)
    within = DOUBLE if dtype == torch.float64 else SINGLE * abs(case["loss"])
    assert abs(loss.item() - case["loss"]) < within
    assert float((new.grad.double() - gradient).norm()) < within


# --------------------------------------------------------------------------- TRL
def run_trl(trainer_class: Any, settings: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of TRL's `_compute_loss`, whose log probabilities are given."""
    longest = max(len(trace["mask"]) for trace in TRACES)

    def pad(name: str) -> torch.Tensor:
        rows = [np.array(trace[name], np.float64) for trace in TRACES]
        return torch.tensor(np.stack([np.pad(row, (0, longest - len(row))) for row in rows]))

    new = pad("new").requires_grad_()
    mask = pad("mask")
    entropy = torch.zeros_like(new)
    whole = types.SimpleNamespace
    accelerator = whole(
        num_processes=1, gather=lambda values: values, reduce=lambda values, **_: values
    )
    given = {
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "_entropy_bonus_enabled": False,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": longest,
        "aux_loss_enabled": False,
    }
    options = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
    }
    options |= {name: value for name, value in settings.items() if name in options}
    given |= {name: value for name, value in settings.items() if name not in options}
    trainer = object.__new__(trainer_class)  # its constructor loads a model
    trainer.__dict__ |= given | {
        "args": whole(**options),
        "accelerator": accelerator,
        "model": whole(training=True),
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (new, entropy, None),
    }
    inputs = {
        "prompt_ids": torch.zeros(len(TRACES), 1),
        "prompt_mask": torch.ones(len(TRACES), 1),
        "completion_ids": torch.zeros_like(new),
        "completion_mask": torch.ones_like(mask),
        "tool_mask": mask,
        "advantages": torch.tensor([t["advantage"] for t in TRACES], dtype=torch.float64),
        "old_per_token_logps": pad("old"),
        "sampling_per_token_logps": pad("behaviour"),
        "ref_per_token_logps": pad("reference"),
        "num_items_in_batch": mask.sum(),
    }
    torch.set_default_dtype(torch.float64)  # its temperatures of SAPO are tensors of this type
    try:
        loss = trainer._compute_loss(trainer.model, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    return loss.item(), new.grad[mask.bool()]


TRL_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "clip": ({}, {}, False),
    "clip, by trace": ({}, {"loss_type": "grpo"}, True),
    "gspo": (
        {"ratio_level": "trace"},
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        True,
    ),
    "cispo": (
        {"loss": "cispo", "clip_low": 1.0},
        {"loss_type": "cispo", "epsilon_high": 1.28},
        False,
    ),
    "sapo": ({"loss": "sapo"}, {"loss_type": "sapo"}, True),
    "sapo, other temperatures": (
        {"loss": "sapo", "sapo_positive": 0.7, "sapo_negative": 2.0},
        {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
        True,
    ),
    "gmpo": (
        {"loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4},
        {"epsilon_low": 0.4, "epsilon_high": 0.4},
        True,
    ),
    "off-policy traces": ({"off_policy_threshold": 0.1}, {"off_policy_mask_threshold": 0.1}, False),
    "off-policy traces, cispo": (
        {"loss": "cispo", "clip_low": 1.0, "off_policy_threshold": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.28, "off_policy_mask_threshold": 0.1},
        False,
    ),
    "kl": ({"kl": 0.3}, {"beta": 0.3}, False),
    "kl, sapo": ({"kl": 0.3, "loss": "sapo"}, {"beta": 0.3, "loss_type": "sapo"}, True),
    "corrected kl": (
        {"kl": 0.3, "kl_correction": True},
        {"beta": 0.3, "use_bias_correction_kl": True},
        False,
    ),
}
"""Our settings, TRL's, and whether its divisor is that of traces."""


@pytest.mark.parametrize("name", TRL_CASES)
def test_losses_are_those_of_trl(name: str) -> None:
    """Loss and gradient of each case are those of the installed TRL's function, in float64."""
    ours, theirs, by_trace = TRL_CASES[name]
    module = "trl.experimental.gmpo" if "gmpo" in name else "trl"
    kind = "GMPOTrainer" if "gmpo" in name else "GRPOTrainer"
    trainer = getattr(importlib.import_module(module), kind)
    loss, gradient = run_trl(trainer, theirs)
    assert_equal(GrpoConfig(**ours), loss, gradient, by_trace=by_trace)


def test_every_loss_is_compared() -> None:
    """Each built-in loss has a case of another implementation and a name in the config."""
    compared = {case["given"].get("loss", "clip") for case in FOREIGN["losses"].values()}
    compared |= {ours.get("loss", "clip") for ours, _, _ in TRL_CASES.values()}
    assert compared == {*LOSSES} == {*BUILT_IN}
    assert {*ESTIMATORS} == {*FOREIGN["advantages"]} - {"kl_reward"}


GIVEN = [case["given"] for case in FOREIGN["losses"].values()]
GIVEN += [ours for ours, _, _ in TRL_CASES.values()]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_the_cases_reach_both_branches(given: dict[str, Any]) -> None:
    """Some tokens of a case are clipped, capped, out of bounds or far, and some are not."""
    config = GrpoConfig(**given)
    tokens = TrainedTokens.of(make_pass(torch.float64, by_trace=False), None, config)
    figures = token_terms(
        torch.tensor(select("new")), tokens, config, find_loss(config.loss)
    ).figures
    wanted = {"clipped", "capped", "off_policy"} & {*figures}
    if given.get("importance_high", 1e9) < 1e9:
        wanted.add("bounded")
    if given.get("ratio_cap") == 20:
        wanted.remove("capped")
    for figure in wanted:
        assert 0 < float(figures[figure].double().mean()) < 1, figure


# --------------------------------------------------------------------------- advantages
def make_sessions() -> list[Trajectory]:
    """Sessions of the file with one trace each, which has all of their trained tokens."""
    made = []
    for number, (task, reward) in enumerate(zip(FOREIGN["tasks"], FOREIGN["rewards"], strict=True)):
        count = FOREIGN["counts"][number]
        mask = np.arange(count + 1) > 0
        trace = Trace(
            ids=np.zeros(count + 1, np.int32),
            mask=mask,
            logprobs=np.zeros(count + 1, np.float32),
            spans=(Span(0, 1, count + 1, 0),),
        )
        made.append(
            Trajectory(
                session=str(number),
                task=task,
                sample=number,
                status=Status.COMPLETED,
                traces=(trace,),
                ledger=Ledger(sampled=count, trained=count),
                reward=Reward(reward),
            )
        )
    return made


def grade_all(config: GrpoConfig, penalties: dict[str, float] | None = None) -> np.ndarray:
    """The advantage of each session of the file."""
    sessions = make_sessions()
    graded: dict[str, float] = {}
    for task in sorted({each.task for each in sessions}):
        group = [each for each in sessions if each.task == task]
        graded |= {n: v[0][0] for n, v in grade(group, config, penalties or {})[0].items()}
    return np.array([graded[each.session] for each in sessions])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_those_of_verl_and_prime_rl(name: str) -> None:
    """Advantages of sessions are the numbers that verl, or prime-rl for `max_rl`, computed."""
    case = FOREIGN["advantages"][name]
    got = grade_all(GrpoConfig(advantage=name, **case.get("given", {})))
    if name == "reinforce_plus_plus":
        ends = np.cumsum(FOREIGN["counts"])
        got = whiten(np.repeat(got, FOREIGN["counts"]))[ends - 1]
    assert np.abs(got - case["values"]).max() < DOUBLE


def test_the_divergence_in_the_reward_is_that_of_verl() -> None:
    """Log ratios of all traces of a session are subtracted from its reward before the baseline."""
    case = FOREIGN["advantages"]["kl_reward"]
    config = GrpoConfig(**case["given"])
    ratios = [
        Recomputed(row, (np.array(trace["old"]) - np.array(trace["reference"]))[trace["mask"]])
        for row, trace in zip(make_samples(), TRACES, strict=True)
    ]
    got = grade_all(config, sum_by_session(ratios, config.kl_reward))
    assert np.abs(got - case["values"]).max() < DOUBLE


@pytest.mark.parametrize("row", FOREIGN["overlong"], ids=lambda row: str(row["tokens"]))
def test_overlong_sessions_lose_reward_as_in_verl(row: dict[str, Any]) -> None:
    """A session's reward of 1 is reduced by its number of sampled tokens."""
    config = GrpoConfig(overlong_length=20, overlong_buffer=7, overlong_penalty=0.5)
    assert abs(1.0 - penalise_length(row["tokens"], config) - row["reward"]) < DOUBLE
    session = make_sessions()[0]
    long = change(session, ledger=Ledger(sampled=row["tokens"]), reward=Reward(1.0))
    short = change(session, session="short", ledger=Ledger(sampled=1), reward=Reward(0.0))
    graded, _ = grade([long, short], change(config, advantage="dr_grpo"))
    assert graded[long.session][0][0] == pytest.approx(row["reward"] / 2)

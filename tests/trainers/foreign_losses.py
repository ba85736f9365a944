"""Reference values of losses and advantages, computed by verl 0.9.1 and by prime-rl's source.

Run with the Python of verl's environment, which `python tools/engines.py verl` makes, and with a
checkout of prime-rl (commit 559b4477)::

    ~/.cache/tugline/engines/verl-0.9.1/bin/python tests/trainers/foreign_losses.py PRIME_RL

It writes `foreign_losses.json`. Everything is computed in float64 from values of float32. No
formula is written down here: each number is the result of a function of theirs.
"""

import asyncio
import json
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import FSDPActorConfig

TASKS = ["a", "a", "a", "a", "b", "b", "b"]
"""Task of each session."""
REWARDS = [1.0, 0.0, 0.25, 0.0, 0.5, 2.0, 0.0]
TRACES = [0, 0, 0, 1, 2, 2, 3, 4, 5, 5, 6]
"""Session of each trace."""
LONGEST = 14
LATEST_STALE = 2
"""Version from which tokens are trained; older ones are masked."""


def make_traces() -> list[dict[str, Any]]:
    """Traces with answers, tool output between them, and tokens of several versions."""
    rng = np.random.default_rng(40)
    traces = []
    for session in TRACES:
        count = int(rng.integers(6, LONGEST + 1))
        new = np.log(rng.uniform(0.02, 0.98, count))
        old = np.minimum(new + rng.normal(0, 0.7, count), -1e-3)
        versions = rng.integers(1, 6, count)
        tool = rng.uniform(size=count) < 0.2
        parts = {
            "new": new,
            "old": old,
            "behaviour": np.minimum(old + rng.normal(0, 0.15, count), -1e-3),
            "reference": np.minimum(new + rng.normal(0, 0.5, count), -1e-3),
        }
        rounded = {name: values.astype(np.float32).tolist() for name, values in parts.items()}
        mask = ~tool & (versions >= LATEST_STALE)
        mask[-1] = True
        traces.append(
            {
                "session": session,
                "advantage": float(np.float32(rng.normal())) if session != 3 else 0.0,
                "mask": mask.tolist(),
                **rounded,
            }
        )
    for trace in traces:  # all traces of a session have its advantage
        trace["advantage"] = next(t for t in traces if t["session"] == trace["session"])[
            "advantage"
        ]
    return traces


def pad(traces: list[dict[str, Any]], name: str) -> torch.Tensor:
    """A field of all traces, padded with zeros on the right; float64."""
    rows = [np.asarray(trace[name], np.float64) for trace in traces]
    return torch.tensor(np.stack([np.pad(row, (0, LONGEST - len(row))) for row in rows]))


def run_loss(
    traces: list[dict[str, Any]], name: str, weights: torch.Tensor | None = None, **settings: Any
) -> dict[str, Any]:
    """Loss and gradient of one of verl's policy losses, in verl's own normalisation."""
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=False,
        **settings,
    )
    mask = pad(traces, "mask")
    new = pad(traces, "new").requires_grad_()
    advantage = torch.tensor([[t["advantage"]] for t in traces]).double() * mask
    loss, _ = core_algos.get_policy_loss_fn(name)(
        pad(traces, "old"), new, advantage, mask, config=config, rollout_is_weights=weights
    )
    loss.backward()
    return {"loss": loss.item(), "gradient": new.grad[mask.bool()].tolist()}


def run_losses(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Every loss by name, with our settings of it (`given`) and the divisor (`divisor`)."""
    mask = pad(traces, "mask")
    gap = (pad(traces, "old") - pad(traces, "behaviour")) * mask

    def correct(level: str, threshold: str | float) -> torch.Tensor:
        return compute_rollout_correction_weights(gap, mask, level, threshold)[0]

    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    near = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
    none = {"clip_ratio_c": 1e9}
    base = {"importance": "truncate", "importance_high": 1e9}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("clip", {}, run_loss(traces, "vanilla", **bounds, **none)),
        (
            "dual_clip",
            {"loss": "dual_clip", "ratio_cap": 1.5},
            run_loss(traces, "vanilla", **bounds, clip_ratio_c=1.5),
        ),
        ("cispo", {"loss": "cispo"}, run_loss(traces, "cispo", **bounds)),
        (
            "dppo_tv",
            {"loss": "dppo_tv", "clip_low": 0.05, "clip_high": 0.08, "ratio_cap": 1.5},
            run_loss(traces, "dppo_tv", **near, clip_ratio_c=1.5),
        ),
        (
            "dppo_kl",
            {"loss": "dppo_kl", "clip_low": 0.05, "clip_high": 0.08, "ratio_cap": 1.5},
            run_loss(traces, "dppo_kl", **near, clip_ratio_c=1.5),
        ),
        (
            "importance of tokens",
            {"importance": "truncate", "importance_high": 1.1},
            run_loss(traces, "vanilla", correct("token", 1.1), **bounds, **none),
        ),
        (
            "importance of tokens, masked",
            {"importance": "mask", "importance_low": 0.9, "importance_high": 1.1},
            run_loss(traces, "vanilla", correct("token", "0.9_1.1"), **bounds, **none),
        ),
        (
            "importance of traces, masked",
            {
                "importance": "mask",
                "importance_level": "product",
                "importance_low": 0.7,
                "importance_high": 1.4,
            },
            run_loss(traces, "vanilla", correct("sequence", "0.7_1.4"), **bounds, **none),
        ),
        (
            "importance of traces, truncated",
            {"importance": "truncate", "importance_level": "product", "importance_high": 1.2},
            run_loss(traces, "vanilla", correct("sequence", 1.2), **bounds, **none),
        ),
        (
            "dppo_tv with importance",
            {"loss": "dppo_tv", "clip_low": 0.05, "clip_high": 0.08, "ratio_cap": 20.0, **base},
            run_loss(traces, "dppo_tv", correct("token", 1e9), **near, clip_ratio_c=20.0),
        ),
    ]
    return {name: {"given": given, **result} for name, given, result in cases}


# --------------------------------------------------------------------------- advantages
def run_advantages(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """The advantage of each session; a row is a session with more tokens than its traces have.

    verl adds 1e-8 to the number of tokens, by which its mean of 80 tokens is off by 1e-10.
    """
    counts = [
        8 * sum(sum(t["mask"]) for t in traces if t["session"] == session)
        for session in range(len(TASKS))
    ]
    mask = torch.zeros(len(TASKS), max(counts)).double()
    for row, count in zip(mask, counts, strict=True):
        row[:count] = 1
    scores = torch.zeros_like(mask)
    scores[:, 0] = torch.tensor(REWARDS)

    def run(name: str, scores: torch.Tensor, **settings: Any) -> list[float]:
        estimate = core_algos.get_adv_estimator_fn(name)
        values, _ = estimate(scores, mask, index=np.array(TASKS), **settings)
        return values[:, 0].tolist()

    gap = torch.zeros_like(mask)
    for session, row in enumerate(gap):
        own = [t for t in traces if t["session"] == session]
        parts = [np.array(t["old"])[t["mask"]] - np.array(t["reference"])[t["mask"]] for t in own]
        row[: counts[session] // 8] = torch.tensor(np.concatenate(parts))
    batch = DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_scores": scores,
            "old_log_probs": gap,
            "ref_log_prob": torch.zeros_like(gap),
        }
    )
    batch, _ = apply_kl_penalty(batch, FixedKLController(0.1), kl_penalty="kl")
    penalised = batch.batch["token_level_rewards"]
    return {
        "grpo": {"given": {"advantage_eps": 1e-6}, "values": run("grpo", scores)},
        "dr_grpo": {"values": run("grpo", scores, norm_adv_by_std_in_grpo=False)},
        "rloo": {"values": run("rloo", scores)},
        "reinforce_plus_plus": {"values": run("reinforce_plus_plus_baseline", scores)},
        "kl_reward": {
            "given": {"kl_reward": 0.1, "advantage_eps": 1e-6},
            "values": run("grpo", penalised),
        },
        "counts": counts,
    }


def run_max_rl(source: str) -> list[float]:
    """Advantages of prime-rl's `MaxRLAlgorithm`, whose float32 is replaced by float64."""
    given: dict[str, float] = {}

    def assign(trace: Any, advantage: float) -> None:
        given[trace.name] = advantage

    stubs = {
        "verifiers.v1": types.SimpleNamespace(Episode=object),
        "prime_rl.orchestrator.algo.base": types.SimpleNamespace(
            Algorithm=object,
            iter_trainable_traces=lambda episodes: [(each, each) for each in episodes],
        ),
        "prime_rl.orchestrator.algo.routing": types.SimpleNamespace(assign_advantages=assign),
        "verifiers": types.SimpleNamespace(v1=None),
    }
    sys.modules.update(stubs)  # type: ignore[arg-type]
    scope: dict[str, Any] = {"__name__": "max_rl"}
    exec(source.replace("torch.float32", "torch.float64"), scope)  # noqa: S102 - the point
    for task in sorted(set(TASKS)):
        episodes = [
            types.SimpleNamespace(name=str(i), reward=REWARDS[i])
            for i in range(len(TASKS))
            if TASKS[i] == task
        ]
        algorithm = object.__new__(scope["MaxRLAlgorithm"])
        asyncio.run(algorithm.score_group(episodes))
    return [given[str(i)] for i in range(len(TASKS))]


def run_cross_entropy(source: str, traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Loss and gradient of prime-rl's `compute_loss` if all masked tokens are chosen."""

    class Shape:
        def __class_getitem__(cls, _: object) -> type:
            return cls

    def plain(**_: Any) -> Any:
        return lambda function: function

    names = ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig")
    stubs = {
        "beartype": types.SimpleNamespace(beartype=None),
        "jaxtyping": types.SimpleNamespace(Bool=Shape, Float=Shape, Int=Shape, jaxtyped=plain),
        "prime_rl.configs.trainer": types.SimpleNamespace(**dict.fromkeys(names, object)),
        "prime_rl.utils.utils": types.SimpleNamespace(import_object=None),
    }
    sys.modules.update(stubs)  # type: ignore[arg-type]
    module = types.ModuleType("prime_rl_loss")
    sys.modules["prime_rl_loss"] = module
    exec(source, module.__dict__)  # noqa: S102 - the point
    new = [torch.tensor(trace["new"]).double().requires_grad_() for trace in traces]
    masks = [torch.tensor(trace["mask"]) for trace in traces]
    chosen = [~mask for mask in masks]
    zeros = [torch.zeros(len(mask)).double() for mask in masks]
    loss, _ = module.compute_loss(
        new,
        [torch.tensor(trace["behaviour"]).double() for trace in traces],
        None,
        zeros,
        masks,
        zeros,
        [0.1 * mask.double() for mask in chosen],
        None,
        None,
        1,
        int(sum(mask.sum() for mask in chosen)),
        1,
    )
    loss.backward()
    pairs = zip(new, chosen, strict=True)
    gradient = torch.cat([each.grad[mask] for each, mask in pairs if mask.any()])
    return {"weight": 0.1, "loss": loss.item(), "gradient": gradient.tolist()}


def run_overlong() -> list[dict[str, Any]]:
    """Rewards of verl's `DAPORewardManager` for answers of several lengths."""
    settings = {"enable": True, "len": 7, "penalty_factor": 0.5, "log": False}
    config = OmegaConf.create(
        {"reward": {"reward_kwargs": {"overlong_buffer_cfg": settings, "max_resp_len": 20}}}
    )

    async def score(**_: Any) -> float:
        return 1.0

    tokenizer = types.SimpleNamespace(decode=lambda *_, **__: "")
    manager = DAPORewardManager(config, tokenizer, score)
    rows = []
    for length in (1, 12, 13, 14, 17, 20, 24):
        batch = DataProto.from_dict(
            tensors={
                "responses": torch.zeros(1, 30, dtype=torch.long),
                "attention_mask": (torch.arange(32) < length + 2).long()[None],
            },
            non_tensors={
                "data_source": np.array(["x"], object),
                "reward_model": np.array([{"ground_truth": ""}], object),
                "extra_info": np.array([{}], object),
            },
        )
        result = manager.loop.run_until_complete(manager.run_single(batch))
        rows.append({"tokens": length, "reward": float(result["reward_score"])})
    return rows


def main(checkout: Path) -> None:
    """Write the file."""
    torch.set_default_dtype(torch.float64)
    traces = make_traces()
    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()

    def read(path: str) -> str:
        command = ["git", "-C", checkout, "show", f"HEAD:src/prime_rl/{path}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    advantages = run_advantages(traces)
    counts = advantages.pop("counts")
    advantages["max_rl"] = {"values": run_max_rl(read("orchestrator/algo/max_rl.py"))}
    result = {
        "command": "python tests/trainers/foreign_losses.py PRIME_RL",
        "versions": {"verl": version("verl"), "torch": torch.__version__, "prime-rl": commit},
        "tasks": TASKS,
        "rewards": REWARDS,
        "counts": counts,
        "traces": traces,
        "losses": run_losses(traces),
        "advantages": advantages,
        "overlong": run_overlong(),
        "cross_entropy": run_cross_entropy(read("trainer/rl/loss.py"), traces),
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(result, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

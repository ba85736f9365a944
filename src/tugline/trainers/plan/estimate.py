"""Memory, time and disk of a training run.

Memory follows `tugline.trainers.plan.memory`. Times are operations or bytes divided by the speeds
of `Assumptions`, which are those of one kind of GPU: they show the bottleneck, not the minute.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import msgspec

from tugline.trainers.config import TrainConfig
from tugline.trainers.grpo.forward import recomputes_layers
from tugline.trainers.grpo.packing import DEFAULT_TOKENS
from tugline.trainers.plan.memory import FLOAT32, Memory, Pass, choose_precision, estimate_memory
from tugline.trainers.plan.shape import ModelShape

GIB = 2**30
_SERVED = 2
"""Bytes of a served weight, and of a number in the cache: bfloat16."""
_CHECKPOINT = 3 * FLOAT32
"""Bytes of a trained weight in a checkpoint, with AdamW's moments."""


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds of a GPU and of its machine, and shares of them that are reached."""

    flops: float = 989e12
    """Operations per second in bfloat16, without sparsity: NVIDIA H100 SXM."""
    trainer_share: float = 0.35
    """Share of `flops` that the trainer reaches."""
    prefill_share: float = 0.4
    """Share of `flops` that an engine reaches when it reads a prompt."""
    memory_rate: float = 3.35e12
    """Bytes per second of the GPU's memory."""
    decode_share: float = 0.5
    """Share of `memory_rate` that an engine reaches when it samples."""
    balance: float = 0.9
    """Share of the time in which a rank does not wait for others (benchmarks of packing)."""
    link_rate: float = 300e9
    """Bytes per second between the GPUs of a machine."""
    host_rate: float = 25e9
    """Bytes per second between a GPU and host memory."""
    memory_file_rate: float = 1e9
    """Bytes per second of publishing to `publish_folder` on one machine, taken for memory."""
    storage_rate: float = 0.5e9
    """Bytes per second of publishing to the run's folder, or between machines."""
    gpus_per_machine: int = 8
    reserve: int = 3 * GIB
    """Bytes on a GPU for CUDA, NCCL and fragmentation."""
    engine_share: float = 0.9
    """Share of the memory that an engine takes of a GPU of its own."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of a run."""

    ranks: int
    """GPUs of the trainer: processes of torchrun."""
    engines: int
    """Number of engines, each with the whole model."""
    engine_gpus: int = 1
    """GPUs of each engine, over which it divides weights and caches."""
    share: float | None
    """Share of each of the trainer's GPUs that an engine takes; None: engines have GPUs of their
    own."""
    gpu_memory: int
    """Bytes of a GPU."""
    price: float | None = None
    """Price of a GPU for an hour."""

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        serving = self.engines * self.engine_gpus
        return max(self.ranks, serving) if self.share else self.ranks + serving


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session, as the plan of the agents' machines has it."""

    tokens: int
    """Tokens of its last context, answer included; one trace."""
    sampled: int
    other_s: float
    """Seconds in which it samples nothing: start, tools, evaluation."""
    recording: float
    """Bytes of its recording."""
    longest: int | None = None
    """Tokens of the longest trace; None: the context window of the run."""
    rate: float | None = None
    """Measured tokens per second of an engine's GPU; None: estimated."""


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of an engine on each of its GPUs."""

    weights: int
    cache: int
    """Left for the cache; negative if the weights do not fit."""
    per_session: int
    """Cache of a session with the longest trace."""
    sessions: int
    """Sessions of an engine whose contexts stay in the cache."""


@dataclass(frozen=True)
class Estimate:
    """A run, with all that its plan is computed from."""

    config: TrainConfig
    layout: Layout
    session: Session
    speeds: Assumptions
    shape: ModelShape

    @property
    def count(self) -> int:
        """Sessions of a step."""
        return self.config.schedule.tasks_per_step * self.config.schedule.samples

    @property
    def sharded(self) -> bool:
        """Whether ranks share the weights."""
        return self.config.fsdp and self.layout.ranks > 1

    @property
    def longest(self) -> int:
        """Tokens of the longest trace."""
        longest = self.session.longest or self.config.context or self.session.tokens
        return min(longest, self.shape.window)

    @cached_property
    def largest_pass(self) -> Pass:
        """The largest forward pass."""
        update = self.config.updates
        tokens = max(self.longest, update.micro_tokens or DEFAULT_TOKENS)
        sessions = min(self.count, update.sessions_per_update)
        return Pass(
            tokens=tokens,
            chunk=update.logits_chunk,
            checkpointing=recomputes_layers(update, self.shape.weights),
            offload=update.offload_activations,
            alone=sessions * self.session.tokens <= self.layout.ranks * tokens,
            foreach=True,
        )

    @cached_property
    def memory(self) -> Memory:
        """Memory of the trainer on a GPU."""
        precision = choose_precision(
            compute=self.config.grpo.autocast,
            sharded=self.sharded,
            lora=self.config.lora is not None,
        )
        ranks = self.layout.ranks if self.sharded else 1
        return estimate_memory(self.shape, precision, ranks, self.largest_pass)

    @cached_property
    def engine(self) -> EngineMemory:
        """Memory of an engine; a gated delta net has a state of fixed size in float32."""
        memory = int(self.layout.gpu_memory * (self.layout.share or self.speeds.engine_share))
        divided = self.layout.engine_gpus
        weights = self.shape.weights * _SERVED // divided
        layers = self.shape.layers
        states = sum(layer.linear_values * layer.linear_head_keys for layer in layers)
        per_session = (self.longest * self.cache_per_token + states * FLOAT32) // divided
        cache = memory - weights - self.speeds.reserve
        return EngineMemory(
            weights=weights,
            cache=cache,
            per_session=per_session,
            sessions=max(0, cache // per_session),
        )

    @property
    def cache_per_token(self) -> int:
        """Bytes of the keys and values of a token."""
        return sum(2 * layer.keys * _SERVED for layer in self.shape.layers)

    @property
    def needed(self) -> int:
        """Bytes that the trainer, and an engine beside it, need of a GPU."""
        beside = int(self.layout.gpu_memory * self.layout.share) if self.layout.share else 0
        return self.memory.total + self.speeds.reserve + beside

    @property
    def fits(self) -> bool:
        """Whether the trainer fits on its GPUs, and an engine has place for a session."""
        return self.needed <= self.layout.gpu_memory and self.engine.sessions > 0

    # ----------------------------------------------------------------- time and disk
    def time_step(self) -> dict[str, float]:
        """Return the seconds of a step by part."""
        several = self.layout.gpus > self.speeds.gpus_per_machine
        in_memory = self.config.publish_folder is not None and not several
        rate = self.speeds.memory_file_rate if in_memory else self.speeds.storage_rate
        adapter = self.config.publishes_adapter
        written = self.shape.trained if adapter else self.shape.weights
        seconds = {
            "sampling": self.time_sampling(),
            **self.time_training(),
            "publishing": 2 * written * _SERVED / rate,  # written, then read by the engines
        }
        # copied to host memory by all ranks; written in the background
        copied = _CHECKPOINT * self.shape.trained / self.layout.ranks / self.speeds.host_rate
        every = self.config.schedule.checkpoint_every
        minutes = self.config.schedule.checkpoint_minutes
        share = 1 / every if every else min(1.0, sum(seconds.values()) / (60 * minutes))
        return seconds | {"checkpoint": copied * share}

    def count_host(self) -> dict[str, int]:
        """Return bytes of host memory of all ranks."""
        return {
            "inputs of layers": self.memory.host * self.layout.ranks,
            "copy of a checkpoint": _CHECKPOINT * self.shape.trained,
            "published weights": self.published if self.config.publish_folder else 0,
        }

    @property
    def published(self) -> int:
        """Bytes of the weights that engines load, with those of the version before."""
        return 2 * self.shape.weights * _SERVED

    def time_sampling(self) -> float:
        """Return the seconds in which the sessions of a step run, in as many rounds as needed.

        A token takes the time in which an engine reads its weights, and the caches of the sessions,
        which are on average half as long as at their end.
        """
        session = self.session
        slots = self.config.node.slots
        fitting = self.layout.engines * max(1, self.engine.sessions)
        at_once = max(1, min(self.count, slots, fitting))
        each = at_once / self.layout.engines
        costs = self.shape.costs
        weights = (costs.token + costs.trained) / 2 * _SERVED
        caches = each * self.cache_per_token * session.tokens / 2
        gpus = self.layout.engine_gpus
        token_s = (weights + caches) / (gpus * self.speeds.memory_rate * self.speeds.decode_share)
        if session.rate is not None:
            token_s = each / gpus / session.rate
        prompts = each * (session.tokens - session.sampled) * costs.token
        prefill_s = prompts / (gpus * self.speeds.flops * self.speeds.prefill_share)
        rounds = self.count / at_once
        return rounds * (session.sampled * token_s + prefill_s + session.other_s)

    def time_training(self) -> dict[str, float]:
        """Return the seconds of forward and backward passes, and of what they wait for.

        A backward pass costs two forward passes, or one if the weights are frozen. Recomputing
        activations, the old log probabilities and those of the reference cost one each.
        """
        grpo = self.config.grpo
        layout = self.layout
        speeds = self.speeds
        shape = self.shape
        forward_pass = self.largest_pass
        tokens = self.session.tokens
        costs = shape.costs
        forward = costs.token * tokens + costs.pair * tokens**2 / 2
        forward = self.count * (forward + costs.trained * self.session.sampled)
        backward = (1 if shape.adapted else 2) + forward_pass.checkpointing
        several = self.count > grpo.sessions_per_update
        before = (grpo.importance is not None or several) + grpo.needs_reference
        if grpo.kl_reward > 0:
            before += 1 + (grpo.importance is not None)
        balance = speeds.balance if layout.ranks > 1 else 1.0
        reached = layout.ranks * speeds.flops * speeds.trainer_share * balance
        seconds = {
            "forward": forward * (grpo.epochs + before) / reached,
            "backward": forward * backward * grpo.epochs / reached,
        }
        positions = self.count * tokens / layout.ranks * grpo.epochs
        if self.sharded:  # weights are gathered twice, gradients reduced in float32
            moved = 2 * shape.weights * _SERVED + shape.trained * FLOAT32
            seconds["gathering"] = (
                math.ceil(positions / forward_pass.tokens) * moved / speeds.link_rate
            )
        if forward_pass.offload:
            inputs = _SERVED * shape.hidden * len(shape.layers) * positions
            seconds["offloading"] = 2 * inputs / speeds.host_rate
        return seconds

    def count_disk(self) -> dict[str, int]:
        """Return bytes on disk at the end of the run."""
        schedule = self.config.schedule
        return {
            "checkpoints": schedule.keep * _CHECKPOINT * self.shape.trained,
            "model": self.shape.weights * _SERVED,
            "published weights": 0 if self.config.publish_folder else self.published,
            "recordings": int(schedule.steps * self.count * self.session.recording),
        }

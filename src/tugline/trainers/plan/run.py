"""Plan of a training run: does it fit, how long does it take, what does it cost."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from tugline.trainers.config import Lora, TrainConfig
from tugline.trainers.plan.estimate import Assumptions, EngineMemory, Estimate, Layout, Session
from tugline.trainers.plan.memory import Memory
from tugline.trainers.plan.shape import ModelShape, read_shape

_MOST_RANKS = 64
"""Number of the trainer's GPUs up to which a change is looked for."""
_MOST_ENGINE_GPUS = 8


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements of a training run. Bytes are of one GPU, seconds of one step."""

    model: str
    weights: int
    """Parameters, without an adapter."""
    trained: int
    layers: dict[str, int]
    """Number of layers by kind."""
    layout: Layout
    pass_tokens: int
    """Largest forward pass."""
    memory: Memory
    reserve: int
    engine: EngineMemory
    needed: int
    """Bytes that the trainer needs of a GPU, with an engine beside it if they share one."""
    fits: bool
    change: str | None
    """Setting that makes it fit; None if it fits, or nothing known helps."""
    host: dict[str, int]
    """Bytes of host memory of all ranks, by kind."""
    disk: dict[str, int]
    """Bytes by kind, at the end of the run."""
    tokens: dict[str, int]
    """Tokens of a step: sampled, and positions that the trainer computes."""
    seconds: dict[str, float]
    step_s: float
    overlap: bool
    """Whether a step samples while it trains: with `schedule.staleness` above 0 and engines on
    GPUs of their own."""
    steps: int
    hours: float
    cost: float | None
    assumptions: Assumptions


def plan_training(
    config: TrainConfig, layout: Layout, session: Session, assumptions: Assumptions | None = None
) -> TrainingPlan:
    """Return the plan of a run; only ``config.json`` of the model is read. Raises `ConfigError`."""
    speeds = assumptions or Assumptions()
    run = Estimate(config, layout, session, speeds, _read(config))
    shape = run.shape
    seconds = run.time_step()
    overlap = config.schedule.staleness > 0 and not layout.share
    rest = sum(seconds.values()) - seconds["sampling"]
    step_s = max(seconds["sampling"], rest) if overlap else seconds["sampling"] + rest
    hours = step_s * config.schedule.steps / 3600
    kinds = ["full attention" if each.queries else "gated delta net" for each in shape.layers]
    return TrainingPlan(
        model=shape.name,
        weights=shape.weights,
        trained=shape.trained,
        layers={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        layout=layout,
        pass_tokens=run.largest_pass.tokens,
        memory=run.memory,
        reserve=speeds.reserve,
        engine=run.engine,
        needed=run.needed,
        fits=run.fits,
        change=None if run.fits else _find_change(run),
        host=run.count_host(),
        disk=run.count_disk(),
        tokens={"sampled": run.count * session.sampled, "trained": run.count * session.tokens},
        seconds=seconds,
        step_s=step_s,
        overlap=overlap,
        steps=config.schedule.steps,
        hours=hours,
        cost=None if layout.price is None else hours * layout.gpus * layout.price,
        assumptions=speeds,
    )


def _read(config: TrainConfig) -> ModelShape:
    assert config.model is not None  # noqa: S101 - `read_config` sets it
    return read_shape(config.model, config.lora)


# --------------------------------------------------------------------------- a change that helps
def _find_change(run: Estimate) -> str | None:
    """Return the first change that makes the run fit, as options of the command."""
    serving: list[str] = []
    layout = run.layout
    while not dataclasses.replace(run, layout=layout).engine.sessions:
        if layout.share or layout.engine_gpus == _MOST_ENGINE_GPUS:
            return None
        layout = replace(layout, engine_gpus=2 * layout.engine_gpus)
        serving = [f"--engine-gpus {layout.engine_gpus}"]
    shapes = {run.config.lora: run.shape}
    for texts, config, changed in _list_changes(run, layout):
        if config.lora not in shapes:
            shapes[config.lora] = _read(config)
        shape = shapes[config.lora]
        if dataclasses.replace(run, config=config, layout=changed, shape=shape).fits:
            return " ".join([*serving, *texts])
    return None


def _list_changes(run: Estimate, layout: Layout) -> Iterator[tuple[list[str], TrainConfig, Layout]]:
    """Yield changes, those that cost least first: none, each alone, one after the other."""
    config = run.config
    yield [], config, layout
    steps: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = []
    if config.grpo.autocast is None:
        steps.append(("--set grpo.autocast=bfloat16", {}, {"autocast": "bfloat16"}))
    if not config.fsdp and layout.ranks > 1:
        steps.append(("--set fsdp=true", {"fsdp": True}, {}))
    if not run.largest_pass.checkpointing:
        text = "--set grpo.gradient_checkpointing=true"
        steps.append((text, {}, {"gradient_checkpointing": True}))
    if not config.grpo.offload_activations:
        text = "--set grpo.offload_activations=true"
        settings = {"offload_activations": True, "gradient_checkpointing": True}
        steps.append((text, {}, settings))
    if config.lora is None:
        steps.append(("--set lora.rank=16", {"lora": Lora()}, {}))
    for text, own, grpo in steps:
        yield [text], replace(config, **own, grpo=replace(config.grpo, **grpo)), layout
    texts = []
    for text, own, grpo in steps:
        texts.append(text)
        config = replace(config, **own, grpo=replace(config.grpo, **grpo))
        yield list(texts), config, layout
        ranks = layout.ranks
        while not layout.share and config.fsdp and ranks < _MOST_RANKS:
            ranks *= 2
            yield [*texts, f"--ranks {ranks}"], config, replace(layout, ranks=ranks)

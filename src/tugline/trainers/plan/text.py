"""The plan of a training as text for people."""

from collections.abc import Iterator

from tugline.trainers.plan.estimate import GIB, Assumptions, Layout
from tugline.trainers.plan.run import TrainingPlan

_BILLION = 1e9
_SHORT_S = 0.5
"""Seconds from which a part of a step is printed."""
_PARTS = ("weights", "gradients", "optimizer", "whole", "inputs", "layer", "logits")


def describe_plan(planned: TrainingPlan) -> Iterator[tuple[str, str]]:
    """Yield subjects, each with a sentence."""
    layout = planned.layout
    kinds = ", ".join(f"{count} layers of {kind}" for kind, count in planned.layers.items())
    trained = f", {planned.trained / 1e6:,.0f} million trained" * (
        planned.trained != planned.weights
    )
    yield "model", f"{planned.model}: {planned.weights / 1e9:.2f} billion weights{trained}; {kinds}"
    yield "gpus", _describe_layout(layout)
    yield "trainer", _describe_memory(planned)
    host = ", ".join(f"{name} {size / GIB:,.1f}" for name, size in planned.host.items() if size)
    yield "host", f"{sum(planned.host.values()) / GIB:,.0f} GiB of main memory: {host}"
    yield "engine", _describe_engine(planned)
    yield "fits", _describe_fit(planned)
    disk = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in planned.disk.items() if size)
    yield "disk", f"{sum(planned.disk.values()) / 1e9:,.0f} GB: {disk}"
    sampled = planned.tokens["sampled"]
    trained_tokens = planned.tokens["trained"]
    steps = f"in each of {planned.steps:,} steps"
    yield "tokens", f"{sampled:,} sampled and {trained_tokens:,} trained {steps}"
    seconds = ", ".join(
        f"{name} {value:,.0f}" for name, value in planned.seconds.items() if value >= _SHORT_S
    )
    beside = " (sampling runs beside the rest)" if planned.overlap else ""
    yield "step", f"{planned.step_s:,.0f} s: {seconds}{beside}"
    cost = "" if planned.cost is None else f"; {planned.cost:,.0f} for {layout.gpus} GPUs"
    yield "total", f"{planned.hours:,.1f} hours without evaluations{cost}"
    yield "assumed", _describe_assumptions(planned.assumptions)


def _format_number(weights: int) -> str:
    if weights >= _BILLION:
        return f"{weights / _BILLION:.2f} billion"
    return f"{weights / 1e6:,.1f} million"


def _describe_layout(layout: Layout) -> str:
    memory = f"{layout.gpus} of {layout.gpu_memory / GIB:,.0f} GiB"
    if layout.share:
        return f"{memory}, of which engines take {layout.share:.0%}, and the trainer the rest"
    serving = layout.engines * layout.engine_gpus
    return f"{memory}: {serving} for {layout.engines} engines, {layout.ranks} for the trainer"


def _describe_memory(planned: TrainingPlan) -> str:
    memory = planned.memory
    sizes = {name: getattr(memory, name) / GIB for name in _PARTS}
    parts = ", ".join(f"{name} {size:,.1f}" for name, size in sizes.items() if size >= 0.05)
    parts += f", reserve {planned.reserve / GIB:,.1f}"
    total = (memory.total + planned.reserve) / GIB
    return (
        f"{total:,.1f} GiB of each GPU: {parts}; largest at the {memory.moment} of a pass of"
        f" {planned.pass_tokens:,} tokens"
    )


def _describe_engine(planned: TrainingPlan) -> str:
    engine = planned.engine
    return (
        f"weights {engine.weights / GIB:,.1f} GiB, cache {engine.cache / GIB:,.1f} GiB for"
        f" {engine.sessions:,} sessions of {engine.per_session / GIB:,.2f} GiB, on each GPU"
    )


def _describe_fit(planned: TrainingPlan) -> str:
    needed = f"{planned.needed / GIB:,.1f} of {planned.layout.gpu_memory / GIB:,.0f} GiB"
    if planned.fits:
        return f"yes, {needed}"
    if planned.change:
        return f"no, {needed}; it fits with {planned.change}"
    return f"no, {needed}, also with an adapter and more GPUs; choose a smaller model"


def _describe_assumptions(speeds: Assumptions) -> str:
    return (
        f"GPU of {speeds.flops / 1e12:,.0f} TFLOP/s, of which the trainer reaches"
        f" {speeds.trainer_share:.0%} and prompts {speeds.prefill_share:.0%}; memory of"
        f" {speeds.memory_rate / 1e12:.2f} TB/s, of which sampling reaches"
        f" {speeds.decode_share:.0%}; {speeds.link_rate / 1e9:,.0f} GB/s between GPUs,"
        f" {speeds.host_rate / 1e9:,.0f} to main memory; weights published at"
        f" {speeds.memory_file_rate / 1e9:.1f} GB/s in memory, {speeds.storage_rate / 1e9:.1f} on"
        " disk; one trace a session, no prefix shared between sessions"
    )

"""Resolve the sampling of a call, and refuse what this engine cannot honour. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from tugline.chat.engines.base import Feature
from tugline.chat.request import ChoiceMode, Request
from tugline.errors import RequestError, Unsupported
from tugline.types import Mode, Policy, Role, Sampling, TraceKind

_CHOSEN = ("temperature", "top_p", "top_k")


def contract_for(sampling: Sampling, sample: int) -> Sampling:
    """A task's contract for one of its samples, with a seed of its own."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=_derive_seed(sampling.seed, sample))


def resolve_sampling(
    requested: Sampling,
    contract: Sampling,
    policy: Policy,
    limits: Sequence[int | None],
    number: int,
) -> Sampling:
    """The sampling of call `number`: contract and request combined by `policy`, under `limits`.

    A session's seed gives each call one of its own, so that a call's tokens do not depend on
    concurrent calls. Raises `RequestError` where the policy refuses the request.
    """
    if policy is Policy.REFUSE:
        _refuse_deviation(requested, contract)
    first, second = (requested, contract) if policy is Policy.ALLOW else (contract, requested)
    caps = [n for n in (requested.max_tokens, contract.max_tokens, *limits) if n is not None]
    seed = requested.seed if contract.seed is None else _derive_seed(contract.seed, number)
    return Sampling(
        temperature=_first(first.temperature, second.temperature, 1.0),
        top_p=_first(first.top_p, second.top_p, 1.0),
        top_k=int(_first(first.top_k, second.top_k, 0)),
        max_tokens=min(caps) if caps else None,
        seed=seed,
        stop=first.stop or second.stop,
    )


def check_request(request: Request, mode: Mode, features: frozenset[Feature]) -> None:
    """Raise `Unsupported` naming the field that this engine cannot honour."""
    has_images = any(message.images for message in request.messages)
    if has_images and (mode is Mode.EXACT or Feature.IMAGES not in features):
        _refuse("messages", "images", "this model's prompt is made of text alone")
    if request.constraint is not None and Feature.STRUCTURED not in features:
        _refuse("response format", "structured output", "this engine has no constrained decoding")
    forced = request.tool_choice.mode in {ChoiceMode.REQUIRED, ChoiceMode.NAMED}
    if forced and not request.tools:
        msg = "tool_choice asks for a tool call, but no tools are given"
        raise RequestError(msg, param="tool_choice")
    names = {tool.name for tool in request.tools}
    for name in request.tool_choice.names:
        if name not in names:
            msg = f"tool_choice names {name!r}, which is not among the tools"
            raise RequestError(msg, param="tool_choice")
    auto = request.tool_choice.mode is ChoiceMode.AUTO
    if auto and request.tool_choice.names and names - set(request.tool_choice.names):
        _refuse("tool_choice", "a choice among some of the tools", "leave the others out instead")
    if forced and mode is not Mode.EXACT and Feature.TOOL_CHOICE not in features:
        _refuse("tool_choice", "a forced tool call", "this engine's chat route does not take it")


def classify_call(request: Request, *, declares_tools: bool) -> TraceKind:
    """The kind that the harness names; else an opening without tools is a side call.

    `declares_tools` says whether the session's calls usually declare tools.
    """
    if request.thread.kind is not None:
        return request.thread.kind
    opening = not any(message.role is Role.ASSISTANT for message in request.messages)
    if declares_tools and opening and not request.tools:
        return TraceKind.SIDE
    return TraceKind.MAIN


def _refuse(field: str, feature: str, reason: str) -> None:
    msg = f"{field}: {feature} cannot be honoured here: {reason}"
    raise Unsupported(msg, param=field.replace(" ", "_"))


def _refuse_deviation(requested: Sampling, contract: Sampling) -> None:
    for field in _CHOSEN:
        value, agreed = getattr(requested, field), getattr(contract, field)
        if value is not None and agreed is not None and value != agreed:
            msg = f"{field}={value} is refused by the task's sampling contract; it must be {agreed}"
            raise RequestError(msg, param=field)


def _derive_seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest())


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)

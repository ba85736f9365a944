"""Which sampling is really used, and what of a request this backend can honour. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from tugline.chat.engines.base import Feature
from tugline.chat.request import ChoiceMode, Request
from tugline.errors import RequestError, Unsupported
from tugline.types import Mode, Policy, Role, Sampling, TraceKind

_CHOSEN = ("temperature", "top_p", "top_k")


def contract_of(sampling: Sampling, sample: int) -> Sampling:
    """A task's contract for one of its samples: each draws from a seed of its own."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=_mixed(sampling.seed, sample))


def settle(
    asked: Sampling, contract: Sampling, policy: Policy, limits: Sequence[int | None], number: int
) -> Sampling:
    """The sampling of call `number`: contract and wish as `policy` says, capped by `limits`.

    A session's seed gives each call one of its own, so that a call's tokens do not depend on what
    else is running. Raises `RequestError` where the policy refuses the wish.
    """
    if policy is Policy.REFUSE:
        _refuse_other(asked, contract)
    first, second = (asked, contract) if policy is Policy.ALLOW else (contract, asked)
    caps = [n for n in (asked.max_tokens, contract.max_tokens, *limits) if n is not None]
    seed = asked.seed if contract.seed is None else _mixed(contract.seed, number)
    return Sampling(
        temperature=_first(first.temperature, second.temperature, 1.0),
        top_p=_first(first.top_p, second.top_p, 1.0),
        top_k=int(_first(first.top_k, second.top_k, 0)),
        max_tokens=min(caps) if caps else None,
        seed=seed,
        stop=first.stop or second.stop,
    )


def check(request: Request, mode: Mode, features: frozenset[Feature]) -> None:
    """Raises `Unsupported` naming the field that this backend cannot honour."""
    pictures = any(message.images for message in request.messages)
    if pictures and (mode is Mode.EXACT or Feature.IMAGES not in features):
        _cannot("messages", "images", "this model's prompt is made of text alone")
    if request.constraint is not None and Feature.STRUCTURED not in features:
        _cannot("response format", "structured output", "this engine has no constrained decoding")
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
        _cannot("tool_choice", "a choice among some of the tools", "leave the others out instead")
    if forced and mode is not Mode.EXACT and Feature.TOOL_CHOICE not in features:
        _cannot("tool_choice", "a forced tool call", "this engine's chat route does not take it")


def kind_of(request: Request, *, toolless_is_aside: bool) -> TraceKind:
    """What the harness says a call is; a first question without tools is beside the task."""
    if request.thread.kind is not None:
        return request.thread.kind
    opening = not any(message.role is Role.ASSISTANT for message in request.messages)
    if toolless_is_aside and opening and not request.tools:
        return TraceKind.SIDE
    return TraceKind.MAIN


def _cannot(field: str, what: str, why: str) -> None:
    msg = f"{field}: {what} cannot be honoured here: {why}"
    raise Unsupported(msg, param=field.replace(" ", "_"))


def _refuse_other(asked: Sampling, contract: Sampling) -> None:
    for field in _CHOSEN:
        wish, right = getattr(asked, field), getattr(contract, field)
        if wish is not None and right is not None and wish != right:
            msg = f"{field}={wish} is refused by the task's sampling contract; it must be {right}"
            raise RequestError(msg, param=field)


def _mixed(seed: int, place: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=4).digest())


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)

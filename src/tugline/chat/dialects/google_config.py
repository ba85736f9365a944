"""What a Google request asks for beside its contents: sampling, tools, structured output.

Google's ``Schema`` is JSON schema with its own spelling (types in capitals, ``nullable``, counts as
text); templates and grammars want the common one, so it is rewritten where it comes in.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from tugline.chat.dialects.google_parts import camel
from tugline.chat.dialects.reading import decode, items, need
from tugline.chat.request import ChoiceMode, Constraint, ConstraintKind, ToolChoice
from tugline.errors import RequestError
from tugline.types import Sampling, Tool

_ANY = msgspec.json.Decoder()
_MODES = {
    "MODE_UNSPECIFIED": ChoiceMode.AUTO,
    "AUTO": ChoiceMode.AUTO,
    "VALIDATED": ChoiceMode.AUTO,
    "ANY": ChoiceMode.REQUIRED,
    "NONE": ChoiceMode.NONE,
}
_COUNTS = re.compile("(min|max)(Items|Length|Properties)")
_SCHEMAS = ("items", "additionalProperties")
_LISTS = ("anyOf", "prefixItems")
_MAPS = ("properties", "defs", "$defs")


class Config(msgspec.Struct, rename="camel"):
    """``generationConfig``; what it does not name is accepted and changes nothing."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[float, Meta(ge=0)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop_sequences: list[str] | None = None
    candidate_count: Annotated[int, Meta(ge=1, le=8)] | None = None
    seed: int | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: Any = None
    response_modalities: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_logprobs: bool | None = None
    logprobs: int | None = None
    thinking_config: dict[str, Any] | None = None
    speech_config: Any = None
    image_config: Any = None


_CONFIG = msgspec.json.Decoder(Config)


def config(raw: Raw) -> Config:
    """The generation config, refused by name where it asks for what cannot be honoured."""
    where = "generationConfig"
    given = decode(raw, _ANY, where)
    if given is None:
        return Config()
    if not isinstance(given, dict):
        msg = f"{where}={given!r:.60} must be an object"
        raise RequestError(msg, param=where)
    found = decode(msgspec.json.encode(camel(given)), _CONFIG, where, f"{where}.")
    unusual = {
        "presencePenalty": found.presence_penalty,
        "frequencyPenalty": found.frequency_penalty,
        "responseLogprobs": found.response_logprobs,
        "logprobs": found.logprobs,
        "speechConfig": found.speech_config,
        "imageConfig": found.image_config,
        "responseModalities": [one for one in found.response_modalities or () if one != "TEXT"],
    }
    for name, value in unusual.items():
        if value:
            msg = f"{where}.{name}={value!r:.60} cannot be honoured here; leave it out"
            raise RequestError(msg, param=f"{where}.{name}")
    return found


def shows_thoughts(config: Config) -> bool:
    """Whether the answer's thoughts are told: unless the client says no."""
    return camel(config.thinking_config or {}).get("includeThoughts") is not False


def asked(config: Config) -> Sampling:
    """How the client wants tokens to be drawn."""
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=None if config.top_k is None else int(config.top_k),
        max_tokens=config.max_output_tokens,
        seed=config.seed,
        stop=tuple(config.stop_sequences or ()),
    )


def constraint(config: Config) -> Constraint | None:
    """Structured output: JSON of any shape, or of a schema."""
    where, media = "generationConfig.responseMimeType", config.response_mime_type or "text/plain"
    schema = config.response_json_schema
    if schema is None and config.response_schema is not None:
        schema = _common(config.response_schema)
    if media == "application/json":
        if schema is None:
            return Constraint(ConstraintKind.JSON_OBJECT)
        return Constraint(ConstraintKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())
    if media != "text/plain" or schema is not None:
        wanted = "'text/plain', or 'application/json' (which a response schema needs)"
        msg = f"{where}={media!r} must be {wanted}"
        raise RequestError(msg, param=where)
    return None


# --------------------------------------------------------------------------- tools
def tools(given: Any) -> tuple[Tool, ...]:
    """The declared functions; tools that run on Google's servers are refused by name."""
    found: list[Tool] = []
    for i, item in enumerate(items({"tools": given}, "tools", "")):
        where = f"tools[{i}]"
        if not isinstance(item, dict):
            msg = f"{where}={item!r:.60} must be an object"
            raise RequestError(msg, param=where)
        named = camel(item)
        declared = items(named, "functionDeclarations", where)
        hosted = sorted(
            name
            for name, value in named.items()
            if value is not None and name != "functionDeclarations"
        )
        if hosted:
            msg = (
                f"{where}.{hosted[0]} runs on Google's own servers and cannot be honoured here; "
                "only functionDeclarations are understood"
            )
            raise RequestError(msg, param=f"{where}.{hosted[0]}")
        where += ".functionDeclarations"
        found += [_tool(each, f"{where}[{j}]") for j, each in enumerate(declared)]
    return tuple(found)


def _tool(item: Any, where: str) -> Tool:
    name = need(item, "name", str, where)
    named = camel(item)
    schema = named.get("parametersJsonSchema")
    if schema is None:
        given = named.get("parameters")
        schema = {} if given is None else _common(need(named, "parameters", dict, where))
    elif not isinstance(schema, dict):
        msg = f"{where}.parametersJsonSchema={schema!r:.60} must be an object"
        raise RequestError(msg, param=f"{where}.parametersJsonSchema")
    description = named.get("description")
    return Tool(name, description if isinstance(description, str) else "", schema)


def _common(schema: dict[str, Any]) -> dict[str, Any]:
    """Google's ``Schema`` in the common spelling of JSON schema."""
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if isinstance(value, dict) and name in _MAPS:
            found[name] = {key: _deep(each) for key, each in value.items()}
        elif name in _SCHEMAS:
            found[name] = _deep(value)
        elif isinstance(value, list) and name in _LISTS:
            found[name] = [_deep(each) for each in value]
        elif name == "type" and isinstance(value, str):
            found[name] = value.lower()
        elif _COUNTS.fullmatch(name) and isinstance(value, str) and value.isdecimal():
            found[name] = int(value)
        elif name != "nullable":
            found[name] = value
    if schema.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found


def _deep(value: Any) -> Any:
    return _common(value) if isinstance(value, dict) else value


def tool_choice(raw: Raw) -> ToolChoice:
    """``toolConfig.functionCallingConfig``; VALIDATED is what AUTO means here."""
    where = "toolConfig.functionCallingConfig"
    given = decode(raw, _ANY, "toolConfig")
    calling = camel(given).get("functionCallingConfig") if isinstance(given, dict) else None
    if calling is None:
        return ToolChoice()
    if not isinstance(calling, dict):
        msg = f"{where}={calling!r:.60} must be an object"
        raise RequestError(msg, param=where)
    calling = camel(calling)
    mode = _MODES.get(str(calling.get("mode") or "AUTO").upper())
    if mode is None:
        msg = f"{where}.mode={calling.get('mode')!r} must be one of {', '.join(_MODES)}"
        raise RequestError(msg, param=f"{where}.mode")
    names = tuple(items(calling, "allowedFunctionNames", where))
    for name in names:
        if not isinstance(name, str):
            msg = f"{where}.allowedFunctionNames has {name!r:.60}; it must hold names"
            raise RequestError(msg, param=f"{where}.allowedFunctionNames")
    named = mode is ChoiceMode.REQUIRED and len(names) == 1
    return ToolChoice(ChoiceMode.NAMED if named else mode, names)

"""Parse input items of the Responses API to neutral messages and tools.

A sampled turn is echoed as several items (reasoning, message, calls), which are folded into the
sampled message, so that a conversation stays one sequence (I1). Two adjacent turns, as after an
interrupted stream, are distinguished by their item ids, which contain the id of the response.
Reasoning and conversation summaries may be sealed in ``encrypted_content``, for clients that store
nothing else.
"""

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tugline.chat.dialects import base, decoding, openai
from tugline.chat.model_call import ContentBuilder, decode_arguments, join_messages
from tugline.errors import Unsupported
from tugline.types import Message, Role, Tool, ToolCall

_SEAL = "tugline."
_THOUGHT = re.compile(r"\s*<think>.*</think>\s*", re.DOTALL)
_TURN = re.compile(r"(?:rs|msg|fc|ctc|lsh)_(.+-\d+)_\d+")
_ROLES = {role.value: role for role in Role if role is not Role.TOOL}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_SUMMARY = "What happened before this point, in summary:\n\n"

SHELL_FIELDS = frozenset({"command", "timeout_ms", "working_directory", "user", "env"})
_SHELL = base.CLIENT_TOOLS["local_shell"]


def seal(text: str) -> str:
    """Encode text as ``encrypted_content``: opaque to clients, but not encrypted."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def unseal(sealed: Any) -> str | None:
    """Return the text sealed by `seal`; None if `sealed` has another origin."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


# --------------------------------------------------------------------------- items
class ItemFolder:
    """Step of `Items.fold` that folds items into messages.

    Only earlier items are consulted, for their ids, so equal prefixes give equal messages. A
    reference stands for the whole response that contains the item, because clients refer to all
    items of a response, or to all except reasoning.
    """

    def __init__(self, items: Sequence[bytes], first: int, cache: decoding.ParseCache) -> None:
        """`first` is the index of ``input[0]`` among the items."""
        self._items, self._first, self._cache = items, first, cache

    def __call__(self, messages: list[Message], item: Any, index: int) -> None:
        """Append the item's message, or extend the response that contains the item."""
        where = f"input[{index - self._first}]"
        kind = decoding.require_object(item, where).get("type") or "message"
        if kind == "item_reference":
            response = decoding.require(item, "id", str, where).rpartition("_")[0]
            answer = self._cache.recall(response, f"{where}.id")[0][-1]
            messages += [] if messages and messages[-1] is answer else [answer]
            return
        parse = _PARSERS.get(kind) if isinstance(kind, str) else None
        if parse is None:
            advice = f"; it must be one of {', '.join(sorted(_PARSERS))}"
            raise decoding.unsupported(kind, f"{where}.type", advice)
        if kind == "local_shell_call_output" and "call_id" not in item:
            item = {**item, "call_id": self._find_call_id(item, index)}
        message = parse(item, where)
        if message is None:
            return
        both = messages and messages[-1].role is message.role is Role.ASSISTANT
        if both and _holds_call(messages[-1], message):  # both referred to and sent
            return
        if both and self._is_same_turn(item, index):
            messages[-1] = join_messages(messages[-1], message)
        else:
            messages.append(message)

    def _is_same_turn(self, item: Any, index: int) -> bool:
        turn = _find_turn(item)
        kind = item.get("type") or "message"
        previous = msgspec.json.decode(self._items[index - 1])
        if (previous.get("type") or "message") == "message" and not _is_thought(previous):
            known = _find_turn(previous)
            if kind == "message" and (turn is None or known is None):
                return False  # a response has one message at a place, so the other is not its own
            if kind == "reasoning" and turn is not None and known is None:
                return False
        while turn and index > 0:
            index -= 1
            before = msgspec.json.decode(self._items[index])
            if _find_turn(before):
                return turn == _find_turn(before)
            if not _is_of_response(before):
                break
        return True

    def _find_call_id(self, item: Any, index: int) -> Any:
        """Return the call id of an output that refers to the call by item id."""
        for at in reversed(range(index)):
            before = msgspec.json.decode(self._items[at])
            if before.get("id") == item.get("id") and before.get("type") == "local_shell_call":
                return before.get("call_id")
        return item.get("id")


def _holds_call(answer: Message, message: Message) -> bool:
    """Whether `answer` has the one tool call of `message`, in any JSON formatting."""
    calls = [
        (call.id, call.name, decode_arguments(call.arguments))
        for source in (answer, message)
        for call in source.tool_calls
    ]
    return bool(message.tool_calls) and calls[-1] in calls[:-1]


def _is_thought(item: Any) -> bool:
    """Whether a message is only inlined reasoning, as pydantic-ai sends it before an answer."""
    content = item.get("content")
    return isinstance(content, str) and _THOUGHT.fullmatch(content) is not None


def _find_turn(item: Any) -> str | None:
    match = _TURN.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
    return match[1] if match and _is_of_response(item) else None


def _is_of_response(item: Any) -> bool:
    kind = item.get("type") or "message"
    return kind in _RESPONSE_PARSERS or (kind == "message" and item.get("role") == "assistant")


def _parse_message(item: Any, where: str) -> Message:
    name = decoding.require(item, "role", str, where)
    role = _ROLES.get(name)
    if role is None:
        raise decoding.invalid(name, f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    return _parse_content(item.get("content"), f"{where}.content").build(role)


def _parse_reasoning(item: Any, where: str) -> Message | None:
    sealed = item.get("encrypted_content")
    text = unseal(sealed) or _join_texts(item, "content") or _join_texts(item, "summary")
    if not text and sealed and unseal(sealed) is None:
        raise _foreign(where)
    return Message(Role.ASSISTANT, reasoning=text) if text else None


def _join_texts(item: Any, field: str) -> str:
    parts = item.get(field)
    if not isinstance(parts, list):
        return ""
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _parse_compaction(item: Any, where: str) -> Message:
    text = unseal(item.get("encrypted_content"))
    if text is None:
        raise _foreign(where)
    return Message(Role.USER, f"{_SUMMARY}{text}")


def _foreign(where: str) -> Unsupported:
    msg = (
        f"{where}.encrypted_content was not created by this gateway and cannot be read; leave "
        "the item out"
    )
    return Unsupported(msg, param=f"{where}.encrypted_content")


def _parse_function_call(item: Any, where: str) -> Message:
    arguments = decoding.require(item, "arguments", str, where)
    return _build_call(item, where, _find_name(item, where), arguments)


def _parse_custom_call(item: Any, where: str) -> Message:
    arguments = openai.wrap_input(decoding.require(item, "input", str, where))
    return _build_call(item, where, _find_name(item, where), arguments)


def _parse_shell_call(item: Any, where: str) -> Message:
    action = decoding.require(item, "action", dict, where)
    fields = {name: value for name, value in action.items() if name in SHELL_FIELDS and value}
    return _build_call(item, where, _SHELL.name, base.encode(fields).decode())


def _build_call(item: Any, where: str, name: str, arguments: str) -> Message:
    call = ToolCall(decoding.require(item, "call_id", str, where), name, arguments)
    return Message(Role.ASSISTANT, tool_calls=(call,))


def _find_name(item: Any, where: str) -> str:
    name = decoding.require(item, "name", str, where)
    namespace = item.get("namespace")
    return f"{namespace}__{name}" if namespace else name


def _parse_output(item: Any, where: str) -> Message:
    content = _parse_content(item.get("output"), f"{where}.output")
    return content.build(Role.TOOL, decoding.require(item, "call_id", str, where))


def _parse_content(content: Any, where: str) -> ContentBuilder:
    advice = "input_text, output_text, refusal or input_image with an image_url"
    return openai.parse_content(content, where, _TEXTS, "input_image", advice)


_RESPONSE_PARSERS: dict[str, Callable[[Any, str], Message | None]] = {
    "reasoning": _parse_reasoning,
    "function_call": _parse_function_call,
    "custom_tool_call": _parse_custom_call,
    "local_shell_call": _parse_shell_call,
}
_PARSERS: dict[str, Callable[[Any, str], Message | None]] = {
    **_RESPONSE_PARSERS,
    "message": _parse_message,
    "function_call_output": _parse_output,
    "custom_tool_call_output": _parse_output,
    "local_shell_call_output": _parse_output,
    "compaction": _parse_compaction,
    "compaction_summary": _parse_compaction,
    "additional_tools": lambda _item, _where: None,  # see `list_tools`
}


# --------------------------------------------------------------------------- tools
class _Additional(msgspec.Struct):
    type: Any = ""
    tools: list[msgspec.Raw] = []


_list = msgspec.json.Decoder(list[msgspec.Raw] | None)
_additional = msgspec.json.Decoder(_Additional)


def list_tools(tools: msgspec.Raw, items: Sequence[bytes], body: bytes) -> bytes:
    """Encode the JSON list of all tools, of the request and of its items."""
    if b'"additional_tools"' not in body:
        return tools
    lists = [decoding.decode(tools, _list, "tools", "tools") or []]
    for raw in items:
        if b'"additional_tools"' in raw:
            item = decoding.decode(raw, _additional, "additional_tools", "additional_tools.")
            lists += [item.tools] if item.type == "additional_tools" else []
    return b"[" + b",".join(tool for tools in lists for tool in tools) + b"]"


def parse_tools(item: Any, where: str) -> tuple[Tool, ...]:
    """Parse the tools that an item declares, as shown to the model."""
    kind = decoding.require(item, "type", str, where)
    if kind in openai.TOOLS:
        return (openai.TOOLS[kind](item, where),)
    if kind == "local_shell":
        return (_SHELL,)
    if kind == "namespace":
        return _parse_namespace(item, where)
    off = ' (for codex: web_search = "disabled")' if kind.startswith("web_search") else ""
    advice = (
        f": OpenAI's servers run this tool; disable it in the client{off}; function, custom, "
        "local_shell and namespace tools are supported"
    )
    raise decoding.unsupported(kind, f"{where}.type", advice)


def _parse_namespace(item: Any, where: str) -> tuple[Tool, ...]:
    name = decoding.require(item, "name", str, where)
    about = item.get("description")
    tools: list[Tool] = []
    for index, inner in enumerate(decoding.require(item, "tools", list, where)):
        for tool in parse_tools(inner, f"{where}.tools[{index}]"):
            text = f"{about}\n\n{tool.description}" if about else tool.description
            named = {"name": f"{name}__{tool.name}", "description": text, "namespace": name}
            tools.append(msgspec.structs.replace(tool, **named))
    return tuple(tools)

"""Input items of the Responses API to neutral messages and tools.

One sampled turn comes back as several items (reasoning, message, calls): they are folded into the
one message that was sampled, so that a conversation goes on as one sequence (I1). Two turns with
nothing between them, as after a stream that was cut, are told apart by their item ids, which carry
the id of the answer. What the model thought, and summaries of what went before, may travel sealed
in ``encrypted_content`` for clients that keep nothing else.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tugline.chat.dialects import openai
from tugline.chat.dialects.reading import Prose, decode, need
from tugline.errors import RequestError, Unsupported
from tugline.types import Message, Role, Tool, ToolCall, ToolKind

_SEAL = "tugline."
_TURN = re.compile(r"(?:rs|msg|fc|ctc|lsh)_(.+-\d+)_\d+")
_ROLES = {"system": Role.SYSTEM, "developer": Role.DEVELOPER, "user": Role.USER}
_SUMMARY = "What happened before this point, in summary:\n\n"

SHELL_FIELDS = frozenset({"command", "timeout_ms", "working_directory", "user", "env"})
_SHELL = Tool(
    "local_shell",
    "Run a command on this machine.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
    ToolKind.LOCAL_SHELL,
)


def seal(text: str) -> str:
    """Text as ``encrypted_content``: opaque to clients, no secret."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def unseal(sealed: Any) -> str | None:
    """The text of `seal`; None if this is not ours."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


# --------------------------------------------------------------------------- items
class Folding:
    """Folds items into messages; the step that `ParseCache.fold` asks for.

    It looks back at earlier items where ids matter, so equal fronts still give equal messages.
    """

    def __init__(self, items: Sequence[msgspec.Raw], first: int) -> None:
        """`first` is the place of ``input[0]`` among the items."""
        self._items, self._first = items, first

    def __call__(self, messages: list[Message], item: Any, index: int) -> None:
        """Append the item's message, or extend the answer that it is a part of."""
        where = f"input[{index - self._first}]"
        if not isinstance(item, dict):
            msg = f"{where}={item!r:.60} must be an object"
            raise RequestError(msg, param=where)
        kind = item.get("type") or "message"
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            known = ", ".join(sorted(_READERS))
            msg = f"{where}.type={kind!r:.60} cannot be honoured here; it must be one of {known}"
            raise Unsupported(msg, param=f"{where}.type")
        if kind == "local_shell_call_output" and "call_id" not in item:
            item = {**item, "call_id": self._call_id(item, index)}
        message = read(item, where)
        if message is None:
            return
        after_answer = bool(messages) and messages[-1].role is Role.ASSISTANT
        if after_answer and message.role is Role.ASSISTANT and self._same_turn(item, index):
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)

    def _same_turn(self, item: Any, index: int) -> bool:
        turn = _turn(item)
        while turn and index > 0:
            index -= 1
            before = msgspec.json.decode(self._items[index])
            if _turn(before):
                return turn == _turn(before)
            if not _of_answer(before):
                break
        return True

    def _call_id(self, item: Any, index: int) -> Any:
        """An output may name its call by the item's id."""
        for raw in reversed(self._items[:index]):
            before = msgspec.json.decode(raw)
            if before.get("id") == item.get("id") and before.get("type") == "local_shell_call":
                return before.get("call_id")
        return item.get("id")


def _turn(item: Any) -> str | None:
    found = _TURN.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
    return found[1] if found and _of_answer(item) else None


def _of_answer(item: Any) -> bool:
    kind = item.get("type") or "message"
    return kind in _ANSWERED or (kind == "message" and item.get("role") == "assistant")


def _joined(first: Message, second: Message) -> Message:
    return Message(
        Role.ASSISTANT,
        first.content + second.content,
        first.tool_calls + second.tool_calls,
        reasoning=(first.reasoning or "") + (second.reasoning or "") or None,
        images=first.images,
    )


def _message(item: Any, where: str) -> Message:
    name = need(item, "role", str, where)
    role = Role.ASSISTANT if name == "assistant" else _ROLES.get(name)
    if role is None:
        msg = f"{where}.role={name!r:.60} must be one of system, developer, user, assistant"
        raise RequestError(msg, param=f"{where}.role")
    prose = _content(item.get("content"), f"{where}.content")
    return Message(role, prose.text, images=tuple(prose.images))


def _reasoning(item: Any, where: str) -> Message | None:
    sealed = item.get("encrypted_content")
    text = unseal(sealed) or _texts(item, "content") or _texts(item, "summary")
    if text:
        return Message(Role.ASSISTANT, reasoning=text)
    if sealed and unseal(sealed) is None:
        _foreign(where)
    return None


def _texts(item: Any, field: str) -> str:
    parts = item.get(field)
    if not isinstance(parts, list):
        return ""
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _compaction(item: Any, where: str) -> Message:
    text = unseal(item.get("encrypted_content"))
    if text is None:
        _foreign(where)
    return Message(Role.USER, f"{_SUMMARY}{text}")


def _foreign(where: str) -> None:
    msg = f"{where}.encrypted_content was not made here and cannot be read; leave the item out"
    raise Unsupported(msg, param=f"{where}.encrypted_content")


def _function_call(item: Any, where: str) -> Message:
    arguments = need(item, "arguments", str, where)
    return _called(item, where, _full_name(item, where), arguments)


def _custom_call(item: Any, where: str) -> Message:
    text = need(item, "input", str, where)
    return _called(item, where, _full_name(item, where), openai.freeform(text))


def _shell_call(item: Any, where: str) -> Message:
    action = need(item, "action", dict, where)
    kept = {name: value for name, value in action.items() if name in SHELL_FIELDS and value}
    return _called(item, where, _SHELL.name, msgspec.json.encode(kept).decode())


def _called(item: Any, where: str, name: str, arguments: str) -> Message:
    call = ToolCall(need(item, "call_id", str, where), name, arguments)
    return Message(Role.ASSISTANT, tool_calls=(call,))


def _full_name(item: Any, where: str) -> str:
    name = need(item, "name", str, where)
    namespace = item.get("namespace")
    return f"{namespace}__{name}" if namespace else name


def _output(item: Any, where: str) -> Message:
    prose = _content(item.get("output"), f"{where}.output")
    call_id = need(item, "call_id", str, where)
    return Message(Role.TOOL, prose.text, tool_call_id=call_id, images=tuple(prose.images))


def _content(content: Any, where: str) -> Prose:
    prose = Prose()
    if isinstance(content, str):
        prose.add(content)
        return prose
    if not isinstance(content, list):
        msg = f"{where}={content!r:.60} must be text or a list of parts"
        raise RequestError(msg, param=where)
    for i, part in enumerate(content):
        kind = need(part, "type", str, f"{where}[{i}]")
        if kind in {"input_text", "output_text", "text"}:
            prose.add(need(part, "text", str, f"{where}[{i}]"))
        elif kind == "refusal":
            prose.add(need(part, kind, str, f"{where}[{i}]"))
        elif kind == "input_image" and part.get("image_url"):
            detail = part.get("detail")
            url = need(part, "image_url", str, f"{where}[{i}]")
            prose.picture(url, detail if isinstance(detail, str) else None)
        else:
            right = "input_text, output_text, refusal or input_image with an image_url"
            msg = f"{where}[{i}].type={kind!r:.60} cannot be honoured here; it must be {right}"
            raise Unsupported(msg, param=f"{where}[{i}]")
    return prose


_ANSWERED: dict[str, Callable[[Any, str], Message | None]] = {
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _shell_call,
}
_READERS: dict[str, Callable[[Any, str], Message | None]] = {
    **_ANSWERED,
    "message": _message,
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "local_shell_call_output": _output,
    "compaction": _compaction,
    "compaction_summary": _compaction,
    "additional_tools": lambda _item, _where: None,  # see `declared`
}


# --------------------------------------------------------------------------- tools
class _Additional(msgspec.Struct):
    type: Any = ""
    tools: list[msgspec.Raw] = []


_list = msgspec.json.Decoder(list[msgspec.Raw] | None)
_additional = msgspec.json.Decoder(_Additional)


def declared(tools: msgspec.Raw, items: Sequence[msgspec.Raw], body: bytes) -> bytes:
    """The JSON list of all tools: those of the request, and those that its items add."""
    if b'"additional_tools"' not in body:
        return tools
    lists = [decode(tools, _list, "tools", "tools") or []]
    for raw in items:
        if b'"additional_tools"' in bytes(raw):
            item = decode(raw, _additional, "additional_tools", "additional_tools.")
            lists += [item.tools] if item.type == "additional_tools" else []
    return b"[" + b",".join(tool for tools in lists for tool in tools) + b"]"


def read_tools(items: Any) -> tuple[Tool, ...]:
    """Tools as the model sees them."""
    if items is None:
        return ()
    if not isinstance(items, list):
        msg = f"tools={items!r:.60} must be a list"
        raise RequestError(msg, param="tools")
    return tuple(tool for i, item in enumerate(items) for tool in _tool(item, f"tools[{i}]"))


def _tool(item: Any, where: str) -> list[Tool]:
    kind = need(item, "type", str, where)
    if kind == "function":
        return [openai.function_tool(item, where)]
    if kind == "custom":
        return [openai.custom_tool(item, where)]
    if kind == "local_shell":
        return [_SHELL]
    if kind == "namespace":
        return _namespace(item, where)
    off = ' (for codex: web_search = "disabled")' if kind.startswith("web_search") else ""
    msg = (
        f"{where}.type={kind!r:.60} cannot be honoured here: it runs at OpenAI; switch it off in "
        f"the client{off}; function, custom, local_shell and namespace tools are served"
    )
    raise Unsupported(msg, param=f"{where}.type")


def _namespace(item: Any, where: str) -> list[Tool]:
    name = need(item, "name", str, where)
    about = item.get("description")
    found: list[Tool] = []
    for i, inner in enumerate(need(item, "tools", list, where)):
        for tool in _tool(inner, f"{where}.tools[{i}]"):
            text = f"{about}\n\n{tool.description}" if about else tool.description
            found.append(
                msgspec.structs.replace(
                    tool, name=f"{name}__{tool.name}", description=text, namespace=name
                )
            )
    return found

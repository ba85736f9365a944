"""Check that sampled ids decode to the answer that the harness received.

In exact mode the gateway decoded the text from the ids, so the recorded ids are decoded again with
the recorded template and tokenizer and must give the recorded answer: text, reasoning, and tool
calls by name and JSON value. In observed mode the engine made the text, which must be contained in
the decoded text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tugline.chat.model_call import decode_arguments, join_pieces
from tugline.chat.stream_parser import StreamParser
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.chat.tokens import END
from tugline.errors import ConfigError
from tugline.recording.records import Header
from tugline.recording.tokenizer_file import load_tokenizer
from tugline.types import Call, CallOutcome, MalformedCalls, Message, Mode, Role


class TextVerifier:
    """Verifier that decodes answers again; tokenizers and templates are cached."""

    def __init__(self, tokenizer: Path | None = None) -> None:
        """`tokenizer` replaces the ones beside the recordings. Raises `ConfigError`."""
        self._other = None if tokenizer is None else Tokenizer.load(tokenizer)
        self._loaded: dict[tuple[str, ...], tuple[Tokenizer, Rendering | None]] = {}

    def find_faults(
        self, recording: Path, header: Header | None, calls: Sequence[Call]
    ) -> dict[int, str]:
        """Return, by call number, a line for each call whose ids do not decode to its answer.

        Raises `ConfigError` if the tokenizer or template is missing.
        """
        answered = [
            (call, call.answer)
            for call in calls
            if call.answer is not None and call.mode is not Mode.TEXT
        ]
        if not answered:
            return {}
        if header is None:
            raise ConfigError("the recording has no header, so its tokenizer is unknown")
        tokenizer, rendering = self._load(recording, header)
        faults = {}
        for call, answer in answered:
            exact = rendering if call.mode is Mode.EXACT else None
            other = _find_other_answer(tokenizer, exact, call, answer)
            if other:
                fault = f"returned {_abbreviate(answer)}, but its ids decode to {other}"
                faults[call.number] = f"call {call.number} {fault}"
        return faults

    def _load(self, recording: Path, header: Header) -> tuple[Tokenizer, Rendering | None]:
        options = header.thinking_retention, header.special_tokens_in_contents
        key = header.tokenizer, header.template, *options
        if key not in self._loaded:
            tokenizer = self._other or load_tokenizer(recording, header)
            if tokenizer is None:
                raise ConfigError(
                    "there is no tokenizer beside the recording; give one with --tokenizer"
                )
            self._loaded[key] = tokenizer, make_rendering(header, tokenizer)
        return self._loaded[key]


def _find_other_answer(
    tokenizer: Tokenizer, rendering: Rendering | None, call: Call, answer: Message
) -> str:
    """Return a text of the decoded ids if they differ from the answer, else an empty one."""
    if call.sampled_ids.min(initial=0) < 0:
        return "no tokens"
    if rendering is None:
        return "" if _contains_answer(tokenizer, call, answer) else "another text"
    message = _decode(rendering, call)
    return "" if _normalize(message) == _normalize(answer) else _abbreviate(message)


# --------------------------------------------------------------------------- exact mode
def _decode(rendering: Rendering, call: Call) -> Message:
    """Decode the answer as the gateway does; if the client left, only the certain part."""
    resumed = len(call.prompt_ids) - call.resumed
    forced = resumed - call.forced
    decoder = StreamParser(
        rendering,
        None if call.raw_prompt else call.prompt_ids[:forced][-END:],
        f"{call.number}",
        stops=call.sampling.stop,
        forced=call.prompt_ids[forced:resumed] if call.forced else None,
        tools=call.tools,
        malformed=call.malformed or MalformedCalls.TEXT,
        forbidden=call.forbidden_calls > 0,
    )
    pieces = decoder.feed([*call.prompt_ids[resumed:].tolist(), *call.sampled_ids.tolist()])
    if call.outcome is CallOutcome.CLIENT_GONE:
        return join_pieces(pieces) or Message(Role.ASSISTANT)
    return decoder.finish()[1]


def _normalize(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [(call.name, decode_arguments(call.arguments)) for call in message.tool_calls]
    return message.content, message.reasoning or "", calls


# --------------------------------------------------------------------------- observed mode
def _contains_answer(tokenizer: Tokenizer, call: Call, answer: Message) -> bool:
    """Whether the decoded ids contain text, reasoning and tool names, except for white space."""
    ids: list[int] = call.sampled_ids.tolist()
    texts = [_squeeze(tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (False, True)]
    parts = [answer.content, answer.reasoning or "", *(call.name for call in answer.tool_calls)]
    return all(any(_squeeze(part) in text for text in texts) for part in parts)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _abbreviate(message: Message) -> str:
    parts = [f"text {message.content[:40]!r}"] if message.content else []
    parts += [f"reasoning {message.reasoning[:40]!r}"] if message.reasoning else []
    parts += [f"{call.name}({call.arguments[:40]})" for call in message.tool_calls]
    return ", ".join(parts) or "nothing"


def make_rendering(header: Header, tokenizer: Tokenizer) -> Rendering | None:
    """Make the rendering of a recording's prompts; None if the engine rendered prompts."""
    if not header.template:
        return None
    return Rendering(
        tokenizer,
        header.template,
        thinking_retention=header.thinking_retention or "all",
        special_tokens_in_contents=header.special_tokens_in_contents or "tokens",
    )

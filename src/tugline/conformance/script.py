"""A model that says what a script says, whatever harness asks: turns, pace and faults.

The script knows where a conversation is by counting the answers in the prompt, so it holds for any
retry: the same prompt is answered the same, and a prompt that ends inside an answer is answered by
the rest of it. A prompt without a script's marker, or without tools, is a side call (a title, say).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

import tugline
from tugline.chat.tokenizer import Tokenizer
from tugline.testing.scripted_engine import Reply
from tugline.types import Ids

_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
_OPENING = "<|im_start|>assistant\n"
_TOOLS = "<tools>"
END = 2
"""The id that ends an answer."""


class Turn(msgspec.Struct, frozen=True):
    """One answer: `calls` are names of tools with their arguments."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    def written(self) -> str:
        """As a Qwen3 model writes it."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in self.calls
        ]
        return thought + "\n".join([*([self.text] if self.text else []), *calls]) + "<|im_end|>"


class Fault(msgspec.Struct, frozen=True):
    """What goes wrong, or slowly, when a turn is asked for; faults strike the first time only."""

    refuse: int | None = None
    """HTTP status instead of an answer."""
    cut_after: int | None = None
    """The connection is lost after this many tokens."""
    first_s: float = 0.0
    """Seconds before the first token."""
    token_s: float = 0.0
    """Seconds before each token."""


Script = Sequence[Turn | Callable[[str], Turn]]
"""A turn may depend on the text of the prompt."""

_SIDE = Turn("A short title")
_OVER = Turn("There is nothing left to do.")


class Player:
    """Plays `scripts`, each begun by a marker in the prompt; `hitches` are the first script's."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scripts: Mapping[str, Script],
        hitches: Mapping[int, Fault] | None = None,
    ) -> None:
        self._tokenizer, self._scripts = tokenizer, scripts
        self._hitches = dict(hitches or {})
        self._struck: set[int] = set()
        self._opening = tokenizer.encode(_OPENING)
        self.played: dict[tuple[str, int], int] = {}
        """Tokens of every answer that was asked for, by script and turn."""
        self.side_calls = 0

    @property
    def owed(self) -> int:
        """Tokens that are sampled if every answer is sampled exactly once."""
        return sum(self.played.values())

    def reply(self, prompt: Ids, _request: str) -> Reply:
        """What the engine answers."""
        text = self._tokenizer.decode(prompt.tolist())
        marker = next((marker for marker in self._scripts if marker in text), "")
        marker = marker if _TOOLS in text else ""
        turn = text.count(_OPENING) - 1
        ids = self._tokenizer.encode(self._turn(marker, turn, text).written())
        done = self._said(prompt)
        if marker:
            self.played[marker, turn] = len(ids)
        first = bool(marker) and marker == next(iter(self._scripts))
        hitch = self._hitches.get(turn, Fault()) if first else Fault()
        if done == 0 and turn in self._struck:
            hitch = Fault(token_s=hitch.token_s)
        self._struck.add(turn)
        return Reply(
            ids[done:],
            delay_s=hitch.token_s,
            first_s=hitch.first_s if done == 0 else 0.0,
            status=hitch.refuse if done == 0 else None,
            cut_after=hitch.cut_after if done == 0 else None,
        )

    def _turn(self, marker: str, turn: int, text: str) -> Turn:
        if not marker:
            self.side_calls += 1
            return _SIDE
        script = self._scripts[marker]
        if turn >= len(script):
            return _OVER
        found = script[turn]
        return found if isinstance(found, Turn) else found(text)

    def _said(self, prompt: Ids) -> int:
        """How many tokens of the answer the prompt ends with."""
        starts = (prompt == self._opening[0]).nonzero()[0]
        return len(prompt) - int(starts[-1]) - len(self._opening)


@cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer, learnt from the text of this package in a tenth of a second."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    package = Path(tugline.__file__).parent
    texts = (path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, "conformance")

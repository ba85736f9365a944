"""A model that answers from a script, with scripted faults.

Answers depend on the prompt alone: the turn is the number of assistant openings in it. The same
prompt therefore gets the same answer however often it is sent, and a prompt that ends inside an
answer, which is how a gateway continues after a lost connection, gets the rest of that answer. A
request without tools, or for none of the scripts, counts as a side call (a title, a summary).

    look = Turn("I look.", calls=(("bash", {"command": "ls"}),))
    scripts = {"Fix the bug.": (look, Turn("Done."))}
    async with serve_scripted_model(scripts) as served:
        gateway = Gateway(served.upstream, served.rendering, folder)
"""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tugline.chat.engines.generate import Embedded
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.gateway.replicas import Upstream
from tugline.inference.server import create_app
from tugline.testing.scripted_engine import Reply, ScriptedEngine
from tugline.types import Ids
from tugline.web.serve import serve

_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
_OPENING = "<|im_start|>assistant\n"
_TOOLS = "<tools>"
END_ID = 2
"""The id that ends an answer."""
CONTEXT_WINDOW = 131_072
"""Tokens."""


class ScriptedTurn(msgspec.Struct, frozen=True):
    """One answer; `calls` are names of tools with their arguments."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    def render(self) -> str:
        """Return the answer as a Qwen3 model writes it."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in self.calls
        ]
        return thought + "\n".join([*([self.text] if self.text else []), *calls]) + "<|im_end|>"


Script = Sequence[ScriptedTurn | Callable[[str], ScriptedTurn]]
"""Turns in order; a function gets the text of the prompt."""

_SIDE_ANSWER = ScriptedTurn("A short title")
_AFTER_END = ScriptedTurn("There is nothing left to do.")


@dataclass(eq=False)
class ScriptedModel:
    """Answers from `scripts`, each selected by a marker in the prompt.

    `faults` are of the first script, by number of the turn: replies without ids, of which only
    `delay_s` applies to repeated requests as well.
    """

    tokenizer: Tokenizer
    scripts: Mapping[str, Script]
    faults: Mapping[int, Reply] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._failed: set[int] = set()
        self._opening = self.tokenizer.encode(_OPENING)
        self.answers: dict[tuple[str, int], int] = {}
        """Tokens of every answer that was requested, by script and turn."""
        self.side_calls = 0

    @property
    def expected_tokens(self) -> int:
        """Tokens that the engine samples if it samples every answer exactly once."""
        return sum(self.answers.values())

    def reply(self, prompt: Ids, _request: str) -> Reply:
        """Return the engine's reply to a prompt."""
        text = self.tokenizer.decode(prompt.tolist())
        marker = next((marker for marker in self.scripts if marker in text), "")
        marker = marker if _TOOLS in text else ""
        turn = text.count(_OPENING) - 1
        ids = self.tokenizer.encode(self._turn(marker, turn, text).render())
        starts = (prompt == self._opening[0]).nonzero()[0]
        done = len(prompt) - int(starts[-1]) - len(self._opening) if len(starts) else 0
        """Tokens of the answer that the prompt already ends with."""
        if marker:
            self.answers[marker, turn] = len(ids)
        first = bool(marker) and marker == next(iter(self.scripts))
        fault = self.faults.get(turn, Reply()) if first else Reply()
        if done or turn in self._failed:
            fault = Reply(delay_s=fault.delay_s)
        self._failed.add(turn)
        return msgspec.structs.replace(fault, ids=ids[done:])

    def _turn(self, marker: str, turn: int, text: str) -> ScriptedTurn:
        if not marker:
            self.side_calls += 1
            return _SIDE_ANSWER
        script = self.scripts[marker]
        if turn >= len(script):
            return _AFTER_END
        answer = script[turn]
        return answer if isinstance(answer, ScriptedTurn) else answer(text)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a gateway needs of a model, and the parts behind it if it is scripted."""

    upstream: Upstream
    rendering: Rendering | None
    engine: ScriptedEngine | None = None
    model: ScriptedModel | None = None


@contextlib.asynccontextmanager
async def serve_scripted_model(
    scripts: Mapping[str, Script], faults: Mapping[int, Reply] | None = None
) -> AsyncIterator[ServedModel]:
    """Serve a scripted model that takes token ids, which is what exact mode needs."""
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, scripts, faults or {})
    engine = ScriptedEngine(
        model.reply, vocab_size=tokenizer.size, max_model_len=CONTEXT_WINDOW, eos_ids=[END_ID]
    )
    rendering = Rendering(tokenizer, "qwen3", thinking_retention="all")
    async with serve(create_app(engine, model_name="scripted")) as url:
        yield ServedModel(Upstream(url, Embedded()), rendering, engine, model)


@cache
def make_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer on the text of this package, which takes 0.1 s."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    package = Path(__file__).parents[1]
    texts = (path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, "scripted")

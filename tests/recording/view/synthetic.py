"""Sessions for viewers: forks, a sub-agent, new weights and hostile text."""

import random
from functools import cache
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from support.calls import make_call, make_header
from tugline.chat.tokenizer import Tokenizer
from tugline.demo import warm_start_model
from tugline.patch import Patch, pack_patch
from tugline.recording.file import Writer, read, write_result
from tugline.recording.patches import save_patch
from tugline.recording.records import RecordedEvent, RecordedEventKind, RecordedResult
from tugline.recording.tokenizer_file import save_tokenizer
from tugline.recording.view.session_view import ViewedSession, view_session
from tugline.types import (
    Branch,
    Call,
    CallOutcome,
    Finish,
    Ledger,
    Message,
    PluginSpec,
    Reward,
    Role,
    Sampling,
    Status,
    Timings,
    ToolCall,
    TraceKind,
    VersionSpan,
)

HOSTILE = "</script><img src=x onerror=alert(1)> \x1b[31m red \u202e backwards 界🙂"
"""Text of a model that may harm a page or a terminal."""
LAST_WORD = "zanzibar"
START = 1_000_000.0
"""Start of every session, in Unix seconds."""
_WORDS = (
    *("the", "agent", "reads", "a", "file", "and", "then", "writes", "another"),
    *("one", "with", "care", "because", "tests", "fail"),
)


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer that comes with the package."""
    return Tokenizer.load(Path(next(iter(warm_start_model.__path__))))


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return tokenizer().encode(text)


class Script:
    """Write a session call by call; `random` is seeded, so that equal scripts give equal files."""

    def __init__(self, folder: Path, *, name: str = "s-1") -> None:
        self.random = random.Random(7)
        header = make_header(
            name,
            "t-1",
            3,
            task_fields={"harness": PluginSpec("pi"), "files": {"a.py": "pass\n"}},
            created=START,
            model="tiny",
            engine="embedded",
            template="qwen3",
            tokenizer=save_tokenizer(tokenizer(), folder),
        )
        self.path = folder / f"{name}.0.rec"
        self.writer = Writer(self.path, header)
        self.calls: list[Call] = []

    def write_text(self, count: int) -> str:
        """Random text of `count` words, with some line breaks."""
        chosen = self.random.choices(_WORDS, k=count)
        return "".join(word + ("\n" if self.random.random() < 0.1 else " ") for word in chosen)

    def call(
        self,
        prompt: list[int],
        text: str,
        *,
        messages: tuple[Message, ...] = (),
        versions: tuple[int, ...] = (4,),
        tools: tuple[ToolCall, ...] = (),
        **changes: object,
    ) -> Call:
        """Append a call whose answer is split evenly among the versions."""
        number = len(self.calls)
        sampled = encode(text)
        cuts = [len(sampled) * i // len(versions) for i in range(len(versions) + 1)]
        logprobs = [-self.random.expovariate(2.0) for _ in sampled]
        fields: dict[str, object] = {
            "session": "s-1",
            "parent": number - 1 if number else None,
            "messages": messages,
            "answer": Message(Role.ASSISTANT, text, tools),
            "sampling": Sampling(temperature=1.0),
            "logprobs": np.array(logprobs, np.float32),
            "versions": tuple(
                VersionSpan(version, cuts[i], cuts[i + 1]) for i, version in enumerate(versions)
            ),
            "timings": Timings(*(START + 2.0 * number + after for after in (0, 0, 0.3, 1.5))),
        }
        made = make_call(number, prompt, sampled, **(fields | changes))
        self.writer.append(made)
        self.calls.append(made)
        return made

    def end(self) -> Path:
        """Write the result and close the file."""
        reward = Reward(0.5, {"tests": 0.5})
        sampled = sum(len(call.sampled_ids) for call in self.calls)
        ledger = Ledger(sampled=sampled, trained=sampled)
        result = RecordedResult(
            status=Status.COMPLETED, builder="prefix_merging", ledger=ledger, reward=reward
        )
        self.writer.append_record(result)
        self.writer.close()
        return self.path


def add_patch(path: Path, patch: Patch) -> str:
    """Store a patch beside a recording and name it in its result; returns the digest."""
    digest = save_patch(pack_patch(patch), path.parent)
    result = read(path).result
    assert result is not None
    write_result(path, replace(result, patch=digest))
    return digest


def whole(call: Call) -> list[int]:
    """All ids of a call: prompt and answer."""
    return [*call.prompt_ids.tolist(), *call.sampled_ids.tolist()]


def small(folder: Path, name: str = "s-1") -> Path:
    """Record six calls (exact, hostile, aborted, a fork, a sub-agent's two) and two events."""
    script = Script(folder, name=name)
    read = (ToolCall("1", "read", '{"path": "a.py"}'),)
    system = Message(Role.SYSTEM, "You mend code.")
    first = script.call(
        encode("You mend code. " + script.write_text(400)),
        "I read it.",
        messages=(system,),
        tools=read,
    )
    messages = (Message(Role.TOOL, HOSTILE, tool_call_id="1"),)
    second = script.call(
        [*whole(first), *encode(HOSTILE)], f"It says {HOSTILE}", messages=messages, versions=(4, 5)
    )
    script.writer.append_record(
        RecordedEvent(RecordedEventKind.WEIGHTS, START + 3.9, detail="version 5")
    )
    gone = {"outcome": CallOutcome.CLIENT_GONE, "finish": Finish.ABORT, "answer": None}
    script.call([*whole(second), *encode("on")], "never heard", versions=(5,), **gone)
    script.writer.append_record(
        RecordedEvent(RecordedEventKind.ENGINE_FAULT, START + 5.2, 2, "replica \x1b[2J b died")
    )
    edited = [*first.prompt_ids.tolist(), *encode("Another history.")]
    script.call(edited, "A fork.", parent=0, branch=Branch.HISTORY_EDITED, versions=(5,))
    agent = {"kind": TraceKind.SUBAGENT, "thread": "helper-thread", "versions": (5,)}
    looks = encode("You are a helper. Look.")
    helper = script.call(looks, "I look.", parent=None, branch=Branch.NEW_THREAD, **agent)
    script.call([*whole(helper), *encode("Well?")], LAST_WORD, parent=4, **agent)
    return script.end()


def long(folder: Path, *, turns: int = 150, base: int = 6000, length: int = 105) -> Path:
    """Record exact turns with a fork in the middle; 100k tokens by default.

    `base` and `length` are the numbers of words of the first prompt and of each text after it.
    """
    script = Script(folder)
    ids, parent = encode(script.write_text(base)), None
    for turn in range(turns):
        answer = script.write_text(length) + (LAST_WORD if turn == turns - 1 else "")
        output = script.write_text(length)
        more = {"messages": (Message(Role.TOOL, output, tool_call_id=str(turn)),), "parent": parent}
        more["tools"] = (ToolCall(str(turn), "bash", '{"command": "ls"}'),)
        call = script.call(ids, answer, versions=(turn // 50,), **more)
        if turn == turns // 2:
            edited = [*ids[: len(ids) // 2], *encode("changed")]
            script.call(edited, "A fork.", parent=call.number, branch=Branch.HISTORY_EDITED)
        ids, parent = [*whole(call), *encode(output)], call.number
    return script.end()


def view(path: Path, builder: str | None = None) -> ViewedSession:
    """View a recording."""
    return view_session(path, read(path), builder)

"""The processes of the benchmark: the engine, the pass-through, and the gateway in each mode."""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import replies
from load import Place, Seat, Target
from processes import Child
from script import Bodies, Script, Told


@dataclass(frozen=True)
class Mode:
    """One way in which the gateway is asked and asks."""

    name: str
    gateway: str
    """How the launched gateway talks to the engine."""
    route: str
    """The engine's route, which the pass-through is asked for by name."""
    stream: bool = False
    paced: bool = False


MODES = (
    Mode("exact", "exact", replies.GENERATE),
    Mode("observed", "observed", replies.CHAT),
    Mode("stream", "exact", replies.GENERATE, stream=True),
    Mode("stream_paced", "exact", replies.GENERATE, stream=True, paced=True),
)


@dataclass
class Gateway:
    """A launched gateway, its open sessions, and how it tells the answers."""

    child: Child
    told: list[Told] = field(default_factory=list)
    waiting: deque[tuple[Place, Path]] = field(default_factory=deque)
    recordings: list[Path] = field(default_factory=list)
    """Of sessions that were begun since the last `close`."""

    def open(self, sessions: int) -> None:
        """Have so many more sessions ready."""
        for path, key, recording, port in self.child.ask(f"open {sessions}"):
            place = Place(f"{path}/v1/chat/completions", key, port)
            self.waiting.append((place, Path(recording)))

    def fresh(self) -> Place:
        """A session nobody used yet."""
        place, recording = self.waiting.popleft()
        self.recordings.append(recording)
        return place

    def close(self) -> list[Path]:
        """End every session; the recordings of those that were begun."""
        self.child.ask("close")
        begun, self.recordings = self.recordings, []
        self.waiting.clear()
        return begun


@dataclass(frozen=True)
class Rig:
    """All processes, and the conversation they play."""

    script: Script
    engine: Child
    floor: Child
    gateways: dict[str, Gateway]

    def target(self, name: str, mode: Mode, port: int) -> Target:
        """What is asked of one of them."""
        bodies = Bodies(self.script, self.gateways[mode.gateway].told, stream=mode.stream)
        return Target(name, port, bodies, self.script.turns, mode.stream, mode.paced)

    def seats(self, mode: Mode, kind: str, count: int) -> list[Seat]:
        """Connections to the engine itself, to the pass-through or to the gateway."""
        gateway = self.gateways[mode.gateway]
        child = {"direct": self.engine, "passthrough": self.floor, "gateway": gateway.child}[kind]
        target = self.target(kind, mode, child.port)
        fresh: Callable[[], Place] = lambda: Place(mode.route)  # noqa: E731
        return [
            Seat(target, number, gateway.fresh if kind == "gateway" else fresh)
            for number in range(count)
        ]


def launch(story: Script, folder: Path, modes: Sequence[Mode], stack: ExitStack) -> Rig:
    """Start engine, pass-through and, in each of its modes, the gateway."""
    here = Path(__file__).parent
    file = folder / "replies.msgpack"
    routes = [mode.route for mode in modes]
    file.write_bytes(msgspec.msgpack.encode(replies.write(story, routes)))
    story.tokenizer.save(folder)

    def start(program: str, *arguments: str) -> Child:
        child = Child(here / program, *arguments)
        stack.callback(child.stop)
        return child

    engine = start("engine.py", str(file))
    url = f"http://127.0.0.1:{engine.port}"
    floor = start("passthrough.py", url)
    gateways = {
        name: Gateway(start("launcher.py", name, url, str(folder), str(folder / name)))
        for name in dict.fromkeys(mode.gateway for mode in modes)
    }
    for child in (floor, *(gateway.child for gateway in gateways.values())):
        note(f"up at port {child.port}")
    return Rig(story, engine, floor, gateways)


async def learn(rig: Rig, gateway: Gateway, mode: Mode) -> None:
    """Play two sessions as a client would, to learn what prebuilt bodies must repeat."""
    gateway.open(2)
    for _ in range(2):
        before, gateway.told = gateway.told, []
        (seat,) = rig.seats(mode, "gateway", 1)
        await seat.connect()
        for turn in range(rig.script.turns):
            answer = await seat.call()
            gateway.told.append(_told(answer.data, rig.script, turn))
            seat.target = rig.target("gateway", mode, gateway.child.port)
        seat.close()
        if before and before != gateway.told:
            fail("answers differ between sessions; prebuilt bodies are not what clients would send")
    gateway.close()


def _told(data: bytes, story: Script, turn: int) -> Told:
    said = story.answers[turn]
    message = json.loads(data[data.index(b"\r\n\r\n") + 4 :])["choices"][0]["message"]
    (call,) = message["tool_calls"]
    text, reasoning = message["content"], message["reasoning_content"]
    arguments = json.loads(call["function"]["arguments"])
    if (text.strip(), reasoning.strip(), arguments) != (said.text, said.reasoning, said.arguments):
        fail(f"turn {turn} was answered with {message!r:.600}")
    return Told(text, reasoning, str(call["id"]))


def note(text: str) -> None:
    """Progress, beside the result."""
    sys.stderr.write(f"{text}\n")


def fail(text: str) -> NoReturn:
    """A benchmark of a broken path is worth nothing."""
    sys.exit(f"the benchmark stopped: {text}")

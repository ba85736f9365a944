"""Start and use the processes of the benchmark: engine, pass-through, and gateway in each mode."""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import replies
from load import SessionAddress, SessionClient, Target
from processes import Child
from script import Bodies, EchoedAnswer, Script


@dataclass(frozen=True)
class Mode:
    """How clients call the gateway and the gateway calls the engine."""

    name: str
    gateway: str
    """Mode argument of `launcher.py`."""
    route: str
    """The engine's route; also the path of requests to the pass-through."""
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
    """A launched gateway, its sessions, and the answers as it returns them."""

    child: Child
    echoes: list[EchoedAnswer] = field(default_factory=list)
    waiting: deque[tuple[SessionAddress, Path]] = field(default_factory=deque)
    recordings: list[Path] = field(default_factory=list)
    """Recordings of the sessions used since the last `close`."""

    def open(self, sessions: int) -> None:
        """Open `sessions` more sessions for `next_session`."""
        for path, key, recording, port in self.child.ask(f"open {sessions}"):
            address = SessionAddress(f"{path}/v1/chat/completions", key, port)
            self.waiting.append((address, Path(recording)))

    def next_session(self) -> SessionAddress:
        """Return the address of an open session that is still unused."""
        address, recording = self.waiting.popleft()
        self.recordings.append(recording)
        return address

    def close(self) -> list[Path]:
        """Close every session; return the recordings of those that were used."""
        self.child.ask("close")
        used, self.recordings = self.recordings, []
        self.waiting.clear()
        return used


@dataclass(frozen=True)
class Rig:
    """All processes, and the conversation that they replay."""

    script: Script
    engine: Child
    passthrough: Child
    gateways: dict[str, Gateway]

    def target(self, name: str, mode: Mode, port: int) -> Target:
        """Make the target for a process: its port and request bodies."""
        bodies = Bodies(self.script, self.gateways[mode.gateway].echoes, stream=mode.stream)
        return Target(name, port, bodies, self.script.turns, mode.stream, mode.paced)

    def clients(self, mode: Mode, kind: str, count: int) -> list[SessionClient]:
        """Make clients of the engine (``direct``), the pass-through or the gateway."""
        gateway = self.gateways[mode.gateway]
        children = {
            "direct": self.engine, "passthrough": self.passthrough, "gateway": gateway.child,
        }  # fmt: skip
        target = self.target(kind, mode, children[kind].port)

        def same_route() -> SessionAddress:
            return SessionAddress(mode.route)

        next_session = gateway.next_session if kind == "gateway" else same_route
        return [SessionClient(target, number, next_session) for number in range(count)]


def launch(script: Script, folder: Path, modes: Sequence[Mode], stack: ExitStack) -> Rig:
    """Start the engine, the pass-through and a gateway for each mode."""
    here = Path(__file__).parent
    file = folder / "replies.msgpack"
    routes = [mode.route for mode in modes]
    file.write_bytes(msgspec.msgpack.encode(replies.write(script, routes)))
    script.tokenizer.save(folder)

    def start(program: str, *arguments: str) -> Child:
        child = Child(here / program, *arguments)
        stack.callback(child.stop)
        return child

    engine = start("engine.py", str(file))
    url = f"http://127.0.0.1:{engine.port}"
    passthrough = start("passthrough.py", url)
    gateways = {
        name: Gateway(start("launcher.py", name, url, str(folder), str(folder / name)))
        for name in dict.fromkeys(mode.gateway for mode in modes)
    }
    for child in (passthrough, *(gateway.child for gateway in gateways.values())):
        note(f"listening on port {child.port}")
    return Rig(script, engine, passthrough, gateways)


async def record_echoes(rig: Rig, gateway: Gateway, mode: Mode) -> None:
    """Play two sessions and keep the answers, which the prebuilt request bodies must repeat."""
    gateway.open(2)
    for _ in range(2):
        before, gateway.echoes = gateway.echoes, []
        (client,) = rig.clients(mode, "gateway", 1)
        await client.connect()
        for turn in range(rig.script.turns):
            answer = await client.call()
            gateway.echoes.append(_read_echo(answer.data, rig.script, turn))
            client.target = rig.target("gateway", mode, gateway.child.port)
        client.close()
        if before and before != gateway.echoes:
            fail("answers differ between sessions, so prebuilt bodies would not match them")
    gateway.close()


def _read_echo(data: bytes, script: Script, turn: int) -> EchoedAnswer:
    expected = script.answers[turn]
    message = json.loads(data[data.index(b"\r\n\r\n") + 4 :])["choices"][0]["message"]
    (call,) = message["tool_calls"]
    text, reasoning = message["content"], message["reasoning_content"]
    arguments = json.loads(call["function"]["arguments"])
    if (text.strip(), reasoning.strip(), arguments) != (
        expected.text,
        expected.reasoning,
        expected.arguments,
    ):
        fail(f"the answer of turn {turn} is {message!r:.600}")
    return EchoedAnswer(text, reasoning, str(call["id"]))


def note(text: str) -> None:
    """Print progress to stderr."""
    sys.stderr.write(f"{text}\n")


def fail(text: str) -> NoReturn:
    """Stop the benchmark with an error."""
    sys.exit(f"the benchmark stopped: {text}")

"""The agents of the benchmark: ``agents.py ordinary|hostile FOLDER``, standard library only.

Both wait for FOLDER/plan.json: ``{"start": T, "spell_s": S, "spells": [NAME...]}`` in seconds of
the monotonic clock. Ordinary agents hold conversations in every spell. The hostile agent makes the
attack that the spell is named after. Each writes one line of JSON per request.
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import gzip
import http.client
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

GAP_S = 2.0
"""Pause between two spells, in which the effects of the last one end."""
TURNS = 12
PAUSE_S = 1.0

URL = urlsplit(os.environ.get("OPENAI_BASE_URL", ""))
HEADERS = {
    "authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}",
    "content-type": "application/json",
}


def make_body(messages: list[dict[str, Any]], **more: object) -> bytes:
    """Make the body of a chat completion request."""
    return json.dumps({"model": "stub", "messages": messages, **more}).encode()


def post(body: bytes | Iterator[bytes], timeout: float = 60.0, **headers: str) -> tuple[int, bytes]:
    """Send a request; return status and body. The status is 0 if the connection fails."""
    connection = http.client.HTTPConnection(URL.netloc, timeout=timeout)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request("POST", f"{URL.path}/chat/completions", body, HEADERS | named)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


def user(text: str) -> dict[str, Any]:
    """Make a user message."""
    return {"role": "user", "content": text}


# --------------------------------------------------------------------------- attacks
def send_padding() -> tuple[int, bytes]:
    """Send 800 kB of words, more than the window; it must be refused without tokenizing all."""
    words = " ".join(str(random.randrange(10**6)) for _ in range(115_000))
    return post(make_body([user(words)]))


def send_endless() -> tuple[int, bytes]:
    """Send a chunked body of white space that does not end."""

    def spaces() -> Iterator[bytes]:
        yield b'{"model": '
        while True:
            yield b" " * 65_536

    return post(spaces())


ATTACKS: dict[str, tuple[Callable[[], tuple[int, bytes]], int]] = {
    "big_body": (lambda: post(make_body([user("x" * (28 << 20))])), 2),
    "many_messages": (lambda: post(make_body([user("a")] * 300_000)), 2),
    "many_parts": (
        lambda: post(
            make_body([{**user(""), "content": [{"type": "text", "text": "a"}] * 200_000}])
        ),
        2,
    ),
    "deep": (lambda: post(b'{"messages": ' + b"[" * 500_000 + b"]" * 500_000 + b"}"), 2),
    "bomb": (lambda: post(gzip.compress(bytes(64 << 20)), content_encoding="gzip"), 2),
    "padding": (send_padding, 2),
    "n_128": (lambda: post(make_body([user("Answer it. " * 20)], n=128)), 8),
    "connections": (lambda: post(make_body([user("x" * (8 << 20))])), 256),
    "endless": (send_endless, 2),
}
"""The request that each attack repeats, and its number of threads."""


# --------------------------------------------------------------------------- the two agents
class RequestLog:
    """A file of this session with one line of JSON per request."""

    def __init__(self, folder: Path, role: str) -> None:
        self._lock = threading.Lock()
        self._file = (folder / f"{role}-{os.getpid()}.jsonl").open("w", encoding="utf-8")

    def write(self, spell: str, began: float, answer: tuple[int, bytes]) -> None:
        """Write a request: its spell, status, seconds, and the beginning of an error text."""
        status, data = answer
        text = "" if status == 200 else data[:200].decode(errors="replace")
        line = {"spell": spell, "status": status, "s": time.monotonic() - began, "text": text}
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def work(log: RequestLog, spell: str, until: float) -> None:
    """Hold conversations of a dozen turns, with about a second between two calls."""
    messages: list[dict[str, Any]] = []
    time.sleep(random.random() * PAUSE_S)
    while time.monotonic() < until:
        messages = messages if len(messages) < 2 * TURNS else []
        messages.append(user(f"Turn {len(messages)}: " + "go on with it. " * 20))
        began = time.monotonic()
        answer = post(make_body(messages))
        log.write(spell, began, answer)
        if answer[0] == 200:
            text = json.loads(answer[1])["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": text})
        else:
            messages = []
        time.sleep(PAUSE_S * (0.5 + random.random()))


def attack(log: RequestLog, spell: str, until: float) -> None:
    """Repeat the attack in several threads until the spell is over."""
    if spell not in ATTACKS:
        return
    send, count = ATTACKS[spell]

    def repeat() -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            answer = send()
            log.write(spell, began, answer)
            time.sleep(0.05 if answer[0] in {200, 400, 413} else 0.5)

    threads = [threading.Thread(target=repeat) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(role: str, folder: Path) -> None:
    """Wait for the plan, and run its spells."""
    log = RequestLog(folder, role)
    (folder / f"{role}-{os.getpid()}.ready").touch()
    while not (folder / "plan.json").exists():
        time.sleep(0.1)
    plan = json.loads((folder / "plan.json").read_text())
    act = work if role == "ordinary" else attack
    for number, spell in enumerate(plan["spells"]):
        begins = plan["start"] + number * (plan["spell_s"] + GAP_S)
        time.sleep(max(0.0, begins - time.monotonic()))
        act(log, spell, begins + plan["spell_s"])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""Writers that are killed at random moments: ``python -m recording.killed_writer FOLDER COUNT``.

Forks COUNT children, one after the other. Each writes calls into a file of its own and a byte into
a pipe for each call that is written; SIGKILL comes after a random delay. Prints a JSON list of
[file, index of the conversation, number of written calls, whether it was killed].
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from support.calls import make_call
from tugline.recording.file import Writer
from tugline.recording.records import RecordedEvent, RecordedEventKind
from tugline.types import Call, Ids, Message, Role, Tool

LONGEST_S = 0.02
SAMPLED = 40
TOOLS = (Tool("read", "reads", {"type": "object"}),)


def conversation(seed: int) -> list[Call]:
    """Calls that mostly extend each other, with some forks and some repeated prompts."""
    draw = np.random.default_rng(seed)

    def ids(count: int) -> Ids:
        return draw.integers(0, 150_000, count).astype(np.int32)

    prompt, calls = ids(800), []
    for number in range(400):
        sampled = ids(int(draw.integers(0, SAMPLED)))
        parent = number - 1 if number else None
        question = (Message(Role.USER, f"{number} " * 20),)
        answer = Message(Role.ASSISTANT, "word " * len(sampled))
        more = {"parent": parent, "messages": question, "answer": answer, "tools": TOOLS}
        calls.append(make_call(number, prompt, sampled, **more))
        dice = draw.random()
        if dice < 0.1:
            prompt = prompt[: len(prompt) // 2 + 1]
        elif dice < 0.9:
            prompt = np.concatenate((prompt, sampled, ids(30)))[-4000:]
    return calls


def write(path: Path, calls: list[Call], pipe: int) -> None:
    """Write calls until killed, with a byte into the pipe for each written call."""
    with Writer(path) as writer:
        for call in calls:
            writer.append(call)
            os.write(pipe, b".")
            if call.number % 7 == 0:
                writer.append_record(
                    RecordedEvent(RecordedEventKind.PAUSED, time.time(), detail="wait")
                )


def main(folder: Path, times: int) -> None:
    """Fork and kill the writers, and print the list."""
    calls = [conversation(seed) for seed in range(4)]
    delays = random.Random(0)
    results = []
    for index in range(times):
        path = folder / f"{index}.rec"
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            os.close(read_end)
            write(path, calls[index % len(calls)], write_end)
            os._exit(0)
        os.close(write_end)
        time.sleep(delays.random() * LONGEST_S)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with os.fdopen(read_end, "rb") as pipe:
            written = len(pipe.read())
        results.append([path.name, index % len(calls), written, os.WIFSIGNALED(status)])
    print(json.dumps(results))  # noqa: T201 - a program that a test reads


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

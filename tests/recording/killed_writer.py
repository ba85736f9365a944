"""Writers that are killed at random moments, and a word of what each had answered by then.

Run with a folder and a number: so many children are forked one after the other. Each writes calls
into a file of its own and tells each answered one over a pipe; SIGKILL comes after a random delay.
Prints a JSON list of [file, which conversation, how many calls were answered, whether it was
killed].
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from calls import make_call
from tugline.recording.file import Writer
from tugline.recording.records import RecordedEvent, RecordedEventKind
from tugline.types import Call, Ids, Message, Role

LONGEST_S = 0.02
SAMPLED = 40


def conversation(seed: int) -> list[Call]:
    """Calls that go on from each other, with now and then a fork or a prompt again."""
    draw = np.random.default_rng(seed)

    def ids(count: int) -> Ids:
        return draw.integers(0, 150_000, count).astype(np.int32)

    prompt, calls = ids(800), []
    for number in range(400):
        sampled = ids(int(draw.integers(0, SAMPLED)))
        parent = number - 1 if number else None
        asked = (Message(Role.USER, f"{number} " * 20),)
        answer = Message(Role.ASSISTANT, "word " * len(sampled))
        more = {"parent": parent, "messages": asked, "answer": answer}
        calls.append(make_call(number, prompt, sampled, **more))
        fate = draw.random()
        if fate < 0.1:
            prompt = prompt[: len(prompt) // 2 + 1]
        elif fate < 0.9:
            prompt = np.concatenate((prompt, sampled, ids(30)))[-4000:]
    return calls


def write(path: Path, calls: list[Call], told: int) -> None:
    """Write until killed; a byte into the pipe for each call that was answered."""
    with Writer(path) as writer:
        for call in calls:
            writer.append(call)
            os.write(told, b".")
            if call.number % 7 == 0:
                writer.append_record(
                    RecordedEvent(RecordedEventKind.PAUSED, time.time(), detail="wait")
                )


def main(folder: Path, times: int) -> None:
    """Fork, kill, and say what came of it."""
    calls = [conversation(seed) for seed in range(4)]
    delays = random.Random(0)
    fates = []
    for index in range(times):
        path = folder / f"{index}.rec"
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.close(ours)
            write(path, calls[index % len(calls)], theirs)
            os._exit(0)
        os.close(theirs)
        time.sleep(delays.random() * LONGEST_S)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with os.fdopen(ours, "rb") as pipe:
            answered = len(pipe.read())
        fates.append([path.name, index % len(calls), answered, os.WIFSIGNALED(status)])
    print(json.dumps(fates))  # noqa: T201 - a program that a test reads


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

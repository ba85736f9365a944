"""Make shell tasks of one sentence each, checked by a command.

    python examples/small_model/make_tasks.py [FOLDER]

writes train.jsonl (600 tasks), heldout.jsonl (200) and demonstrations.jsonl (60 conversations, for
`tugline sft`) into FOLDER (default: `tasks` beside this script). There are ten families. Held-out
tasks share no word with tasks for training and demonstrations.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent import SYSTEM

TEXT = """
acorn amber anchor apple arrow autumn badge bamboo barley basket beacon beaver berry birch blanket
blossom bottle branch breeze brick bridge bronze bucket button cactus camel candle canyon carpet
castle cedar cello chalk cherry cinder circle clover cobalt comet copper coral cotton cradle crane
cricket crystal curtain dagger daisy desert diamond dolphin dragon drum eagle ember emerald falcon
feather fern fiddle finch flame flute forest fossil fountain garden garlic ginger glacier granite
grape harbor harvest hazel hedge heron honey horizon iris island ivory jasmine jungle juniper kettle
ladder lagoon lantern laurel lemon lentil lily linen lizard lotus magnet maple marble meadow melon
meteor mirror mitten moss mountain nectar needle nickel oasis ocean olive onion orchid otter oyster
paddle panther parrot pebble pepper petal pigeon pillow planet plum pocket pollen poppy prairie
pumpkin puzzle quartz rabbit raven ribbon river rocket saddle saffron salmon sandal sapphire satin
"""
WORDS = TEXT.split()

Task = tuple[str, dict[str, str], str, str]
"""Instruction, initial files, the command that checks the result, and a command that solves it."""


def has(file: str, text: str) -> str:
    """Return a test for the content of a file, without trailing line ends."""
    return f'[ "$(cat {file})" = "{text}" ]'


def lines(rng: random.Random, vocabulary: list[str]) -> str:
    """Make a few lines of text."""
    return "".join(f"{rng.choice(vocabulary)}\n" for _ in range(rng.randint(3, 9)))


FAMILIES: dict[str, Callable[[str, str, str, str, str], Task]] = {
    "write": lambda a, _, x, __, ___: (
        f"Write the word {x} into a file named {a}.txt.",
        {},
        has(f"{a}.txt", x),
        f"echo {x} > {a}.txt",
    ),
    "folder": lambda a, b, _, __, text: (
        f"Create a folder named {a}.",
        {f"{b}.txt": text},
        f"[ -d {a} ] && [ -f {b}.txt ]",
        f"mkdir {a}",
    ),
    "rename": lambda a, b, _, __, text: (
        f"Rename the file {a}.txt to {b}.txt.",
        {f"{a}.txt": text},
        f"[ ! -e {a}.txt ] && {has(f'{b}.txt', text.strip())}",
        f"mv {a}.txt {b}.txt",
    ),
    "delete": lambda a, b, _, __, text: (
        f"Delete the file {a}.txt.",
        {f"{a}.txt": text, f"{b}.txt": text},
        f"[ ! -e {a}.txt ] && [ -f {b}.txt ]",
        f"rm {a}.txt",
    ),
    "copy": lambda a, b, _, __, text: (
        f"Copy the file {a}.txt to {b}.txt.",
        {f"{a}.txt": text},
        f"cmp -s {a}.txt {b}.txt && {has(f'{b}.txt', text.strip())}",
        f"cp {a}.txt {b}.txt",
    ),
    "append": lambda a, _, x, __, text: (
        f"Add the word {x} as a new line at the end of {a}.txt.",
        {f"{a}.txt": text},
        has(f"{a}.txt", f"{text}{x}"),
        f"echo {x} >> {a}.txt",
    ),
    "count": lambda a, b, _, __, text: (
        f"Count the lines of {a}.txt and write only the number into {b}.txt.",
        {f"{a}.txt": text},
        f'[ "$(tr -d " " < {b}.txt)" = {len(text.splitlines())} ]',
        f"wc -l < {a}.txt > {b}.txt",
    ),
    "replace": lambda a, _, x, y, text: (
        f"Replace the word {x} by {y} in the file {a}.txt.",
        {f"{a}.txt": f"{text}{x}\n"},
        has(f"{a}.txt", f"{text}{x}".replace(x, y)),
        f"sed -i s/{x}/{y}/g {a}.txt",
    ),
    "sort": lambda a, b, _, __, text: (
        f"Sort the lines of {a}.txt and write them into {b}.txt.",
        {f"{a}.txt": text},
        has(f"{b}.txt", "\n".join(sorted(text.splitlines()))),
        f"sort {a}.txt > {b}.txt",
    ),
    "move": lambda a, b, _, __, text: (
        f"Move the file {a}.txt into the folder {b}.",
        {f"{a}.txt": text, f"{b}/notes.txt": "notes\n"},
        f"[ ! -e {a}.txt ] && {has(f'{b}/{a}.txt', text.strip())}",
        f"mv {a}.txt {b}/",
    ),
}


def make(name: str, count: int, vocabulary: list[str], seed: int) -> list[dict[str, Any]]:
    """Make the rows of a split, with equally many of each family."""
    rng = random.Random(seed)
    families = list(FAMILIES)
    rows = []
    for number in range(count):
        family = families[number % len(families)]
        instruction, files, check, solution = FAMILIES[family](
            *rng.sample(vocabulary, 4), lines(rng, vocabulary)
        )
        test = f'{check} || printf "not "; echo "ok 1 - done"; echo 1..1'  # a TAP report
        row = {"id": f"{name}-{number}", "family": family, "instruction": instruction}
        rows.append({**row, "files": files, "test": test, "solution": solution})
    return rows


def demonstrate(row: dict[str, Any]) -> dict[str, Any]:
    """Make the conversation of an agent that solves a task with its first command."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": row["instruction"]},
        {"role": "assistant", "content": row["solution"]},
    ]
    return {"messages": messages}


def main() -> None:
    """Write all three files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    known, new = WORDS[: len(WORDS) * 3 // 4], WORDS[len(WORDS) * 3 // 4 :]
    files = {
        "train": make("train", 600, known, seed=1),
        "heldout": make("heldout", 200, new, seed=2),
        "demonstrations": [demonstrate(row) for row in make("shown", 60, known, seed=3)],
    }
    for name, rows in files.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
        print(f"{folder / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()

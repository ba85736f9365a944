"""Generator of small broken Python repositories, each with an issue and a failing test.

A problem is a wrong expression in one of two functions of a module. The bug is visible only in the
file, the right behaviour only in the issue, so an agent needs both. Six families of bugs, twelve
wordings, about forty modules and several hundred function names combine freely.

Invariants: the same split and seed give the same problems on every machine; a combination of
family, wording and module, and a function name, belong to one split only (by a checksum, not by
chance); the tests fail before the change, pass after the right one and fail after each wrong one.
"""

import random
import zlib
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tugline.datasets.base import TaskSet, TaskTemplate
from tugline.schema import decode, read_values
from tugline.types import PluginSpec, Task

Split = Literal["train", "heldout"]

HELD_OUT_SHARE = 5
"""Number of combinations, and of function names, of which one is held out."""
HELD_OUT_SEED = 1_000_003
"""Seed of the held-out problems; independent of the run, so runs can be compared."""


class Edit(msgspec.Struct, frozen=True):
    """Replacement of `old`, which occurs once in the module, by `new`."""

    old: str
    new: str


class RepairProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A repository with one bug."""

    id: str
    family: str
    files: dict[str, str]
    """Text by relative path: the module, its test, and the files that the test needs."""
    module: str
    """Path of the file to change."""
    tests: tuple[str, ...]
    """Paths in `files` of the tests; an evaluator uses these files, never the agent's versions."""
    instruction: str
    solution: Edit
    wrong: tuple[Edit, ...]
    """Edits that can be applied but do not make the tests pass."""
    blind: tuple[str, ...]
    """Texts that could be guessed from the issue but are not in the module."""
    tags: dict[str, str] = {}


# --------------------------------------------------------------------------- the families
class CodeChoice(msgspec.Struct, frozen=True):
    """A piece of code, and phrases for it in an issue."""

    code: str
    phrases: tuple[str, ...]


class Family(msgspec.Struct, frozen=True):
    """A kind of bug: an expression with a gap, and the choices for the gap."""

    name: str
    expression: str
    gap: str
    """Part of `expression`, around the code, that an edit replaces; short but unique."""
    need: str
    choices: tuple[CodeChoice, ...]
    """Code for the gap, from which the right code, the bug and the wrong fixes are drawn."""
    operands: Literal["two numbers", "numbers", "flags", "text"]


class Vocabulary(msgspec.Struct, frozen=True):
    """The contents of ``problems.yaml``, from which problems are drawn."""

    families: tuple[Family, ...]
    wordings: tuple[str, ...]
    modules: tuple[str, ...]
    verbs: tuple[str, ...]
    things: tuple[str, ...]
    single: tuple[str, ...]
    plural: tuple[str, ...]
    short_nouns: tuple[str, ...]


VOCABULARY = decode(read_values(Path(__file__).with_name("problems.yaml")), Vocabulary)


# --------------------------------------------------------------------------- generation
def split_of(*parts: str) -> Split:
    """Return the split of a combination, the same on every machine."""
    held_out = zlib.crc32("/".join(parts).encode()) % HELD_OUT_SHARE == 0
    return "heldout" if held_out else "train"


def generate(split: Split, seed: int) -> Iterator[RepairProblem]:
    """Yield problems of `split` without end, of each family in turn; reproducible by seed."""
    rng = random.Random(f"{split}/{seed}")
    for number, family in enumerate(cycle(VOCABULARY.families)):
        yield _problem(rng, split, f"{split}-{seed}-{number}", family)


class _Function(NamedTuple):
    """A function of a module, with its correct code."""

    family: Family
    name: str
    names: dict[str, str]
    choices: tuple[CodeChoice, ...]
    """The right choice, followed by choices that the test distinguishes from it."""
    rows: tuple[tuple[object, ...], ...]
    """Arguments of the calls in the test."""
    docstring: bool

    def expression(self, choice: CodeChoice) -> str:
        return self.family.expression.format(code=choice.code, **self.names)

    def gap(self, choice: CodeChoice) -> str:
        """Return the text that an edit replaces, with `choice` in the gap."""
        return self.family.gap.format(code=choice.code)

    @property
    def parameters(self) -> list[str]:
        gaps = [gap for gap in ("a", "b", "many") if f"{{{gap}}}" in self.family.expression]
        return [self.names[gap] for gap in gaps]

    def value(self, choice: CodeChoice, row: tuple[object, ...]) -> object:
        """Compute the function's result for `row`, with `choice` in the gap."""
        scope = dict(zip(self.parameters, row, strict=True))
        return eval(self.expression(choice), {}, scope)  # noqa: S307 - an expression of this file

    def source(self, choice: CodeChoice) -> str:
        lines = [f"def {self.name}({', '.join(self.parameters)}):"]
        if self.docstring:
            lines.append(f'    """{self.name.replace("_", " ").capitalize()}."""')
        return "\n".join([*lines, f"    return {self.expression(choice)}", ""])

    def test(self) -> str:
        lines = [f"def test_{self.name}():"]
        for row in self.rows:
            arguments = ", ".join(repr(value) for value in row)
            lines.append(
                f"    assert {self.name}({arguments}) == {self.value(self.choices[0], row)!r}"
            )
        return "\n".join([*lines, ""])


def _problem(rng: random.Random, split: Split, name: str, family: Family) -> RepairProblem:
    module, wording = _combination(rng, split, family)
    target = _function(rng, split, family, taken=())
    right, bug, *rest = target.choices
    old = target.gap(bug)
    other = _correct_function(rng, split, target, old)
    functions = [target.source(bug), other.source(other.choices[0])]
    rng.shuffle(functions)
    source = "\n\n".join(functions)
    word = rng.choice(right.phrases)
    need = family.need.format(word=word, **target.names)
    path = f"{module}.py"
    tests = [f"from {module} import {other.name}, {target.name}\n", target.test(), other.test()]
    return RepairProblem(
        id=name,
        family=family.name,
        files={
            path: source,
            "conftest.py": '"""Puts this folder on the path of the tests."""\n',
            f"tests/test_{module}.py": "\n\n".join(tests),
        },
        module=path,
        tests=(f"tests/test_{module}.py", "conftest.py"),
        instruction=VOCABULARY.wordings[wording].format(
            function=target.name, module=path, need=need
        ),
        solution=Edit(old, target.gap(right)),
        wrong=tuple(Edit(old, target.gap(choice)) for choice in rest),
        blind=tuple(gap for gap in map(target.gap, rest) if gap not in source),
        tags={"family": family.name, "wording": str(wording), "module": module, "word": word},
    )


def _correct_function(rng: random.Random, split: Split, target: _Function, old: str) -> _Function:
    """Return a correct function of another family, without the text to replace."""
    while True:
        family = rng.choice(
            [other for other in VOCABULARY.families if other.name != target.family.name]
        )
        other = _function(rng, split, family, taken=(target.name, *target.names.values()))
        if old not in other.source(other.choices[0]):
            return other


def _combination(rng: random.Random, split: Split, family: Family) -> tuple[str, int]:
    while True:
        module = rng.choice(VOCABULARY.modules)
        wording = rng.randrange(len(VOCABULARY.wordings))
        if split_of(family.name, module, str(wording)) == split:
            return module, wording


def _function(
    rng: random.Random, split: Split, family: Family, taken: tuple[str, ...]
) -> _Function:
    while True:
        name = f"{rng.choice(VOCABULARY.verbs)}_{rng.choice(VOCABULARY.things)}"
        a, b = rng.sample([noun for noun in VOCABULARY.single if noun not in taken], 2)
        many = rng.choice([noun for noun in VOCABULARY.plural if noun not in taken])
        choices = tuple(rng.sample(family.choices, min(5, len(family.choices))))
        rows = tuple(_row(rng, family) for _ in range(3))
        names = {"a": a, "b": b, "many": many}
        function = _Function(family, name, names, choices, rows, rng.random() < 0.5)
        if split_of(name) == split and name not in taken and _is_distinguished(function):
            return function


def _is_distinguished(function: _Function) -> bool:
    """Whether the rows of the test distinguish the right choice from every other one."""
    right, *others = (
        [function.value(choice, row) for row in function.rows] for choice in function.choices
    )
    return right not in others


def _row(rng: random.Random, family: Family) -> tuple[object, ...]:
    """Return arguments for a call of a function of `family`."""
    if family.operands == "two numbers":
        b = rng.randint(2, 12)
        return rng.choice([b, b + rng.randint(1, 40), rng.randint(1, b)]), b
    if family.operands == "numbers":
        return (rng.sample(range(1, 60), rng.randint(3, 6)),)
    if family.operands == "flags":
        return ([rng.random() < rng.choice((0.0, 0.5, 1.0)) for _ in range(3)],)
    return (f" {' '.join(rng.sample(VOCABULARY.short_nouns, 2))} ".replace("o", "O"),)


# --------------------------------------------------------------------------- the task set
class RepairTasks(TaskSet):
    """The demo's problems as a task set: ``tugline.demo.tasks:RepairTasks``."""

    def __init__(self, split: Split = "train", seed: int = 0, count: int = 96) -> None:
        self._split, self._seed, self._count = split, seed, count

    def tasks(self, template: TaskTemplate) -> Iterator[Task]:
        """Yield the first `count` problems of a split and a seed."""
        for problem in islice(generate(self._split, self._seed), self._count):
            yield template.make(
                problem.id,
                problem.instruction,
                evaluator=PluginSpec("tests"),
                files=problem.files,
                tags=problem.tags,
            )

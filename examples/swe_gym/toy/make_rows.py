"""Make a small repository and four rows in the format of SWE-bench.

    python examples/swe_gym/toy/make_rows.py [FOLDER]

writes FOLDER/larder, a git repository, and FOLDER/rows.jsonl (default: the folder of this script).
As in SWE-bench, each row is a commit that fixed an issue: its patch has the commit's changes of
code, its test patch those of tests, and its base is the previous commit. So the repository contains
the solution of every row in its later history, which agents must not see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

NAME = "larder"
WHO = {
    **{f"GIT_{who}_NAME": "A. Cook" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "cook@example.org" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_DATE": "2026-01-01T12:00:00Z" for who in ("AUTHOR", "COMMITTER")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}
PYTEST = "python3 -m pytest -rA -p no:cacheprovider"

START: dict[str, str] = {
    "README.txt": "larder\n\nWhat is in the kitchen, and for how long.\n",
    "larder/__init__.py": '"""What is in the kitchen."""\n',
    "larder/quantity.py": '''\
"""Quantities as cooks write them."""

from fractions import Fraction


def parse(text):
    """The number and the unit of a quantity such as ``2 kg`` or ``1/2 l``."""
    number, _, unit = text.strip().partition(" ")
    return float(Fraction(number)), unit.strip()
''',
    "larder/basket.py": '''\
"""Shopping lists."""


def merged(items):
    """One line for each thing, with the sum of its amounts."""
    total = {}
    for name, amount, unit in items:
        total[name] = (total.get(name, (0, unit))[0] + amount, unit)
    return sorted((name, amount, unit) for name, (amount, unit) in total.items())
''',
    "larder/shelf.py": '''\
"""What stands on a shelf, and until when it is good."""

from datetime import date, timedelta


def expired(items, today):
    """Names of what is not good any more on a day; `items` are names and last good days."""
    return [name for name, last in items if last < today]


def soon(items, today, days=3):
    """Names of what is still good, but not longer than so many days, the first to go first."""
    end = today + timedelta(days=days)
    return [name for name, last in sorted(items) if today <= last < end]


__all__ = ["date", "expired", "soon"]
''',
    "tests/test_quantity.py": """\
from larder.quantity import parse


def test_whole():
    assert parse("2 kg") == (2.0, "kg")


def test_fraction():
    assert parse("1/2 l") == (0.5, "l")
""",
    "tests/test_basket.py": """\
from larder.basket import merged


def test_sum():
    assert merged([("flour", 1, "kg"), ("flour", 2, "kg")]) == [("flour", 3, "kg")]


def test_order():
    found = merged([("salt", 1, "g"), ("flour", 1, "kg")])
    assert [name for name, _, _ in found] == ["flour", "salt"]
""",
    "tests/test_shelf.py": """\
from larder.shelf import date, expired

TODAY = date(2026, 1, 10)


def test_expired():
    assert expired([("milk", date(2026, 1, 9)), ("eggs", date(2026, 1, 10))], TODAY) == ["milk"]
""",
}


class Issue(NamedTuple):
    """One row: the issue, and the commit that fixed it."""

    problem: str
    change: tuple[str, str, str]
    """File, old text, new text."""
    tests: tuple[str, str]
    """File, and the text added to it."""
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    mistake: tuple[str, str]
    """A text of the solution, and what makes it fail; for the scripted sessions of `start.py`."""


ISSUES = [
    Issue(
        'Mixed numbers are not understood\n\n`parse("1 1/2 kg")` gives `(1.0, "1/2 kg")`. It '
        'should be `(1.5, "kg")`. A unit may be missing: `parse("3")` should stay `(3.0, "")`.',
        (
            "larder/quantity.py",
            """\
    number, _, unit = text.strip().partition(" ")
    return float(Fraction(number)), unit.strip()
""",
            """\
    words = text.split()
    number = Fraction(words.pop(0))
    if words and words[0][0].isdigit():
        number += Fraction(words.pop(0))
    return float(number), " ".join(words)
""",
        ),
        (
            "tests/test_quantity.py",
            """

def test_mixed():
    assert parse("1 1/2 kg") == (1.5, "kg")


def test_no_unit():
    assert parse("3") == (3.0, "")
""",
        ),
        ["tests/test_quantity.py::test_mixed"],
        [f"tests/test_quantity.py::test_{name}" for name in ("whole", "fraction", "no_unit")],
        ("number += ", "number -= "),
    ),
    Issue(
        'Amounts in different units are added up\n\n`merged([("milk", 1, "l"), ("milk", 2, "bottles'
        '")])` gives three bottles. Things should only be put together if their unit is the same; '
        "otherwise each unit has a line of its own, in the order of the units.",
        (
            "larder/basket.py",
            """\
        total[name] = (total.get(name, (0, unit))[0] + amount, unit)
    return sorted((name, amount, unit) for name, (amount, unit) in total.items())
""",
            """\
        total[name, unit] = total.get((name, unit), 0) + amount
    return [(name, amount, unit) for (name, unit), amount in sorted(total.items())]
""",
        ),
        (
            "tests/test_basket.py",
            """

def test_units():
    found = merged([("milk", 1, "l"), ("milk", 2, "bottles"), ("milk", 3, "l")])
    assert found == [("milk", 2, "bottles"), ("milk", 4, "l")]
""",
        ),
        ["tests/test_basket.py::test_units"],
        ["tests/test_basket.py::test_sum", "tests/test_basket.py::test_order"],
        (" + amount", " or amount"),
    ),
    Issue(
        "`soon` leaves out the last day and sorts by name\n\nWhat is good until the day that is "
        "`days` days ahead should be listed too, and the documentation says that the first to go "
        "comes first, but names are sorted.",
        (
            "larder/shelf.py",
            """\
    return [name for name, last in sorted(items) if today <= last < end]
""",
            """\
    ordered = sorted(items, key=lambda item: item[1])
    return [name for name, last in ordered if today <= last <= end]
""",
        ),
        (
            "tests/test_shelf.py",
            """

def test_soon_ends():
    from larder.shelf import soon

    assert soon([("milk", date(2026, 1, 13)), ("eggs", date(2026, 1, 14))], TODAY) == ["milk"]


def test_soon_order():
    from larder.shelf import soon

    items = [("eggs", date(2026, 1, 12)), ("milk", date(2026, 1, 11)), ("ham", date(2026, 1, 9))]
    assert soon(items, TODAY) == ["milk", "eggs"]
""",
        ),
        ["tests/test_shelf.py::test_soon_ends", "tests/test_shelf.py::test_soon_order"],
        ["tests/test_shelf.py::test_expired"],
        ("<= end", "< end"),
    ),
    Issue(
        "Things of which nothing is needed are listed\n\n`merged` should leave out a thing if its "
        'amounts add up to 0, as in `merged([("salt", 1, "g"), ("salt", -1, "g")])`.',
        (
            "larder/basket.py",
            """\
    return [(name, amount, unit) for (name, unit), amount in sorted(total.items())]
""",
            """\
    needed = sorted(item for item in total.items() if item[1] != 0)
    return [(name, amount, unit) for (name, unit), amount in needed]
""",
        ),
        (
            "tests/test_basket.py",
            """

def test_nothing():
    assert merged([("salt", 1, "g"), ("salt", -1, "g"), ("ham", 2, "g")]) == [("ham", 2, "g")]
""",
        ),
        ["tests/test_basket.py::test_nothing"],
        [f"tests/test_basket.py::test_{name}" for name in ("sum", "order", "units")],
        ("!= 0", "== 0"),
    ),
]


def main(folder: Path) -> list[dict[str, object]]:
    """Make the repository and the rows, which must not exist yet."""
    repo = folder / NAME
    repo.mkdir(parents=True, exist_ok=True)
    git(repo, "init", "-q", "-b", "main")
    for path, text in START.items():
        (repo / path).parent.mkdir(exist_ok=True)
        (repo / path).write_text(text)
    commits = [commit(repo, "Start")]
    for issue in ISSUES:
        path, old, new = issue.change
        source = (repo / path).read_text()
        if source.count(old) != 1:
            msg = f"{path} must have the text to change exactly once"
            raise ValueError(msg)
        (repo / path).write_text(source.replace(old, new))
        with (repo / issue.tests[0]).open("a") as file:
            file.write(issue.tests[1])
        commits.append(commit(repo, issue.problem.partition("\n")[0]))
    rows = [row(repo, n, commits) for n in range(len(ISSUES))]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


def row(repo: Path, number: int, commits: list[str]) -> dict[str, object]:
    """Make a row. Public data sets specify the test command in three ways; so do the rows."""
    issue, base, end = ISSUES[number], commits[number], commits[number + 1]
    test_patch = git(repo, "diff", base, end, "--", "tests")
    test_fields: list[dict[str, object]] = [
        {"test_cmd": PYTEST, "log_parser": "parse_log_pytest"},
        {"install_config": {"test_cmd": PYTEST, "log_parser": "parse_log_pytest"}},
        {
            "eval_script": script(test_patch, base, issue.tests[0]),
            "log_parser": "parse_log_pytest",
            "eval_type": "pass_and_fail",
        },
    ]
    as_text = number == 1
    return {
        "instance_id": f"tugline__{NAME}-{number + 1}",
        "repo": NAME,
        "base_commit": base,
        "environment_setup_commit": base,
        "version": "1.0",
        "problem_statement": issue.problem,
        "hints_text": "",
        "patch": git(repo, "diff", base, end, "--", NAME),
        "test_patch": test_patch,
        "FAIL_TO_PASS": json.dumps(issue.fail_to_pass) if as_text else issue.fail_to_pass,
        "PASS_TO_PASS": json.dumps(issue.pass_to_pass) if as_text else issue.pass_to_pass,
        **test_fields[number % 3],
    }


def script(test_patch: str, base: str, tests: str) -> str:
    """Make the evaluation script, which newer rows of SWE-bench have."""
    return f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git config --global --add safe.directory /testbed
git checkout {base} {tests}
git apply -v - <<'EOF_114329324912'
{test_patch}
EOF_114329324912
: '>>>>> Start Test Output'
{PYTEST} {tests}
: '>>>>> End Test Output'
git checkout {base} {tests}
"""


def commit(repo: Path, message: str) -> str:
    """Commit all files, with a reproducible hash."""
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "--allow-empty", "-m", message)
    return git(repo, "rev-parse", "HEAD").strip()


def git(repo: Path, *arguments: str) -> str:
    """Run git and return its output."""
    done = subprocess.run(
        ["git", *arguments],
        cwd=repo,
        env=os.environ | WHO,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    print(f"{len(main(target))} rows in {target / 'rows.jsonl'}")

"""Print the reward as JSON: a quarter for each correct function.

The functions run in their own process; only their output is evaluated.
"""

import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys
sys.path.insert(0, "/app")
import roman
def call(function, arguments):
    try:
        return function(*arguments)
    except ValueError:
        return "ValueError"
name, cases = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps([call(getattr(roman, name), case) for case in cases]))
"""
ERROR = "ValueError"
EXPECTED = {
    "write": {(1,): "I", (4,): "IV", (1994,): "MCMXCIV", (3999,): "MMMCMXCIX", (0,): ERROR},
    "read": {("I",): 1, ("iv",): 4, ("MCMXCIV",): 1994, ("IIII",): ERROR, ("VX",): ERROR},
    "add": {("XIV", "VI"): "XX", ("M", "CMXCIX"): "MCMXCIX"},
    "longest": {(3,): "III", (10,): "VIII", (100,): "LXXXVIII"},
}


def is_correct(name: str, expected: dict[tuple[object, ...], object]) -> bool:
    """Whether a function returns the expected results."""
    cases = json.dumps(list(expected))
    python = [os.environ["JUDGED"], "python3"] if "JUDGED" in os.environ else [sys.executable]
    argv = [*python, "-I", "-c", PROGRAM, name, cases]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
        return bool(json.loads(done.stdout) == list(expected.values()))
    except (ValueError, subprocess.TimeoutExpired):
        return False


parts = {name: float(is_correct(name, expected)) for name, expected in EXPECTED.items()}
print(json.dumps({"reward": sum(parts.values()) / len(parts), **parts}))

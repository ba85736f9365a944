"""A quarter for each function that answers right, as JSON.

The functions run in a process of their own and are judged by what they say.
"""

import json
import os
import subprocess
import sys

ASK = """
import json, sys
sys.path.insert(0, "/app")
import roman
def tried(function, given):
    try:
        return function(*given)
    except ValueError:
        return "ValueError"
name, given = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps([tried(getattr(roman, name), one) for one in given]))
"""
WRONG = "ValueError"
WANTED = {
    "write": {(1,): "I", (4,): "IV", (1994,): "MCMXCIV", (3999,): "MMMCMXCIX", (0,): WRONG},
    "read": {("I",): 1, ("iv",): 4, ("MCMXCIV",): 1994, ("IIII",): WRONG, ("VX",): WRONG},
    "add": {("XIV", "VI"): "XX", ("M", "CMXCIX"): "MCMXCIX"},
    "longest": {(3,): "III", (10,): "VIII", (100,): "LXXXVIII"},
}


def right(name: str, wanted: dict[tuple[object, ...], object]) -> bool:
    """Whether a function answers what it must."""
    asked = json.dumps(list(wanted))
    there = [os.environ["JUDGED"], "python3"] if "JUDGED" in os.environ else [sys.executable]
    argv = [*there, "-I", "-c", ASK, name, asked]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
        return bool(json.loads(done.stdout) == list(wanted.values()))
    except (ValueError, subprocess.TimeoutExpired):
        return False


parts = {name: float(right(name, wanted)) for name, wanted in WANTED.items()}
print(json.dumps({"reward": sum(parts.values()) / len(parts), **parts}))

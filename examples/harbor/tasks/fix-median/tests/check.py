"""Check the library's results. It runs in its own process; only its output is evaluated."""

import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys
sys.path.insert(0, "/app")
from stats import mean, median
def call(function, values):
    try:
        return function(values)
    except ValueError:
        return "ValueError"
unchanged = [3, 1, 2]
answers = [call(median, values) for values in ([5, 1, 3], [4, 1, 3, 2], [], [7], unchanged)]
print(json.dumps([*answers, unchanged, mean([1, 2, 6])]))
"""
EXPECTED = [3, 2.5, "ValueError", 7, 2, [3, 1, 2], 3]

python = [os.environ["JUDGED"], "python3"] if "JUDGED" in os.environ else [sys.executable]
done = subprocess.run(
    [*python, "-I", "-c", PROGRAM], stdout=subprocess.PIPE, text=True, timeout=30, check=False
)
try:
    answers = json.loads(done.stdout)
except ValueError:
    sys.exit(f"no answers: {done.stdout[-300:]!r}")
if answers != EXPECTED:
    sys.exit(f"{answers} instead of {EXPECTED}")

"""What the library must answer. It runs in a process of its own and is judged by what it says."""

import json
import os
import subprocess
import sys

ASK = """
import json, sys
sys.path.insert(0, "/app")
from stats import mean, median
def tried(function, values):
    try:
        return function(values)
    except ValueError:
        return "ValueError"
kept = [3, 1, 2]
answers = [tried(median, values) for values in ([5, 1, 3], [4, 1, 3, 2], [], [7], kept)]
print(json.dumps([*answers, kept, mean([1, 2, 6])]))
"""
WANTED = [3, 2.5, "ValueError", 7, 2, [3, 1, 2], 3]

there = [os.environ["JUDGED"], "python3"] if "JUDGED" in os.environ else [sys.executable]
done = subprocess.run(
    [*there, "-I", "-c", ASK], stdout=subprocess.PIPE, text=True, timeout=30, check=False
)
try:
    answers = json.loads(done.stdout)
except ValueError:
    sys.exit(f"no answers: {done.stdout[-300:]!r}")
if answers != WANTED:
    sys.exit(f"{answers}, and not {WANTED}")

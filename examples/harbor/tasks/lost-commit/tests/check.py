"""Check the history."""

import subprocess
import sys

GIT = ("git", "-c", "safe.directory=/app", "-C", "/app")


def git(*argv: str) -> str:
    """Run git and return its output."""
    done = subprocess.run([*GIT, *argv], capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


subjects = git("log", "--format=%s", "main").splitlines()
wanted = ["Add the lantern", "Add biscuits", "Add the harness", "Begin the packing list"]
if subjects != wanted:
    sys.exit(f"main has {subjects}")
if git("log", "-1", "--format=%an <%ae>", "main") != "Mate <mate@example.org>":
    sys.exit("the author is wrong")
if git("show", "main:lantern.txt") != "a lantern, and oil for ten nights":
    sys.exit("lantern.txt is wrong")
if git("show", "main:packing.txt").split() != ["ropes", "harness", "biscuits"]:
    sys.exit("packing.txt is wrong")
if git("symbolic-ref", "--short", "HEAD") != "main" or git("status", "--porcelain"):
    sys.exit("the working tree is not clean, or not on main")

"""Test each paragraph of the manual."""

import os
import subprocess
import unittest

PREFIX = [os.environ["JUDGED"]] if "JUDGED" in os.environ else []
"""Command that runs a program in the sandbox with the work, if that is another one."""


def run(*argv: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program in the sandbox with the work."""
    return subprocess.run(
        [*PREFIX, *argv], input=given, capture_output=True, text=True, timeout=10, check=False
    )


def topwords(*argv: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program of the task."""
    return run("/app/topwords", *argv, given=given)


class TopWords(unittest.TestCase):
    """The manual."""

    def test_order(self) -> None:
        """By number, then by alphabet."""
        done = topwords("-n", "3", given="b a c a b d")
        self.assertEqual((done.returncode, done.stdout), (0, "2\ta\n2\tb\n1\tc\n"))

    def test_words(self) -> None:
        """Case, apostrophes, digits."""
        done = topwords(given="Don't 'DON'T' x1y don't, it's'")
        self.assertEqual(done.stdout, "3\tdon't\n1\tit's\n1\tx\n1\ty\n")

    def test_default(self) -> None:
        """Ten."""
        done = topwords(given=" ".join("abcdefghijklm"))
        self.assertEqual(len(done.stdout.splitlines()), 10)

    def test_files(self) -> None:
        """Together."""
        script = "cd /tmp; echo sled dog > one; cp one two; /app/topwords -n 1 one two"
        done = run("sh", "-c", script)
        self.assertEqual(done.stdout, "2\tdog\n")

    def test_unreadable(self) -> None:
        """Named, and nothing is printed."""
        done = topwords("/app/sample.txt", "/nowhere")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertTrue(done.stderr.startswith("topwords: "))
        self.assertIn("/nowhere", done.stderr)

    def test_count(self) -> None:
        """Positive and whole."""
        for count in ("0", "-2", "many", "1.5"):
            self.assertEqual(topwords("-n", count, given="a").returncode, 2, count)


unittest.main()

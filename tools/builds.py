"""See that there are cargo, Maven and what it needs offline, whose forged outputs tests try.

Root on Debian or Ubuntu gets them by apt: 40 MB where there is a
JDK and cargo, 220 MB where there is neither.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from debian import install

PROGRAMS = {
    "cc": "gcc",
    "make": "make",
    "cargo": "cargo",
    "javac": "default-jdk-headless",
    "mvn": "maven",
}
"""Program to package."""
LIBRARIES = {
    "org/apache/maven/plugins/maven-compiler-plugin": "libmaven-compiler-plugin-java",
    "org/apache/maven/plugins/maven-resources-plugin": "libmaven-resources-plugin-java",
    "org/apache/maven/plugins/maven-surefire-plugin": "libsurefire-java",
    "junit/junit/4.x": "junit4",
}
"""Folder of Debian's Maven repository to package."""
REPOSITORY = Path("/usr/share/maven-repo")


def main() -> None:
    """Done at once where all of them are there."""
    missing = {own for name, own in PROGRAMS.items() if shutil.which(name) is None}
    missing |= {own for name, own in LIBRARIES.items() if not (REPOSITORY / name).exists()}
    if not missing:
        return
    names = " ".join(sorted(missing))
    print(f"builds: installing {names} with apt-get ...", file=sys.stderr, flush=True)
    if reason := install(sorted(missing)):
        print(f"builds: their tests are skipped; {names}: {reason}", file=sys.stderr)


main()

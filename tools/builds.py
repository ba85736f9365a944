"""Install cargo, CMake, Maven and its offline libraries if missing; tests forge their outputs.

As root on Debian or Ubuntu they are installed with apt: 40 MB if a JDK and cargo exist, 220 MB
otherwise.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from debian import install

PROGRAMS = {
    "cc": "gcc",
    "make": "make",
    "cmake": "cmake",
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
    """Install what is missing."""
    missing = {package for name, package in PROGRAMS.items() if shutil.which(name) is None}
    missing |= {package for name, package in LIBRARIES.items() if not (REPOSITORY / name).exists()}
    if not missing:
        return
    names = " ".join(sorted(missing))
    print(f"builds: installing {names} with apt-get ...", file=sys.stderr, flush=True)
    if reason := install(sorted(missing)):
        print(f"builds: their tests are skipped; {names}: {reason}", file=sys.stderr)


main()

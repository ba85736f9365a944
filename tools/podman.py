"""Install Podman if missing and make the images of its tests, for `make test-sandboxes`.

As root on Debian or Ubuntu it is installed with apt. No image registry is used: one image has only
busybox, the other is a Debian made by `debootstrap`, with a tar in the cache. The Debian image is
also tagged as the public base images that Dockerfiles commonly use, unless those exist.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from debian import install

PROGRAMS = {
    "podman": "podman",
    "runc": "runc",
    "conmon": "conmon",
    "slirp4netns": "slirp4netns",
    "newuidmap": "uidmap",
    "nsenter": "util-linux",
    "busybox": "busybox-static",
    "debootstrap": "debootstrap",
    "bwrap": "bubblewrap",
}
"""Program to package."""
PACKAGES = ("python3", "python3-pytest", "git", "ca-certificates")
SUITE = "bookworm"
BUSYBOX = "localhost/tugline/busybox:latest"
DEBIAN = "localhost/tugline/debian:12"
BASE_IMAGES = tuple(
    f"docker.io/library/{name}" for name in ("python:3.11-slim", "python:3.11", "debian:12-slim")
)
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LEFT_OUT = ("./dev/*", "./proc/*", "./sys/*", "./var/cache/apt/archives/*", "./var/lib/apt/lists/*")


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"podman: {text} ...", file=sys.stderr, flush=True)


def run(*argv: str | Path, **env: str) -> str:
    """Return the output of a program; exit with its error output if it fails."""
    done = subprocess.run(
        [str(part) for part in argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )
    if done.returncode != 0:
        output = " ".join((done.stderr or done.stdout).split())[-400:]
        sys.exit(f"podman: {argv[0]} {argv[1]} failed: {output}")
    return done.stdout


def provide(packages: list[str]) -> None:
    """Install packages with apt as root; otherwise exit, and tests skip what is missing."""
    say(f"installing {' '.join(packages)} with apt-get")
    if reason := install(packages):
        if os.geteuid() == 0 and shutil.which("apt-get"):
            sys.exit(f"podman: {reason}")
        names = " ".join(packages)
        print(f"podman: tests skip what is missing ({names}); {reason}", file=sys.stderr)
        sys.exit(0)


def has(image: str) -> bool:
    """Whether Podman has an image."""
    done = subprocess.run(["podman", "image", "exists", image], check=False)
    return done.returncode == 0


def load(image: str, tar: Path, command: str) -> None:
    """Import a tar as an image of one layer."""
    run("podman", "import", "-q", "-c", f'CMD ["{command}"]', "-c", f"ENV {PATH}", tar, image)


def make_busybox(tar: Path) -> None:
    """Pack the static busybox, and a link for each of its commands."""
    program = shutil.which("busybox") or "busybox"
    with tarfile.open(tar, "w") as archive:
        for name in ("bin", "tmp", "etc", "home", "root", "var", "run"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(folder)
        archive.add(program, "bin/busybox")
        for name in run(program, "--list").split():
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            if name != "busybox":
                archive.addfile(link)


def make_debian(tar: Path) -> None:
    """Make a small Debian with Python, pytest and git; takes one or two minutes."""
    with tempfile.TemporaryDirectory(dir=tar.parent) as folder:
        root = Path(folder) / "root"
        root.mkdir()  # its mode becomes that of the image's root
        run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, root)
        part = tar.with_suffix(".part")
        excluded = [f"--exclude={pattern}" for pattern in LEFT_OUT]
        run("tar", "-C", root, *excluded, "-cf", part, ".")
        part.rename(tar)


def main() -> None:
    """Install programs and make images, as far as they are missing."""
    missing = [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
    if missing:
        provide(missing)
    if not has(BUSYBOX):
        say(f"making {BUSYBOX}")
        with tempfile.TemporaryDirectory() as folder:
            make_busybox(Path(folder) / "busybox.tar")
            load(BUSYBOX, Path(folder) / "busybox.tar", "/bin/sh")
    if os.geteuid() != 0:
        return  # debootstrap needs root
    configured = os.environ.get("TUGLINE_CACHE")
    cache = Path(configured).expanduser() if configured else Path.home() / ".cache" / "tugline"
    tar = cache / "images" / "debian-12.tar"
    tar.parent.mkdir(parents=True, exist_ok=True)
    if not tar.exists():
        say(f"making {tar} with debootstrap")
        make_debian(tar)
    if not has(DEBIAN):
        say(f"making {DEBIAN}")
        load(DEBIAN, tar, "/bin/bash")
    for name in BASE_IMAGES:
        if not has(name):
            run("podman", "tag", DEBIAN, name)


main()

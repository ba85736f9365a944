"""A SLURM cluster of three nodes on this machine, with its own munge."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos.fleet import free_ports, until
from support.commands import run_program

NODES = ("n1", "n2", "n3")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "scontrol")
CONFIG = Path(__file__).with_name("slurm.conf").read_text(encoding="utf-8")


def find_obstacle() -> str:
    """Why SLURM cannot run here; empty if it can."""
    if os.geteuid() != 0:
        return "only root can start the daemons of SLURM"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(missing)} not found" if missing else ""


@dataclass
class Slurm:
    """A running cluster."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """Environment of its commands."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *argv: object, **env: str) -> str:
        """Run a command that must succeed; returns its output."""
        done = run_program(*argv, env={**self.env, **env}, timeout=60)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, **env: str) -> str:
        """Submit a job; returns its id."""
        return self.run("sbatch", "--parsable", *options, script, **env).partition(";")[0]

    def field(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``."""
        fields = self.run("scontrol", "show", "job", job).split()
        return dict(field.partition("=")[::2] for field in fields)[name]


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Run the daemons in `folder`; at the end jobs are cancelled first."""
    host, ports = socket.gethostname().partition(".")[0], free_ports(1 + len(NODES))
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    arguments = {"host": host, "ports": ports, "folder": folder, "nodes": "\n".join(nodes)}
    folder.chmod(0o755)
    for name in ("state", *(f"spool.{name}" for name in NODES)):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(**arguments))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    cluster = Slurm(folder)
    files = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    munge = [f"--{name}={folder / file}" for name, file in files.items()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_daemon(cluster, "munged", "--force", "--foreground", *munge))
        until((folder / "munge.socket").exists, "munge")
        stack.enter_context(_daemon(cluster, "slurmctld", "-D"))
        for name in NODES:
            stack.enter_context(_daemon(cluster, "slurmd", "-D", "-N", name))
        until(lambda: _idle(cluster) == len(NODES), "the nodes of SLURM")
        try:
            yield cluster
        finally:
            cluster.run("scancel", "--user=root", "--full", "--signal=KILL")
            cluster.run("scancel", "--user=root")
            until(lambda: not cluster.run("squeue", "--noheader"), "the jobs to end")


def _idle(cluster: Slurm) -> int:
    argv = ("sinfo", "--noheader", "--Node", "--format=%t")
    return run_program(*argv, env=cluster.env, timeout=60).stdout.split().count("idle")


@contextlib.contextmanager
def _daemon(cluster: Slurm, *argv: str) -> Iterator[None]:
    with (cluster.folder / f"{argv[0]}.{argv[-1].strip('-/')[-8:]}.out").open("ab") as out:
        process = subprocess.Popen(
            argv, env=cluster.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)

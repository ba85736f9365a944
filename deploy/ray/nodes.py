"""Nodes of Tugline on the machines of a Ray cluster, alone or inside a job of another framework.

    TUGLINE_JOIN_TOKEN=... python deploy/ray/nodes.py --server http://10.0.0.1:7700 --slots 32 \
        -- --engine http://10.0.0.7:8000 --renderer qwen3 --tokenizer models/mine

What follows `--` are options of `tugline node`. One actor on each machine keeps one `tugline node`
running there. A machine that joins gets one; one that Ray drains has its node drained; one that is
lost is forgotten, and its sessions are run elsewhere once their leases have ended. Ray only places:
what must not be lost is with the server, so this program may be killed and started again at any
time, and finds the nodes that it left. SIGTERM drains all nodes and ends.

A GCS that is restarted without Redis ends the cluster, and Ray aborts this program. The nodes
drain; start cluster and program again.

With `--max` the cluster grows with the server's queue: Ray's autoscaler is asked for as many
machines as the sessions need, and nodes without work are drained so that it may remove theirs.
"""

# ruff: noqa: INP001, T201 - a program, which speaks by printing
from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tugline.client.sync import SyncClient
from tugline.errors import TuglineError
from tugline.types import TERMINAL

NAMESPACE = "tugline"
ANSWER_S = 10.0
"""How long an actor may take to answer."""
RESTART_S = 5.0
"""Pause before a node that has ended is started again."""


@ray.remote(max_restarts=0)
class Keeper:
    """Keeps one `tugline node` running on its machine."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: str) -> None:
        self._command, self._env, self._log = command, {**os.environ, **env}, Path(log)
        self._process = self._start()
        self._ended: float | None = None
        self._draining = False
        threading.Thread(target=self._outlive, args=(os.getppid(),), daemon=True).start()

    def check(self) -> tuple[bool, str]:
        """Whether the node is drained, and why it ended by itself, said once.

        Such a node is started again a few seconds later.
        """
        code = self._process.poll()
        if code is None or self._draining:
            return code is not None, ""
        now = time.monotonic()
        if self._ended is None:
            self._ended = now
            said = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
            return False, f"code {code}, {said}"
        if now > self._ended + RESTART_S:
            self._process, self._ended = self._start(), None
        return False, ""

    def drain(self) -> None:
        """Let the node finish what it runs, and end."""
        self._draining = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _outlive(self, raylet: int) -> None:
        """Drain and end when Ray's part of this machine is gone, which may leave this actor behind.

        As when the GCS was restarted without what it knew; then nobody would ask for the node any
        more, and it would keep its folder from the one that a new cluster places here.
        """
        while os.getppid() == raylet:
            time.sleep(1.0)
        self.drain()
        self._process.wait()
        os._exit(0)

    def _start(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = ("setpriv", "--pdeathsig", "KILL", *self._command)  # it ends with this actor
        with self._log.open("ab") as log:
            return subprocess.Popen(command, env=self._env, stdout=log, stderr=log)


class Nodes:
    """The nodes of one server on the machines of this cluster, by the name of the machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._keepers: dict[str, Any] = {}
        self._leaving: set[str] = set()
        self._silent: set[str] = set()
        self._idle_since: dict[str, float] = {}

    def step(self, *, stopping: bool = False) -> None:
        """Compare machines and nodes once."""
        wanted = self._options.max and not stopping and self._scale()
        machines = {_name(one): one for one in ray.nodes() if one["Alive"] and self._fits(one)}
        for name in self._keepers.keys() - machines.keys():
            say(f"{name} is gone: its sessions are run elsewhere once their leases have ended")
            self._forget(name)
        draining = ray._private.state.state.get_draining_nodes()  # noqa: SLF001 - there is no other way
        free = []
        for name, machine in machines.items():
            if stopping or machine["NodeID"] in draining:
                self._drain(name)
            elif name not in self._keepers:
                free.append((name, machine))
        if self._options.max:  # without an answer of the server all stays as it is
            free = free[: max(0, (wanted or 0) - len(self._keepers))]
        if free:
            self._place(free)
        self._look_after()

    @property
    def ended(self) -> bool:
        """Whether none is left."""
        return not self._keepers

    def _fits(self, machine: Mapping[str, Any]) -> bool:
        resources, wanted = machine["Resources"], self._options.resource
        return resources.get("CPU", 0) >= self._options.cpus and (
            wanted is None or resources.get(wanted, 0) > 0
        )

    def _place(self, machines: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        options = self._options
        try:
            engines = find_engines(options.engine_actors) if options.engine_actors else []
        except (RayError, ValueError, LookupError) as error:
            names = ", ".join(name for name, _ in machines)
            say(f"no node yet for {names}: {_first_line(error)}")
            return
        for name, machine in machines:
            folder = f"{options.dir}/{name}"
            command = [*(options.tugline or [sys.executable, "-m", "tugline.cli.app"]), "node"]
            command += ["--server", options.server, "--dir", folder, "--name", name]
            command += ["--slots", str(options.slots), *options.node_options]
            command += [word for url in engines for word in ("--engine", url)]
            where = NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False)
            self._keepers[name] = Keeper.options(
                name=f"node {name} of {options.server}",
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=options.cpus,
                scheduling_strategy=where,
            ).remote(command, {"TUGLINE_JOIN_TOKEN": options.token}, f"{folder}/node.log")
            say(f"{name} runs a node, {options.slots} slots")

    def _look_after(self) -> None:
        """Ask all keepers at once, so that one that hangs costs one deadline."""
        asked = {keeper.check.remote(): name for name, keeper in self._keepers.items()}
        if not asked:
            return
        answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        for each in late:
            self._note_silence(asked[each], f"has not answered for {ANSWER_S:.0f} s")
        for each in answered:
            name = asked[each]
            try:
                drained, ended = ray.get(each)
            except ActorDiedError as error:  # the next step places another one
                say(f"{name}: {_first_line(error)}")
                self._forget(name)
                continue
            except RayError as error:  # Ray does not know yet whether it is lost
                self._note_silence(name, f"does not answer: {_first_line(error)}")
                continue
            self._silent.discard(name)
            if drained:
                ray.kill(self._keepers[name])
                say(f"{name} is drained")
                self._forget(name)
            elif ended:
                say(f"the node on {name} ended ({ended}); it starts again")

    def _note_silence(self, name: str, text: str) -> None:
        """Say it once, until it answers again."""
        if name not in self._silent:
            self._silent.add(name)
            say(f"{name} {text}")

    def _drain(self, name: str) -> None:
        keeper = self._keepers.get(name)
        if keeper is not None and name not in self._leaving:
            self._leaving.add(name)
            say(f"{name} drains")
            keeper.drain.remote()

    def _forget(self, name: str) -> None:
        self._keepers.pop(name, None)
        self._leaving.discard(name)
        self._silent.discard(name)

    # ------------------------------------------------------------------ growing and shrinking
    def _scale(self) -> int | None:
        """Ask for machines, drain what is idle; returns how many, None if the server is away."""
        options = self._options
        try:
            with SyncClient(options.server, deadline_s=ANSWER_S) as client:
                counts, nodes = client.status().sessions, client.nodes()
        except TuglineError as error:
            say(f"the queue cannot be read: {error}")
            return None
        work = sum(count for status, count in counts.items() if status not in TERMINAL)
        wanted = min(options.max, max(options.min, math.ceil(work / options.slots)))
        shape = {"CPU": options.cpus} if options.resource is None else {options.resource: 1}
        request_resources(bundles=[shape] * wanted)
        for name in self._idle(nodes)[: max(0, len(self._keepers) - wanted)]:
            self._drain(name)
        return wanted

    def _idle(self, nodes: Sequence[Any]) -> list[str]:
        """Machines whose nodes have had no session for `idle_s`."""
        now = time.monotonic()
        idle = {one.name for one in nodes if not one.running} & self._keepers.keys()
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}
        return [
            name for name, since in self._idle_since.items() if now > since + self._options.idle_s
        ]


def find_engines(prefix: str) -> list[str]:
    """Return the addresses of actors whose name begins so, such as verl's ``vllm_server_``.

    Raises `LookupError` if there is none, `RayError` or `ValueError` if one does not answer.
    """
    found = []
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["name"].startswith(prefix):
            actor = ray.get_actor(one["name"], one["namespace"])
            host, port = ray.get(actor.get_server_address.remote(), timeout=ANSWER_S)
            found.append(f"http://{host}:{port}")
    if not found:
        msg = f"no actor of this cluster has a name that begins with {prefix!r}"
        raise LookupError(msg)
    return sorted(found)


def _name(machine: Mapping[str, Any]) -> str:
    """Return the name of a machine, which is its address unless `ray start` was told another."""
    return str(machine["NodeName"] or machine["NodeManagerAddress"])


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{datetime.now(UTC):%FT%TZ} {text}", flush=True)


def main() -> None:
    """Keep a node on every machine until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--server", required=True, help="URL that all machines reach")
    parser.add_argument("--token", default=os.environ.get("TUGLINE_JOIN_TOKEN"), help="join token")
    parser.add_argument("--slots", type=int, default=8, help="agents at once on each machine")
    parser.add_argument("--dir", default="/tmp/tugline", help="folder of nodes on each machine")  # noqa: S108
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs to reserve of each machine")
    parser.add_argument("--resource", help="only machines with this resource of Ray")
    parser.add_argument("--engine-actors", help="engines are actors whose names begin so")
    parser.add_argument("--min", type=int, default=0, help="fewest machines")
    parser.add_argument("--max", type=int, help="grow to so many; without it the cluster is as is")
    parser.add_argument("--idle-s", type=float, default=60.0, help="before a node may be drained")
    parser.add_argument("--every-s", type=float, default=2.0, help="between two looks")
    parser.add_argument("--address", default="auto", help="of the cluster")
    parser.add_argument("--tugline", nargs="+", help="the program on each machine")
    parser.add_argument("node_options", nargs="*", help="options of `tugline node`, after --")
    options = parser.parse_args()
    if not options.token:
        parser.error("--token or TUGLINE_JOIN_TOKEN is missing: it is in the server's tokens.json")
    ray.init(address=options.address, namespace=NAMESPACE, log_to_driver=False)
    nodes = Nodes(options)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    while not (stopped.is_set() and nodes.ended):
        nodes.step(stopping=stopped.is_set())
        if stopped.wait(options.every_s):
            time.sleep(0.2)
    say("all nodes have ended")


if __name__ == "__main__":
    main()

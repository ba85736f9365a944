"""Nodes on the machines of a Ray cluster (``--cluster ray``), alone or in another program's job.

An actor on each machine keeps a ``tugline node`` running. A new machine gets an actor; when Ray
drains a machine, its node is drained; sessions of a lost machine run elsewhere after their leases
have expired. Ray only places the nodes and the server holds all state, so this process can be
killed and restarted at any time: it finds the actors that are already running.

A restart of the GCS without Redis ends the cluster, and Ray aborts this process. The nodes drain;
this process can be restarted when the cluster is back.

With ``ray.max`` the cluster grows with the server's queue: this process requests machines for the
sessions from Ray's autoscaler, and drains idle nodes so that it can remove their machines.
"""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from msgspec.structs import replace
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tugline.atomic import write_file
from tugline.client.sync import SyncClient
from tugline.errors import TuglineError, first_line
from tugline.launch.programs import DIES_WITH_PARENT
from tugline.launch.settings import Echo, Settings, encode_path
from tugline.types import TERMINAL

ANSWER_S = 10.0
"""Timeout of requests to an actor or the server, in seconds."""
RESTART_S = 5.0
"""Minimum seconds between two starts of a node."""
EVERY_S = 1.0
"""Seconds between two checks of the cluster."""


class NodeActor:
    """Actor that keeps a ``tugline node`` running on its machine, in a local folder."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], folder: str, settings: bytes
    ) -> None:
        """Start the node; `settings` is the content of its configuration file."""
        self._log = Path(folder, "node.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        write_file(file := Path(folder, "settings.json"), settings, 0o600)
        node = (sys.executable, "-m", "tugline.cli.app", "node", "--dir", folder)
        self._command = (*DIES_WITH_PARENT, *node, "--config", str(file), *command)
        self._env = {**os.environ, **env}
        self._draining = False
        self._start()
        threading.Thread(target=self._follow_raylet, args=(os.getppid(),), daemon=True).start()

    def check(self) -> tuple[bool, str]:
        """Restart a node that ended; return whether it is drained, and the reason for a restart."""
        code = self._process.poll()
        if code is None or self._draining:
            return code is not None, ""
        if time.monotonic() < self._started + RESTART_S:
            return False, ""
        last = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
        self._start()
        return False, f"code {code}, {last}"

    def drain(self) -> None:
        """Drain the node: it finishes its sessions and ends."""
        self._draining = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _follow_raylet(self, raylet: int) -> None:
        """Drain the node and exit when this machine's raylet is gone.

        For example, a GCS that restarts without its state no longer knows this actor, whose node
        would block its folder for the node that a new cluster places here.
        """
        while os.getppid() == raylet:
            time.sleep(1.0)
        self.drain()
        self._process.wait()
        os._exit(0)

    def _start(self) -> None:
        self._started = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log)


class Nodes:
    """Nodes of a server on the machines of this cluster, by name of the machine."""

    def __init__(self, settings: Settings, server: str, token: str, echo: Echo) -> None:
        self._settings = settings
        self._ray = settings.ray
        self._echo = echo
        self._server = server
        self._env = {"TUGLINE_JOIN_TOKEN": token}
        key = settings.engine.api_key_env
        if key and key in os.environ:
            self._env[key] = os.environ[key]
        self._actors: dict[str, Any] = {}
        self._leaving: set[str] = set()
        self._silent: set[str] = set()
        self._idle_since: dict[str, float] = {}

    def step(self, *, stopping: bool = False) -> bool:
        """Start and drain nodes as machines join and leave; return whether a node is left."""
        limit = math.inf
        if self._ray.max and not stopping:  # without the server's answer no node is added
            limit = self._scale() or 0
        machines = {_name(m): m for m in ray.nodes() if m["Alive"] and self._fits(m)}
        for name in self._actors.keys() - machines.keys():
            self._echo(
                f"{name} has left the cluster: its sessions are retried elsewhere once "
                "their leases expire"
            )
            self._forget(name)
        draining = ray._private.state.state.get_draining_nodes()  # noqa: SLF001 - there is no other way
        free: dict[str, Mapping[str, Any]] = {}
        for name, machine in machines.items():
            if stopping or machine["NodeID"] in draining:
                self._drain(name)
            elif name not in self._actors and len(self._actors) + len(free) < limit:
                free[name] = machine
        if free:
            self._start_nodes(free)
        self._check_nodes()
        return bool(self._actors)

    def _fits(self, machine: Mapping[str, Any]) -> bool:
        resources = machine["Resources"]
        wanted = self._ray.resource
        return resources.get("CPU", 0) >= self._ray.cpus and (
            wanted is None or resources.get(wanted, 0) > 0
        )

    def _start_nodes(self, machines: Mapping[str, Mapping[str, Any]]) -> None:
        engine = self._settings.engine
        if self._ray.engine_actors:
            try:
                engine = replace(engine, urls=find_engines(self._ray.engine_actors))
            except (RayError, ValueError, LookupError) as error:
                self._echo(f"no node on {', '.join(machines)} yet: {first_line(error)}")
                return
        tables = {"node": self._settings.node, "gateway": self._settings.gateway, "engine": engine}
        settings = msgspec.json.encode(tables, enc_hook=encode_path)
        actor = ray.remote(NodeActor)
        for name, machine in machines.items():
            folder = str(self._ray.folder / name)
            self._actors[name] = actor.options(
                name=f"node {name} of {self._server}",
                get_if_exists=True,
                lifetime="detached",
                max_restarts=0,
                num_cpus=self._ray.cpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False),
            ).remote(("--server", self._server, "--name", name), self._env, folder, settings)
            self._echo(f"{name} runs a node, {self._settings.node.slots} slots")

    def _check_nodes(self) -> None:
        """Check all actors concurrently, within a single deadline."""
        checks = {name: actor.check.remote() for name, actor in self._actors.items()}
        deadline = time.monotonic() + ANSWER_S
        for name, answer in checks.items():
            try:
                drained, ended = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
            except ActorDiedError as error:  # the next step starts a new actor
                self._echo(f"{name}: {first_line(error)}")
                self._forget(name)
                continue
            except RayError as error:  # late, or Ray has not decided yet whether the actor is lost
                if name not in self._silent:  # reported once, until the next answer
                    self._silent.add(name)
                    self._echo(f"{name} does not respond: {first_line(error)}")
                continue
            self._silent.discard(name)
            if drained:
                ray.kill(self._actors[name])
                self._echo(f"{name} is drained")
                self._forget(name)
            elif ended:
                self._echo(f"the node on {name} ended ({ended}); restarting it")

    def _drain(self, name: str) -> None:
        actor = self._actors.get(name)
        if actor is not None and name not in self._leaving:
            self._leaving.add(name)
            self._echo(f"{name} drains")
            actor.drain.remote()

    def _forget(self, name: str) -> None:
        del self._actors[name]
        self._leaving.discard(name)
        self._silent.discard(name)

    # ------------------------------------------------------------------ growing and shrinking
    def _find_machine(self, node: str) -> str:
        """Return the machine of a node, whose name may have a number (`processes.divide`)."""
        machine = node.rpartition("-")[0]
        return machine if node not in self._actors and machine in self._actors else node

    def _scale(self) -> int | None:
        """Request machines, drain idle nodes; return the number, None if the server is down."""
        options = self._ray
        try:
            with SyncClient(self._server, deadline_s=ANSWER_S) as client:
                counts = client.status().sessions
                nodes = client.nodes()
        except TuglineError as error:
            self._echo(f"the queue cannot be read: {error}")
            return None
        work = sum(count for status, count in counts.items() if status not in TERMINAL)
        needed = math.ceil(work / self._settings.node.slots)
        wanted = min(options.max or 0, needed)
        shape = {"CPU": options.cpus} if options.resource is None else {options.resource: 1}
        request_resources(bundles=[shape] * wanted)
        now = time.monotonic()
        busy = {self._find_machine(node.name) for node in nodes if node.running}
        idle = {self._find_machine(node.name) for node in nodes} & self._actors.keys() - busy
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}
        unused = [name for name, since in self._idle_since.items() if now > since + options.idle_s]
        for name in unused[: max(0, len(self._actors) - wanted)]:
            self._drain(name)
        return wanted


def keep_nodes(settings: Settings, server: str, token: str, echo: Echo) -> None:
    """Keep a node of `server` on every machine until SIGTERM, then drain all nodes.

    Raises `TuglineError` if there is no cluster.
    """
    try:
        ray.init(address=settings.ray.address, namespace="tugline", log_to_driver=False)
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        msg = f"cannot connect to a Ray cluster at {settings.ray.address}: {first_line(error)}"
        raise TuglineError(msg) from error
    if settings.server.host == "0.0.0.0":  # noqa: S104 - a server of this machine
        server = server.replace("//127.0.0.1:", f"//{ray.util.get_node_ip_address()}:")
    nodes = Nodes(settings, server, token, echo)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    while nodes.step(stopping=stopped.is_set()) or not stopped.is_set():
        if stopped.wait(EVERY_S):
            time.sleep(0.2)
    echo("all nodes have ended")


def find_engines(prefix: str) -> tuple[str, ...]:
    """Return the addresses of actors whose name starts with `prefix`, such as ``vllm_server_``.

    Raises `LookupError` if there is none, `RayError` or `ValueError` if one does not answer.
    """
    urls = []
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"].startswith(prefix):
            actor = ray.get_actor(named["name"], named["namespace"])
            host, port = ray.get(actor.get_server_address.remote(), timeout=ANSWER_S)
            urls.append(f"http://{host}:{port}")
    if not urls:
        raise LookupError(f"this cluster has no actor whose name begins with {prefix!r}")
    return tuple(sorted(urls))


def _name(machine: Mapping[str, Any]) -> str:
    """Return the name of a machine: its address, unless ``ray start`` was given a name."""
    return str(machine["NodeName"] or machine["NodeManagerAddress"])

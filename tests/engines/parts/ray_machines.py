"""A Ray cluster of some machines on this one, for a test: commands on stdin, answers on stdout.

Commands are lines such as ``add n5``, ``kill n2`` and ``drain n3``; each is answered with the
cluster's address. ``engine PORT`` makes an actor that names the engine there, as those of verl do.
``gcs restart`` kills the head's control service, which has no Redis, and starts it again.
"""

import functools
import os
import subprocess
import sys

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

answer = functools.partial(print, "at", flush=True)
"""Print an answer with a prefix, since Ray prints lines of its own."""


@ray.remote(num_cpus=0)
class EngineServer:
    """A stand-in for an engine that a trainer has started in this cluster."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get_server_address(self) -> tuple[str, int]:
        """Return where it listens."""
        return "127.0.0.1", self._port


def main() -> None:
    """Start it, and run commands until stdin ends."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    machines = {name: _add(cluster, name) for name in sys.argv[1:]}
    answer(cluster.address)
    for line in sys.stdin:
        what, name = line.split()
        if what == "add":
            machines[name] = _add(cluster, name)
        elif what == "kill":
            cluster.remove_node(machines.pop(name), allow_graceful=False)
        elif what == "drain":
            _drain(cluster.address, machines[name].node_id)
        elif what == "gcs":
            cluster.head_node.kill_gcs_server()
            cluster.head_node.start_gcs_server()
        elif what == "engine":
            ray.init(address=cluster.address, namespace="trainer", log_to_driver=False)
            on_head = NodeAffinitySchedulingStrategy(cluster.head_node.node_id, soft=False)
            options = {"name": "vllm_server_0", "lifetime": "detached"}
            EngineServer.options(scheduling_strategy=on_head, **options).remote(int(name))
        answer(cluster.address)
    os._exit(0)  # programs that are left end with this process


def _add(cluster: Cluster, name: str) -> object:
    return cluster.add_node(num_cpus=1, node_name=name, object_store_memory=80 << 20)


def _drain(address: str, node_id: str) -> None:
    """Announce that a machine will be taken away, as a cloud does before it preempts one."""
    subprocess.run(
        [
            sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address,
            "--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message", "a test", "--deadline-remaining-seconds", "120",
        ],
        check=True,
        stdout=sys.stderr,
    )  # fmt: skip


if __name__ == "__main__":
    main()

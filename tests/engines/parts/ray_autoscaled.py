"""A Ray cluster that grows and shrinks by Ray's own autoscaler, its machines on this one.

``ray_autoscaled.py PORT`` prints the cluster's address, and for each line on stdin the names of its
machines. Ray's provider for such machines gives all of them the name of this machine. The provider
in this file, which the autoscaler's process imports, gives each its own. ``ray start`` requires a
token.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
import ray._private.parameter
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

answer = functools.partial(print, "at", flush=True)
"""Print an answer with a prefix, since Ray prints lines of its own."""
MACHINES = 3
"""Largest number of machines."""
LISTS = (
    "cluster_synced_files", "head_setup_commands", "head_start_ray_commands",
    "initialization_commands", "rsync_exclude", "rsync_filter", "setup_commands",
    "worker_setup_commands", "worker_start_ray_commands",
)  # fmt: skip
"""Keys that the file of a cluster must have, empty here."""


class Provider(FakeMultiNodeProvider):  # type: ignore[misc,unused-ignore]
    """Machines are called m1, m2 and so on."""

    def _create_node_with_resources_and_labels(self, *given: Any) -> None:
        parameters = ray._private.parameter.RayParams
        name = f"m{self._next_node_id + 1}"
        ray._private.parameter.RayParams = lambda **more: parameters(**more, node_name=name)
        try:
            super()._create_node_with_resources_and_labels(*given)
        finally:
            ray._private.parameter.RayParams = parameters


def main(port: str) -> None:
    """Start the head; the autoscaler runs each second and removes machines idle for six."""
    address = f"{ray._private.services.get_node_ip_address()}:{port}"
    machine = {"CPU": 1, "object_store_memory": 80 << 20}
    config: dict[str, Any] = {
        **{key: [] for key in LISTS},
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "upscaling_speed": 1.0,
        "cluster_name": "autoscaled",
        "max_workers": MACHINES,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "external",
            "module": f"{Path(__file__).stem}.Provider",
            "gcs_address": address,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "use_node_id_as_ip": True,  # all machines share one address
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "machine": {"resources": machine, "node_config": {}, "max_workers": MACHINES},
        },
    }
    env = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    env["PYTHONPATH"] = str(Path(__file__).parent)
    file = Path("cluster.yaml").absolute()
    file.write_text(json.dumps(config))
    subprocess.run(
        [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=0",
            f"--port={port}", f"--autoscaling-config={file}", "--include-dashboard=false",
            f"--object-store-memory={80 << 20}",
        ],
        env={**os.environ, **env}, check=True, stdout=sys.stderr,
    )  # fmt: skip
    ray.init(address=address, log_to_driver=False)
    answer(address)
    for _ in sys.stdin:
        machines = {one["NodeName"] for one in ray.nodes() if one["Alive"]}
        answer(",".join(sorted(machines - {address.partition(":")[0]})))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

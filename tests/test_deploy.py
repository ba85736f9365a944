"""The files of ``deploy/``: valid for their own tools, consistent with our flags, keys and metrics.

A tool that is not installed (extra ``dev`` has all of them) skips its test.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from support.commands import run_program
from tugline.cli.app import COMMANDS, make_app
from tugline.launch.settings import load_settings
from tugline.server.http.route import Tokens

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
JOB = ROOT / "src" / "tugline" / "launch" / "tugline.sbatch"
SCRIPT = JOB.read_text()
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SERVICE_KEYS = {
    "build", "cap_drop", "command", "configs", "depends_on", "entrypoint", "environment",
    "extra_hosts", "healthcheck", "hostname", "image", "ports", "restart", "security_opt",
    "stop_grace_period", "volumes",
}  # fmt: skip
"""Keys of a service in the Compose specification, as far as they are used."""
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


def tool(name: str) -> str:
    """A program of this environment, or of the machine."""
    here = Path(sys.executable).with_name(name)
    path = str(here) if here.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def check(*argv: str | Path) -> None:
    """Run a linter, which must succeed."""
    done = run_program(*argv)
    assert done.returncode == 0, done.stdout + done.stderr


def documents() -> Iterator[dict[str, Any]]:
    """Each object of Kubernetes."""
    for path in MANIFESTS:
        for each in yaml.safe_load_all(path.read_text()):
            if "metadata" in each:
                yield each


def pods() -> dict[str, dict[str, Any]]:
    """Specifications of pods, by name."""
    templates = {each["metadata"]["name"]: each["spec"].get("template") for each in documents()
             if each["kind"] in {"Deployment", "StatefulSet"}}  # fmt: skip
    return {name: template["spec"] for name, template in templates.items()}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Calls of ``tugline``: where, and the arguments."""
    for name, service in COMPOSE["services"].items():
        if "tugline" in service["image"]:
            yield f"compose {name}", [re.sub(r"\$\{.*\}", "x", word) for word in service["command"]]
    for name, pod in pods().items():
        for container in pod["containers"]:
            if "tugline" in container["image"]:
                yield f"kubernetes {name}", container["args"]
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("CMD ["):
            yield "Dockerfile", json.loads(line.removeprefix("CMD "))
    text = SCRIPT.replace("\\\n", " ")
    for called in re.findall(r'^\s*"\$TUGLINE" ([a-z].*?)&$', text, re.MULTILINE):
        plain = re.sub(r"\$\{\w+:\+(.*?)\}", r"\1", called).replace("${urls[@]/#/--engine=}", "")
        plain = plain.replace("--port $SERVER_PORT", "").replace('--port "$SERVER_PORT"', "")
        yield "sbatch", [word for word in shlex.split(re.sub(r'--slots "\$SLOTS"', "", plain))
                         if word and word != "$NODE_OPTIONS"]  # fmt: skip
    yield "sbatch", ["train", "x", "--out", "x", "--server", "x", "--engine", "x", "--resume"]


# --------------------------------------------------------------------------- their own tools
def test_the_dockerfile_is_clean() -> None:
    """Hadolint finds nothing in the Dockerfile."""
    check(tool("hadolint"), DEPLOY / "Dockerfile")


def test_the_scripts_are_clean() -> None:
    """Shellcheck finds nothing in the shell scripts of the repository."""
    check(tool("shellcheck"), JOB, ROOT / ".ci" / "run")
    check(tool("shellcheck"), "--shell=sh", *(ROOT / "src/tugline/evaluators").glob("*.sh"))
    sandbox = (ROOT / "src/tugline/sandbox").glob("*.sh")
    check(tool("shellcheck"), "--shell=sh", "--exclude=SC1090", *sandbox)


def test_the_manifests_are_valid() -> None:
    """Each object is one of Kubernetes 1.37, without unknown keys."""
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed")
    import kubernetes_validate  # noqa: PLC0415 - not everywhere

    checked = 0
    for each in documents():
        if each["apiVersion"].startswith(("v1", "apps/", "autoscaling/")):
            kubernetes_validate.validate(each, "1.37", strict=True)
            checked += 1
    assert checked >= 7


def test_the_kustomization_is_complete() -> None:
    """The kustomization names all manifests, and no file that does not exist."""
    folder = DEPLOY / "kubernetes"
    own = yaml.safe_load((folder / "kustomization.yaml").read_text())
    settings = [file.partition("=")[2] for each in own["configMapGenerator"]
                for file in each["files"]]  # fmt: skip
    assert {*own["resources"], *settings, "kustomization.yaml", "adapter-values.yaml"} == {
        path.name for path in MANIFESTS
    }
    maps = {each["name"] for each in own["configMapGenerator"]}
    images = {each["name"] for each in own["images"]}
    for pod in pods().values():
        used = {one["configMap"]["name"] for one in pod.get("volumes", ()) if "configMap" in one}
        assert used <= maps
        built = {each["image"] for each in pod["containers"] if each["image"].startswith("tugline")}
        assert built <= images


def test_the_compose_file_is_consistent() -> None:
    """Services have known keys; the configs, volumes, images and services that they name exist."""
    assert COMPOSE.keys() == {"name", "x-node", "services", "volumes", "configs"}
    targets = re.findall(
        r"^FROM .* AS ([\w-]+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    )
    used: set[str] = set()
    for name, service in COMPOSE["services"].items():
        assert service.keys() <= SERVICE_KEYS, name
        assert {each["source"] for each in service.get("configs", ())} <= COMPOSE["configs"].keys()
        assert service.get("build", {"target": "server"})["target"] in targets
        waits = service.get("depends_on", {})
        assert set(waits) <= COMPOSE["services"].keys()
        if isinstance(waits, dict):
            assert {each["condition"] for each in waits.values()} <= CONDITIONS
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            used |= {source} - {"../examples/grafana"}
            assert source in COMPOSE["volumes"] or (DEPLOY / source / "tugline.json").exists()
    assert used == COMPOSE["volumes"].keys()


# --------------------------------------------------------------------------- our own truth
def test_every_command_is_parsed() -> None:
    """Calls of containers, pods and jobs are valid for our command line."""
    called = list(commands())
    places = {where.partition(" ")[0] for where, _ in called}
    assert places == {"compose", "kubernetes", "Dockerfile", "sbatch"}
    assert [argv[0] for where, argv in called if where == "sbatch"] == [
        "node", "up", "submit", "train"
    ]  # fmt: skip
    for where, argv in called:
        assert argv[0] in COMMANDS, where
        given = ["--server=x", "--token=x"] if argv[0] == "node" and where != "sbatch" else []
        given += ["--token=x"] if argv[0] == "node" and where == "sbatch" else []
        make_app().parse_args([*argv, *given], exit_on_error=False, print_error=False)


def test_every_setting_exists(tmp_path: Path) -> None:
    """Settings of containers and pods are read by our own strict loader."""
    paths = [DEPLOY / "kubernetes" / f"{name}-settings.yaml" for name in ("server", "node")]
    for name in ("server", "node"):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(COMPOSE["configs"][name]["content"])
    read = [load_settings(path, server={}, node={}, engine={}) for path in paths]
    tokens = re.sub(r"\$\{(\w+).*?\}", r"\1", COMPOSE["configs"]["tokens"]["content"])
    msgspec.json.decode(tokens, type=Tokens)
    nodes = read[1::2]
    assert {one.node.metrics_port for one in nodes} == {7701}
    assert all(str(one.server.store).startswith("postgresql://") for one in read[::2])
    assert ":7701" in COMPOSE["configs"]["prometheus"]["content"]
    grace = {one.node.grace_s for one in nodes}
    pod = pods()["tugline-node"]
    assert max(grace) < pod["terminationGracePeriodSeconds"]
    assert COMPOSE["services"]["node-1"]["stop_grace_period"] == f"{max(grace) / 60:.0f}m"


def test_every_variable_exists() -> None:
    """Our variables are documented; the example has those that the compose file requires."""
    texts = {path: path.read_text() for path in (DEPLOY / "Dockerfile", *MANIFESTS)}
    page = (ROOT / "docs" / "configuration.md").read_text()
    variables = {f"{name}" for service in COMPOSE["services"].values()
                 for name in service.get("environment", ())}  # fmt: skip
    variables |= {name for text in texts.values() for name in re.findall(r"\bTUGLINE_\w+", text)}
    variables |= set(re.findall(r"^\s*(?:export )?(TUGLINE_\w+)", SCRIPT, re.MULTILINE))
    ours = {name for name in variables if name.startswith("TUGLINE_")}
    assert {"TUGLINE_SERVER", "TUGLINE_JOIN_TOKEN", "TUGLINE_CACHE", "TUGLINE_TOKEN"} <= ours
    assert [name for name in sorted(ours) if f"`{name}`" not in page] == []
    example = (DEPLOY / "example.env").read_text()
    wanted = re.findall(r"\$\{(\w+):\?", (DEPLOY / "compose.yaml").read_text())
    assert set(re.findall(r"^(\w+)=", example, re.MULTILINE)) == set(wanted)
    asked = re.findall(r'^: "\$\{(\w+):=', SCRIPT, re.MULTILINE)
    assert [name for name in asked if not re.search(rf"`{name}[`=]|`{name} ", page)] == []


def test_monitors_and_autoscalers_are_consistent() -> None:
    """The ports, labels, secret keys and metric that they name exist."""
    kinds = {(each["kind"], each["metadata"]["name"]): each for each in documents()}
    labels = {name: pod["containers"][0]["ports"][0]["name"] for name, pod in pods().items()}
    for (kind, name), each in kinds.items():
        if kind == "PodMonitor":
            (endpoint,) = each["spec"]["podMetricsEndpoints"]
            assert labels[each["spec"]["selector"]["matchLabels"]["app"]] == endpoint["port"], name
    scaler = kinds["HorizontalPodAutoscaler", "tugline-node"]["spec"]
    assert ("Deployment", scaler["scaleTargetRef"]["name"]) in kinds
    metric = scaler["metrics"][0]["external"]["metric"]["name"]
    assert f"| `{metric}` | gauge |" in (ROOT / "docs" / "observability.md").read_text()
    rules = yaml.safe_load((DEPLOY / "kubernetes" / "adapter-values.yaml").read_text())["rules"]
    assert [rule["name"]["as"] for rule in rules["external"]] == [metric]
    text = "\n".join(path.read_text() for path in MANIFESTS)
    keys = {*re.findall(r"name: tugline, key: (\w+)", text), *re.findall(r"key: (\S+), path", text)}
    made = re.findall(r"--from-(?:literal|file)=([\w.]+)", (ROOT / "docs/deploy.md").read_text())
    assert keys <= set(made)


def test_the_ray_cluster_is_consistent() -> None:
    """Options, variables, secrets and settings of its pods match the other files."""
    folder = DEPLOY / "kuberay"
    own = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert all((folder / each).exists() for each in (*own["resources"], *own["configurations"]))
    cluster = yaml.safe_load((folder / "cluster.yaml").read_text())["spec"]
    (workers,) = cluster["workerGroupSpecs"]
    head, worker = (one["template"]["spec"] for one in (cluster["headGroupSpec"], workers))
    nodes = pods()["tugline-node"]
    assert {"name": "settings", "configMap": {"name": "tugline-node"}} in worker["volumes"]
    (container,) = worker["containers"]
    assert container["securityContext"] == nodes["containers"][0]["securityContext"]
    assert worker["hostUsers"] is nodes["hostUsers"] is False
    assert worker["terminationGracePeriodSeconds"] == nodes["terminationGracePeriodSeconds"]
    (script,) = head["containers"][0]["args"]
    assert {"name": "settings", "configMap": {"name": "tugline-node"}} in head["volumes"]
    (command,) = re.findall(r"^ *tugline (node .*)$", script, re.MULTILINE)
    argv = [*shlex.split(command), "--token=x"]
    make_app().parse_args(argv, exit_on_error=False, print_error=False)
    file = DEPLOY / "kubernetes" / "node-settings.yaml"
    placing = load_settings(file, server={}, node={}, engine={}).ray
    assert placing.max == workers["maxReplicas"]
    assert placing.cpus < int(worker["containers"][0]["resources"]["requests"]["cpu"])
    mounts = {one["mountPath"] for one in worker["containers"][0]["volumeMounts"]}
    assert mounts == {str(placing.folder), argv[argv.index("--config") + 1].rpartition("/")[0]}
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert f"ray[default]=={cluster['rayVersion']}" in dockerfile
    for one in head["containers"][0]["env"]:
        assert one["valueFrom"]["secretKeyRef"]["name"] == "tugline"
        assert one["name"] in {"TUGLINE_JOIN_TOKEN", "TUGLINE_TOKEN"}


def test_containers_have_no_privileges() -> None:
    """No container runs as root, and our containers drop all capabilities."""
    users = re.findall(r"^USER (\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert users[-1] == users[0] == "10001:10001"
    for name, pod in pods().items():
        assert pod["securityContext"]["runAsNonRoot"], name
        if name.startswith("tugline"):
            context = pod["containers"][0]["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
    for name in ("server", "node-1", "node-2"):
        assert COMPOSE["services"][name]["cap_drop"] == ["ALL"]

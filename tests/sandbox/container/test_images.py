"""Images of a real Podman: missing, built, broken, inspected and removed."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiodocker.containers import DockerContainer, DockerContainers

from support.containers import BUSYBOX, DEBIAN, has_image, remove_images
from tugline.errors import ImageError
from tugline.patch import FileChange
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.container import Container
from tugline.sandbox.container_engine import ContainerEngine, Docker, DockerError
from tugline.sandbox.container_images import BUILT, build_name, find_image
from tugline.types import Workspace

pytestmark = [
    pytest.mark.podman,
    pytest.mark.filterwarnings("ignore:Unclosed connection:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache for each test.

    aiodocker does not close the response of a cancelled pull or build; it is collected here, so
    that no warning about it appears in another test.
    """
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    gc.collect()


def context(folder: Path, dockerfile: str) -> Workspace:
    """A folder to build from, whose image is new each time, since it contains its path."""
    folder.mkdir()
    (folder / "Dockerfile").write_text(dockerfile)
    (folder / "own").write_text(str(folder))
    return Workspace(build=str(folder))


def names(*workspaces: Workspace) -> list[str]:
    """Names of the images that they build."""
    return [build_name(Path(workspace.build or "")) for workspace in workspaces]


def built(engine: str, *workspaces: Workspace) -> list[str]:
    """Names of those images that the engine has."""
    return [name for name in names(*workspaces) if has_image(engine, name)]


async def open_error(runtime: Container, tmp_path: Path, workspace: Workspace) -> str:
    """The error when a sandbox is opened."""
    with pytest.raises(ImageError) as caught:
        async with (
            asyncio.timeout(30),
            runtime.open(tmp_path / "sandbox", SandboxSpec(workspace=workspace)),
        ):
            pass
    return str(caught.value)


@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_transient_errors_are_retried(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman answers 500 for an image while it writes its storage; there are two retries."""
    requests = []

    async def inspect(name: str) -> dict[str, object]:
        requests.append(name)
        if len(requests) <= failures:
            raise DockerError(500, "locating item named manifest")
        return {"Id": "abc"}

    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("asyncio.sleep", sleep)
    docker = cast("Docker", SimpleNamespace(images=SimpleNamespace(inspect=inspect)))
    if failures == 3:
        with pytest.raises(DockerError, match="manifest"):
            await find_image(docker, "debian:12")
    else:
        image = await find_image(docker, "debian:12")
        assert image.id == "abc"
    assert pauses == [0.2, 1.0][:failures]


GONE = "registry.invalid/nobody/nothing:1"


@pytest.mark.parametrize(
    ("options", "image", "expected"),
    [
        (
            {},
            GONE,
            f"^image '{GONE}' cannot be pulled: .*registry.invalid.*load it into the engine by",
        ),
        ({"pull": "never"}, GONE, f"^image '{GONE}' is missing, and the option `pull` is 'never'$"),
        ({}, "../../info?", r"^'\.\./\.\./info\?' is not a valid image name$"),
        ({}, "a/../../../version", "^'a/../../../version' is not a valid image name$"),
        ({}, "a b", "^'a b' is not a valid image name$"),
        ({}, "x?all=1", r"^'x\?all=1' is not a valid image name$"),
        ({}, "./a", "^'./a' is not a valid image name$"),
        (
            {"pull_s": 1.0},
            "127.0.0.1:{port}/x:1",
            r"^image .*: not finished within 1 s \(option pull_s\)$",
        ),
    ],
)
async def test_missing_images_are_reported(
    podman: str, tmp_path: Path, options: dict[str, Any], image: str, expected: str
) -> None:
    """The error has the engine's message; a name that would change the URL is refused."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a registry that never answers
        name = image.format(port=silent.getsockname()[1])
        output = await open_error(
            Container(engine=podman, **options), tmp_path, Workspace(image=name)
        )
    assert re.search(expected, output, re.DOTALL), output


async def test_sessions_share_a_build(podman: str, tmp_path: Path) -> None:
    """Sessions with the same Dockerfile share one build and have its workdir."""
    dockerfile = f"FROM {DEBIAN}\nWORKDIR /app\nCOPY own ./\nRUN date +%N >stamp\nENV K=v\n"
    workspace = context(tmp_path / "context", dockerfile)
    runtime = Container(engine=podman)

    async def session(number: int) -> tuple[bytes | None, dict[str, FileChange | None], str]:
        spec = SandboxSpec(workspace=workspace, files={"task.txt": "t"})
        async with runtime.open(tmp_path / f"sandbox{number}", spec) as sandbox:
            assert str(sandbox.workdir) == "/app"
            await sandbox.run(["sh", "-c", "echo $K; cat task.txt; rm own"], env={}, timeout_s=20)
            output = (sandbox.logs / "agent.log").read_text()
            return (
                await sandbox.get(sandbox.workdir / "stamp"),
                (await sandbox.diff()).files,
                output,
            )

    try:
        results = await asyncio.gather(*map(session, range(3)))
        assert results[0] == results[1] == results[2]
        assert results[0][0]
        assert results[0][1:] == ({"own": None}, "v\nt")
    finally:
        remove_images(podman, *names(workspace))


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        (
            f"FROM {BUSYBOX}\nRUN echo this is why >&2; exit 3\n",
            "(exit status|code:) 3.*this is why",
        ),
        (f"FROM {BUSYBOX}\nNONSENSE x\n", "(?i)nonsense"),
        ("FROM registry.invalid/x:1\n", "registry.invalid"),
        (f"FROM {BUSYBOX}\nRUN sleep 20\n", r"not finished within 2 s \(option build_s\)"),
    ],
    ids=["a step fails", "an unknown instruction", "a missing base", "it hangs"],
)
async def test_failed_builds_are_reported(
    podman: str, tmp_path: Path, dockerfile: str, expected: str
) -> None:
    """The error has the last lines of output; no image is left."""
    workspace = context(tmp_path / "context", dockerfile)
    output = await open_error(Container(engine=podman, build_s=2.0), tmp_path, workspace)
    assert output.startswith(f"{tmp_path}/context/Dockerfile cannot be built: ")
    assert re.search(expected, output, re.DOTALL), output
    assert "\x1b" not in output
    assert not built(podman, workspace)


async def test_a_folder_without_a_dockerfile_is_an_error(podman: str, tmp_path: Path) -> None:
    """The error has the folder and what would be right."""
    output = await open_error(Container(engine=podman), tmp_path, Workspace(build=str(tmp_path)))
    assert output == f"workspace.build is '{tmp_path}', must be a folder with a Dockerfile"


async def test_a_cancelled_inspection_leaves_no_container(
    podman: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation during creation or removal of the container leaves nothing."""
    runtime = Container(engine=podman, image=BUSYBOX)
    await asyncio.to_thread(runtime.inspect)
    reached = asyncio.Event()
    made: set[str] = set()  # other tests read images of the same engine at the same time
    create = DockerContainers.create

    async def record(*args: Any, **kwargs: Any) -> DockerContainer:
        container = await create(*args, **kwargs)
        made.add(container.id)
        return container

    def slowly(real: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            reached.set()
            await asyncio.sleep(0.2)
            return await real(*args, **kwargs)

        return call

    async def session() -> None:
        async with runtime.open(tmp_path / "sandbox"):
            pass

    monkeypatch.setattr(DockerContainers, "create", record)
    for holder, name in ((DockerContainers, "create"), (DockerContainer, "delete")):
        with monkeypatch.context() as patched:
            patched.setattr(holder, name, slowly(getattr(holder, name)))
            reached.clear()
            task = asyncio.create_task(session())
            await asyncio.wait_for(reached.wait(), 20)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    async with ContainerEngine(podman).client() as docker:
        left = {container.id for container in await docker.containers.list(all=True)}
    assert len(made) == 2
    assert not made & left


async def test_least_recently_used_builds_are_removed(podman: str, tmp_path: Path) -> None:
    """Over `images_gb` the build that was not used for longest goes; other images stay."""
    runtime = Container(engine=podman, images_gb=0.005)  # two of them fit, three do not
    dockerfile = f"FROM {BUSYBOX}\nCOPY own /\n"
    first, second, third = (context(tmp_path / name, dockerfile) for name in "abc")
    try:
        assert await runtime.prefetch([first, second]) == []
        assert await runtime.prefetch([first, third]) == []
        assert set(built(podman, first, second, third)) == set(built(podman, first, third))
        assert len(built(podman, first, third)) == 2
        assert has_image(podman, BUSYBOX)
    finally:
        remove_images(podman, *names(first, second, third))


async def test_images_in_use_are_not_removed(podman: str, tmp_path: Path) -> None:
    """The image of an open sandbox stays, even if it is too large."""
    runtime = Container(engine=podman, images_gb=0.001)
    dockerfile = f"FROM {BUSYBOX}\nCOPY own /\n"
    first, second = (context(tmp_path / name, dockerfile) for name in "ab")
    try:
        async with runtime.open(tmp_path / "sandbox", SandboxSpec(workspace=first)) as sandbox:
            assert await runtime.prefetch([second]) == []
            assert (await sandbox.run(["cat", "/own"], env={}, timeout_s=20)).code == 0
            assert len(built(podman, first, second)) == 2
    finally:
        remove_images(podman, *names(first, second))


def test_names_depend_on_the_content(tmp_path: Path) -> None:
    """The same files have the same name; another byte, mode or file name changes it."""
    for folder in ("a", "b", "c", "d", "e"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "Dockerfile").write_text("FROM x\n")
        (tmp_path / folder / "sub" / "f").write_text("1")
    (tmp_path / "c" / "sub" / "f").write_text("2")
    (tmp_path / "d" / "sub" / "f").chmod(0o755)
    (tmp_path / "e" / "sub" / "f").rename(tmp_path / "e" / "sub" / "g")
    built_names = [build_name(tmp_path / folder) for folder in "abcde"]
    assert built_names[0] == built_names[1]
    assert len(set(built_names)) == 4
    assert all(name.startswith(f"{BUILT}:") for name in built_names)

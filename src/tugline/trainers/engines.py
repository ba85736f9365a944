"""The engines of a run: connected or started, and kept at the published weights.

The engine is in the process of rank 0 with a copy of the model, or a running vLLM or SGLang. It
receives full weights, with any adapter merged, or the adapter alone.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tugline import log
from tugline.errors import EngineError, TuglineError, UsageError
from tugline.inference.engine import Engine
from tugline.launch.engine import (
    EngineConnection,
    make_rendering,
    open_engine,
    read_api_key,
    serve_engine,
)
from tugline.protocol import PauseMode
from tugline.recording.verify.engine import connect_scorer
from tugline.trainers.config import TrainConfig
from tugline.trainers.models import Models, write_model
from tugline.trainers.proof import Probe
from tugline.trainers.publish import (
    ADAPTER,
    Publication,
    Publisher,
    Update,
    VllmWeightUpdater,
    WeightControl,
    make_updater,
)

_WATCH_S = 5.0
"""Seconds between checks of the replicas' versions, and between attempts to publish."""
_log = log.get("trainers.engines")


@dataclass(frozen=True, slots=True)
class Replicas:
    """The engine's connection, and the update function of each replica by URL."""

    connection: EngineConnection
    updaters: Mapping[str, Update]


@contextlib.asynccontextmanager
async def open_replicas(
    config: TrainConfig, models: Models, folder: Path
) -> AsyncIterator[Replicas]:
    """Connect to the engines at ``engine.urls``, or serve a copy of the model in this process.

    An adapter to publish alone is loaded from `folder` first, because calls use its name.
    """
    if config.engine.urls:
        slots = config.node.slots
        key = read_api_key(config.engine)
        async with contextlib.AsyncExitStack() as stack:
            connection = await stack.enter_async_context(open_engine(config.engine, slots=slots))
            remotes = [await make_updater(url, key) for url in connection.urls]
            for each in remotes:
                await stack.enter_async_context(each)
            if config.publishes_adapter:
                if other := [r.url for r in remotes if not isinstance(r, VllmWeightUpdater)]:
                    msg = (
                        f"lora.publish is 'adapter', which requires vLLM, but {other[0]} is "
                        "another engine; set 'merged'"
                    )
                    raise UsageError(msg)
                await asyncio.to_thread(write_model, config, models, folder)
                for each in remotes:
                    await each.update(folder, 0, PauseMode.WAIT)
                template = connection.rendering and connection.rendering.name
                named = replace(config.engine, served_name=ADAPTER, renderer=template)
                connection = await stack.enter_async_context(open_engine(named, slots=slots))
            yield Replicas(connection, {each.url: each.update for each in remotes})
        return
    assert models.served is not None  # noqa: S101 - loaded if there are no URLs
    text = models.served.config.get_text_config()
    engine = Engine(
        models.served,
        eos_ids=models.eos_ids,
        max_model_len=config.window or int(text.max_position_embeddings),
        max_running=2 * config.node.slots,
        threads=1,
    )

    async def swap(_folder: Path, version: int, running: PauseMode) -> None:
        await engine.swap(await asyncio.to_thread(models.trainer.weights), version, running)

    rendering = make_rendering(config.engine, models.tokenizer, str(text.model_type))
    async with engine, serve_engine(engine, rendering) as connection:
        yield Replicas(connection, {connection.urls[0]: swap})


def make_publisher(config: TrainConfig, control: WeightControl, replicas: Replicas) -> Publisher:
    """Return the publisher of weights to the replicas, behind the gateways of `control`."""
    model = ADAPTER if config.publishes_adapter else None
    return Publisher(
        control,
        replicas.updaters,
        mode=config.schedule.pause,
        within_s=config.schedule.publish_s,
        connect=partial(connect_scorer, model=model, key=read_api_key(config.engine)),
    )


# --------------------------------------------------------------------------- published weights
@dataclass(eq=False)
class ServedWeights:
    """The weights that the replicas serve; each version has a folder below `folder` meanwhile."""

    config: TrainConfig
    models: Models
    publisher: Publisher
    folder: Path
    report: Callable[[str], object]

    def __post_init__(self) -> None:
        self._published: tuple[Path, int] | None = None
        """Folder and version of the weights that the replicas serve."""
        self._publishing = asyncio.Lock()

    async def publish(self, version: int, probe: Probe | None) -> Publication:
        """Publish the trainer's weights to every replica."""
        folder = (self.folder / f"v{version}").absolute()
        if self.config.engine.urls:
            await asyncio.to_thread(write_model, self.config, self.models, folder)
        async with self._publishing:
            publication = await self._publish_folder(folder, version, probe)
            old = self._published
            self._published = (folder, version)
        if old is not None:
            await asyncio.to_thread(shutil.rmtree, old[0], ignore_errors=True)
        return publication

    async def _publish_folder(self, folder: Path, version: int, probe: Probe | None) -> Publication:
        """Publish, and retry for `publish_s` seconds if a replica or a node is lost meanwhile."""
        deadline = time.monotonic() + self.config.schedule.publish_s
        while True:
            try:
                return await self.publisher.publish(folder, version, probe)
            except EngineError as error:
                retryable = self.config.engine.urls and error.status is None
                if not retryable or time.monotonic() > deadline:
                    raise
                self.report(f"retrying to publish version {version}: {error}")
                await asyncio.sleep(_WATCH_S)

    async def restore_replicas(self) -> None:
        """Load the published weights into replicas that were restarted without them, for ever."""
        reported = ""
        while True:
            await asyncio.sleep(_WATCH_S)
            async with self._publishing:
                try:
                    await self._restore_once()
                except Exception as error:  # noqa: BLE001 - without this task none is restored
                    known = isinstance(error, TuglineError)
                    text = str(error) if known else log.describe_error(error)
                    if text != reported:
                        _log.warning("replicas not checked; checked again later", error=text)
                    reported = text

    async def _restore_once(self) -> None:
        if self._published and await self.publisher.find_outdated(self._published[1]):
            self.report("a replica was restarted; loading its weights again")
            await self.publisher.publish(*self._published)

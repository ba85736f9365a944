"""Harbor's Claude Code agent with the exact token ids of its run, see README.md.

    harbor run -p TASKS -a tugline_harbor:ClaudeCode --ak engine=http://127.0.0.1:8000

A job has one gateway in Harbor's process, which is open while any trial runs an agent. Each run is
a session of the gateway. Claude Code is Harbor's agent; only its variables for the address, key and
name of the model are set. The recorded tokens become ``rollout_details`` of the agent's result, and
the recording is stored in the agent's logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import structlog
from harbor.agents.installed.claude_code import ClaudeCode as HarborClaudeCode
from harbor.agents.installed.claude_code import ClaudeCodeOptions
from harbor.agents.options import Cli
from pydantic import Field

from tugline import log
from tugline.gateway.app import Gateway, Opened
from tugline.gateway.terms import SessionTerms
from tugline.harnesses.base import LaunchContext
from tugline.harnesses.claude_code import ClaudeCode as Preset
from tugline.launch.engine import open_engine
from tugline.launch.settings import load_settings
from tugline.recording.folder import tokenizer_name
from tugline.rollout.rollout import MODEL
from tugline.traces.base import make_builder
from tugline.types import PluginSpec, Sampling, Session, Task, Trace, TraceKind

FOLDER = "tugline"
"""Folder for the recording, in the agent's logs."""
OTHER_CREDENTIALS = ("ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_BEDROCK")
"""Variables with which Claude Code would use another model; they are set to empty."""


class Options(ClaudeCodeOptions):
    """Options of the agent (``--ak name=value``), beside those of Harbor's Claude Code."""

    engine: str | None = Field(default=None, description="Address of the inference engine.")
    tokenizer: str | None = Field(default=None, description="tokenizer.json, for exact mode.")
    renderer: str | None = Field(default=None, description="Chat template, such as qwen3.")
    settings: Path | None = Field(default=None, description="Tugline's configuration file.")
    listen: str | None = Field(default=None, description="Address that the gateway listens on.")
    port: int | None = Field(default=None, description="Port of the gateway. Default: a free one.")
    reach: str = Field(
        default="http://127.0.0.1:{port}",
        description="URL by which the environment reaches the gateway; {port} is its port.",
    )
    temperature: float = Field(default=1.0, description="Sampling temperature of every answer.")
    lean: bool = Field(
        default=True, description="Requests that only append to the previous one, see README.md."
    )
    tools: Annotated[str | None, Cli("--tools")] = Field(
        default="Bash,Edit,Read,Write", description="Claude Code's tools; null for all of them."
    )


class SharedGateway:
    """A gateway shared by the trials of a job: the first one opens it, the last one closes it."""

    def __init__(self) -> None:
        self._lock, self._users = asyncio.Lock(), 0
        self._stack = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def use(self, options: Options) -> AsyncIterator[Gateway]:
        """Yield the gateway, which stays open during the block."""
        async with self._lock:
            if not self._users:
                self.gateway = await self._open(options)
            self._users += 1
        try:
            yield self.gateway
        finally:
            await asyncio.shield(self._leave())

    async def _open(self, options: Options) -> Gateway:
        if not structlog.is_configured():
            log.configure()  # warnings to stderr
        engine = {
            "urls": options.engine and [options.engine],
            "tokenizer": options.tokenizer,
            "renderer": options.renderer,
        }
        settings = load_settings(options.settings, server={}, node={}, engine=engine)
        host, port = options.listen or settings.gateway.host, options.port or settings.gateway.port
        async with contextlib.AsyncExitStack() as stack:
            connection = await stack.enter_async_context(open_engine(settings.engine, slots=1))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tugline-")))
            gateway = Gateway(
                connection.upstream, connection.rendering, folder, host=host, port=port
            )
            await stack.enter_async_context(gateway)
            self._stack = stack.pop_all()
        return gateway

    async def _leave(self) -> None:
        async with self._lock:
            self._users -= 1
            if not self._users:
                await self._stack.aclose()


_GATEWAYS: dict[str, SharedGateway] = {}
"""Gateways by the options of agents: Harbor makes an agent per trial, with options of its own."""


class ClaudeCode(HarborClaudeCode):
    """Harbor's Claude Code, with a session at a Tugline gateway as its model."""

    options_model = Options
    options: Options
    details: list[dict[str, Any]] | None = None
    """A `RolloutDetail` for each trace of the last run, the main conversation first."""
    summary: dict[str, Any] | None = None

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Run Claude Code in a new session; keep its tokens also if it fails."""
        trial = self.logs_dir.parent.name  # multi-step trials have several runs
        task = Task(
            id=trial,
            instruction=instruction,
            harness=PluginSpec("claude_code"),
            evaluator=PluginSpec("session_completed"),
            sampling=Sampling(temperature=self.options.temperature, top_p=1.0, top_k=0),
        )
        session = Session(id=f"{trial}-{secrets.token_hex(4)}", task=trial, sample=0)
        shared = _GATEWAYS.setdefault(self.options.model_dump_json(), SharedGateway())
        async with shared.use(self.options) as gateway:
            preset = Preset(lean=self.options.lean, context_window=gateway.card.max_model_len)
            terms = SessionTerms(
                spent_status=preset.spent_status,
                offers_tools=preset.offers_tools,
                compaction_phrases=preset.compaction_phrases,
                side_phrases=preset.side_phrases,
            )
            opening = gateway.open(session, task, terms)
            try:
                async with opening as endpoint:
                    variables = self.make_variables(preset, endpoint, gateway.url)
                    with environment.scoped_exec_env(variables):
                        await super().run(instruction, environment, context)
            finally:
                await asyncio.to_thread(self.collect, gateway, session)

    def make_variables(self, preset: Preset, endpoint: Opened, gateway_url: str) -> dict[str, str]:
        """Make Claude Code's variables, without those that the job sets itself (``--ae``)."""
        port = gateway_url.rpartition(":")[2]
        reach = self.options.reach.format(port=port).rstrip("/")
        launch = preset.configure(
            LaunchContext(
                instruction="",
                workdir="",
                home="",
                base_url=endpoint.base_url.replace(gateway_url, reach, 1),
                key=endpoint.key,
                model=MODEL,
            )
        )
        variables = {**launch.env, **dict.fromkeys(OTHER_CREDENTIALS, "")}
        del variables["CLAUDE_CONFIG_DIR"]  # Harbor reads the logs from its own folder
        own = {name for name in self.extra_env if not name.startswith("ANTHROPIC_")}
        return {name: value for name, value in variables.items() if name not in own}

    def collect(self, gateway: Gateway, session: Session) -> None:
        """Move the recording into the agent's logs; compute the fields of the result."""
        built = make_builder(PluginSpec("prefix_merging")).build(gateway.read_calls(session.id))
        folder, recording = self.logs_dir / FOLDER, gateway.recording_path(session)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(recording, folder)
        for path in recording.parent.glob(tokenizer_name("*")):
            shutil.copy(path, folder)
        self.details = [
            make_detail(trace) for trace in built.traces if trace.kind is not TraceKind.SIDE
        ]
        self.summary = {
            "recording": f"{FOLDER}/{recording.name}",
            "sampled": built.ledger.sampled,
            "trained": built.ledger.trained,
            "masked": {str(reason): count for reason, count in built.ledger.masked.items()},
            "dropped": {str(reason): count for reason, count in built.ledger.dropped.items()},
        }

    def populate_context_post_run(self, context: Any) -> None:
        """Add the tokens to Harbor's figures, which come from Claude Code's log."""
        super().populate_context_post_run(context)
        context.cost_usd = None  # Claude Code's prices do not apply to this model
        context.rollout_details = self.details
        context.metadata = {**(context.metadata or {}), "tugline": self.summary}


def make_detail(trace: Trace) -> dict[str, Any]:
    """Convert a trace to Harbor's `RolloutDetail`, with a turn for each answer.

    ``extra`` has for each turn the loss mask, the version of the weights of each token, and the
    temperature at which a forward pass gives its logprobs (null if none does).
    """
    turns = [list(spans) for _, spans in groupby(trace.spans, key=lambda span: span.call)]
    ranges = [(spans[0].start, spans[-1].end) for spans in turns]
    return {
        "prompt_token_ids": [trace.ids[:start].tolist() for start, _ in ranges],
        "completion_token_ids": [trace.ids[start:end].tolist() for start, end in ranges],
        "logprobs": [trace.logprobs[start:end].tolist() for start, end in ranges],
        "extra": {
            "loss_mask": [trace.mask[start:end].astype(int).tolist() for start, end in ranges],
            "versions": [
                [span.version for span in spans for _ in range(span.start, span.end)]
                for spans in turns
            ],
            "temperature": [spans[0].distribution.forward_temperature for spans in turns],
            "kind": [str(trace.kind)] * len(turns),
        },
    }

"""Continue's CLI as a harness: a program of your own from npm."""

from dataclasses import dataclass

from tugline.harnesses.base import Launch, LaunchContext
from tugline.harnesses.preset import NODE_CRASHES, Preset, Window

_CONFIG = """\
name: tugline
version: 0.0.1
schema: v1
models:
  - name: {model}
    provider: openai
    model: {model}
    apiBase: {base_url}/v1
    apiKey: {key}
    capabilities: [tool_use]
    defaultCompletionOptions: {{contextLength: {window}, maxTokens: 8192}}
"""


@dataclass(kw_only=True, eq=False)
class ContinueCli(Preset):
    """Runs ``cn -p``. The fields are the options of tasks; `context_window` is the engine's."""

    name = "continue_cli"
    npm_package = "@continuedev/cli"
    offers_tools = True
    log_globs = (".continue/logs/*.log", ".continue/sessions/*.json")
    crash_patterns = NODE_CRASHES

    version: str = "1.5.47"
    context_window: Window = 131072

    def configure(self, context: LaunchContext) -> Launch:
        """Return the arguments after ``cn``, its variables, and the files in its home."""
        config = _CONFIG.format(
            model=context.model,
            base_url=context.base_url,
            key=context.key,
            window=self.context_window,
        )
        return Launch(
            argv=("--config", f"{context.home}/config.yaml", "--auto", *self.args, "-p"),
            env={"CONTINUE_TELEMETRY_ENABLED": "0", "CI": "1"},
            files={"config.yaml": config},
        )

    def pass_instruction(self, instruction: str) -> tuple[str, ...] | None:
        """Pass the instruction as the last argument."""
        return (instruction,)

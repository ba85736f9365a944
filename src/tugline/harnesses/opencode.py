"""opencode (npm ``opencode-ai``), which speaks four dialects through the providers it bundles.

It is a native program: only npm needs Node. An instruction passed as an argument reaches the model
in double quotes, so it is passed on stdin. With `title` it requests a title during the first turn.
At each start it installs a plug-in package into its settings folder unless it finds one there;
`_INSTALLED_PLUGINS` makes it find one.
"""

import json
from dataclasses import dataclass

from tugline.harnesses.base import Launch, LaunchContext
from tugline.harnesses.preset import BUN_CRASHES, Dialect, ExtensiblePreset, McpServer, Window

_PROVIDER = "tugline"
_PROVIDERS = {
    "openai_chat": ("@ai-sdk/openai-compatible", "/v1"),
    "openai_responses": ("@ai-sdk/openai", "/v1"),
    "anthropic": ("@ai-sdk/anthropic", "/v1"),
    "google": ("@ai-sdk/google", "/v1beta"),
}
"""Provider of each dialect, and the suffix of its base URL."""
_SETTINGS = ".config/opencode"
_INSTALLED_PLUGINS = {
    f"{_SETTINGS}/node_modules/.keep": "",
    f"{_SETTINGS}/package-lock.json": json.dumps(
        {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
    ),
}


@dataclass(kw_only=True, eq=False)
class Opencode(ExtensiblePreset):
    """Runs opencode. `title` enables its request for a session title; `args` are further options.

    `context_window` is the engine's, in tokens.
    """

    name = "opencode"
    npm_package = "opencode-ai"
    setup_script = "postinstall.mjs"
    offers_tools = True
    log_globs = (".data/opencode/log/*.log", ".data/opencode/*.db*")
    skills_folder = f"{_SETTINGS}/skills"
    crash_patterns = BUN_CRASHES

    version: str = "1.18.33"
    dialect: Dialect = "openai_chat"
    title: bool = False
    context_window: Window = 131072

    def configure(self, context: LaunchContext) -> Launch:
        """Return ``opencode run``, unattended, with JSON events and all folders in its home."""
        kinds = ("CONFIG", "DATA", "CACHE", "STATE")
        config = json.dumps(self._make_config(context), indent=1)
        return Launch(
            argv=("run", "--format", "json", "-m", f"{_PROVIDER}/{context.model}", *self.args),
            env={
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
                "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
                **{f"XDG_{kind}_HOME": f"{context.home}/.{kind.lower()}" for kind in kinds},
            },
            files={f"{_SETTINGS}/opencode.json": config, **_INSTALLED_PLUGINS, **self.skill_files},
        )

    def _make_config(self, context: LaunchContext) -> dict[str, object]:
        package, path = _PROVIDERS[self.dialect]
        model = {
            "name": context.model,
            "tool_call": True,
            "reasoning": True,
            "limit": {"context": self.context_window, "output": 16384},
        }
        provider = {
            "npm": package,
            "name": _PROVIDER,
            "options": {"baseURL": f"{context.base_url}{path}", "apiKey": context.key},
            "models": {context.model: model},
        }
        return {
            "autoupdate": False,
            "share": "disabled",
            "model": f"{_PROVIDER}/{context.model}",
            "small_model": f"{_PROVIDER}/{context.model}",
            "agent": {"title": {"disable": not self.title}},
            "permission": {"*": "allow"},
            "enabled_providers": [_PROVIDER],
            "provider": {_PROVIDER: provider},
            "mcp": {name: _format_server(server) for name, server in self.servers.items()},
        }


def _format_server(server: McpServer) -> dict[str, object]:
    if server.url is not None:
        return {"type": "remote", "url": server.url, "headers": server.headers}
    command = [server.command, *server.args]
    return {"type": "local", "command": command, "environment": server.env}

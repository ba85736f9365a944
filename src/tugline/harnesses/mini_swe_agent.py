"""mini-swe-agent (PyPI ``mini-swe-agent``), with one bash tool, through LiteLLM; it never streams.

LiteLLM needs ``mcp`` at run time without declaring it; if it is missing, every call fails before it
is sent. Unless limited, mini-swe-agent retries refusals other than 401, 403 and 404 ten times with
waits of up to a minute. It deletes turns without a tool call from its history.
"""

import asyncio
import hashlib
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from tugline import log
from tugline.errors import ConfigError
from tugline.harnesses import install
from tugline.harnesses.base import MAX_ARGUMENT, Launch, LaunchContext
from tugline.harnesses.preset import Preset, fits_argument

_log = log.get("harness")

_EXCLUDED = (
    "test", "site-packages", "dist-packages", "config-*", "idlelib", "tkinter", "_tkinter*",
)  # fmt: skip

_PINS = ("litellm==1.106.2", "mcp==2.3.0")
"""Dependencies in versions that are known to work."""


class PythonPackage(install.Package):
    """Pinned Python packages in a virtual environment with a copy of Python.

    The Python that runs Tugline is copied into the install directory with its standard library and
    its shared libraries, so that a sandbox or image needs no Python. A preset's default version is
    installed from its lock file, with a checksum for every package.
    """

    @property
    def _requirements(self) -> tuple[str, ...]:
        return (f"{self._package}=={self._version}", *_PINS)

    async def _install(self, trial: install.Step) -> tuple[Path, ...]:
        async def fill(fresh: Path) -> None:
            _log.info("installing", packages=self._requirements, folder=str(self.folder))
            purpose = f"cannot install {self._requirements[0]}"
            await install.run_installer(
                purpose, sys.executable, "-m", "venv", str(fresh), cwd=fresh
            )
            pip = (str(fresh / "bin" / "python"), "-m", "pip", "install", "--quiet")
            options = ("--disable-pip-version-check", "--no-input", *self._list_packages(fresh))
            await install.run_installer(purpose, *pip, *options, cwd=fresh)
            await asyncio.to_thread(_relink, fresh, await _copy_python())

        python = self.folder / "bin" / "python"
        self._command = (str(python), "-m", "minisweagent")
        await install.install_once(self.folder, fill, trial)
        # Another Python may have created the environment.
        interpreter = await asyncio.to_thread(python.resolve)
        return interpreter, interpreter.parent.parent

    async def find_newest(self) -> str:
        """Return the newest version in the registry. Raises `HarnessError`."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions")
        purpose = f"pip cannot find {self._package}"
        text = await install.run_installer(purpose, *pip, self._package, cwd=Path.cwd())
        return text.partition("(")[2].partition(")")[0]

    def _list_packages(self, fresh: Path) -> tuple[str, ...]:
        """Return arguments of ``pip install``: this version's lock file, or else the packages."""
        file = resources.files("tugline.harnesses") / "locks" / f"{self._harness}.txt"
        if file.is_file() and sys.platform == "linux":
            text = file.read_text(encoding="utf-8")
            if all(f"{requirement} " in text for requirement in self._requirements):
                lock = fresh / "lock.txt"
                lock.write_text(text, encoding="utf-8")
                return ("--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(lock))
        return self._requirements


async def _copy_python() -> Path:
    """Copy the running Python to the install directory; the copy needs only a C library."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    origin = await asyncio.to_thread(Path(sys.executable).resolve)
    digest = hashlib.sha256(f"{origin} {sys.version}".encode()).hexdigest()[:8]
    folder = install.install_dir() / f"python-{'.'.join(map(str, sys.version_info[:3]))}-{digest}"

    async def fill(fresh: Path) -> None:
        copy = fresh / "bin" / f"python{version}"
        library = fresh / "lib" / f"python{version}"
        copy.parent.mkdir()
        await asyncio.to_thread(shutil.copy2, origin, copy)
        stdlib = sysconfig.get_path("stdlib")
        ignore = shutil.ignore_patterns(*_EXCLUDED)
        await asyncio.to_thread(shutil.copytree, stdlib, library, ignore=ignore)
        await install.bundle_libraries(copy, fresh, list((library / "lib-dynload").glob("*.so")))

    await install.install_once(folder, fill)
    return folder / "bin" / f"python{version}"


def _relink(environment: Path, python: Path) -> None:
    """Change the Python of a virtual environment to another copy."""
    for name in ("python", "python3", python.name):
        link = environment / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(python)
    settings = environment / "pyvenv.cfg"
    lines = settings.read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if line.partition(" ")[0] not in {"home", "executable"}]
    settings.write_text("\n".join([f"home = {python.parent}", *others, ""]), encoding="utf-8")


# --------------------------------------------------------------------- the preset
_MODELS = {
    "openai_chat": ("openai/", ()),
    "openai_responses": ("openai/", ("--model-class", "litellm_response")),
    "anthropic": ("anthropic/", ()),
}
"""LiteLLM's provider and further options of each dialect."""


@dataclass(kw_only=True, eq=False)
class MiniSweAgent(Preset):
    """Runs mini-swe-agent. `args` are further options; ``-c`` selects its prompts and limits."""

    name = "mini_swe_agent"
    spent_status = 401
    """401, because the program retries ten times after 400."""
    log_globs = ("trajectory.json",)

    version: str = "2.4.6"
    dialect: Literal["openai_chat", "openai_responses", "anthropic"] = "openai_chat"
    args: Sequence[str] = ("-c", "mini.yaml")

    def make_package(self) -> PythonPackage:
        """Return the Python package."""
        return PythonPackage(self.name, "mini-swe-agent", self.version)

    def configure(self, context: LaunchContext) -> Launch:
        """Return ``mini -y``, unattended, with its trajectory in its home."""
        provider, options = _MODELS[self.dialect]
        return Launch(
            argv=(
                *("-y", "--exit-immediately", *options, *self.args),
                *("-m", f"{provider}{context.model}", "-o", f"{context.home}/trajectory.json"),
            ),
            env={
                "MSWEA_CONFIGURED": "true",
                "MSWEA_GLOBAL_CONFIG_DIR": f"{context.home}/.mini",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "OPENAI_API_BASE": f"{context.base_url}/v1",
                "OPENAI_API_KEY": context.key,
                "ANTHROPIC_BASE_URL": context.base_url,
                "ANTHROPIC_API_KEY": context.key,
            },
        )

    def pass_instruction(self, instruction: str) -> tuple[str, ...]:
        """Pass the instruction as an argument. Raises `ConfigError` if it is too long."""
        if not fits_argument(instruction):
            raise ConfigError(
                f"harness 'mini_swe_agent': instruction is {len(instruction.encode())} bytes "
                f"long, must be at most {MAX_ARGUMENT}, because it is passed as a command-line "
                "argument"
            )
        return ("-t", instruction)

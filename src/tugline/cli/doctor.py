"""``tugline doctor``: check this machine, an engine or a server.

``--engine`` reports the modes that the engine supports and the flags to change, ``--runtimes`` the
usable runtimes and their weaknesses. Without them the server, its nodes and engines are checked if
there is one, else this machine. The exit code is 0 if all checks pass (with ``--engine``: if the
requested mode is usable), else 1.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.text import Text

from tugline.chat.templates.rendering import find_template
from tugline.cli.machine import check_machine, suggest_next
from tugline.cli.options import DEFAULT_SERVER, LOOK_S, Json, Remote
from tugline.cli.output import COLOURS, make_table, print_report, print_text
from tugline.client.overview import HealthCheck, examine
from tugline.errors import UsageError
from tugline.gateway.probe import EngineReport, probe
from tugline.gateway.probe_reports import ModelFacts
from tugline.plugins import find, list_names
from tugline.sandbox.base import Runtime
from tugline.types import Mode
from tugline.web.serve import raise_file_limit

_FILES = 16
"""Open files of a node per agent: connections, a recording, pipes of the sandbox."""
_ENGINE_ENCODES = "the engine encodes contents, special tokens in them included"


async def doctor(
    *,
    engine: str | None = None,
    model: str | None = None,
    mode: Mode | None = None,
    tokenizer: Path | None = None,
    runtimes: bool = False,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Check this machine, an engine's modes and flags, or a server.

    Args:
        engine: Address, such as http://127.0.0.1:8000.
        model: Served name (default: the first).
        mode: Required mode (default: the best for training).
        tokenizer: Folder of the model's tokenizer; its config.json has the number of experts.
        runtimes: List the runtimes of this machine and their weaknesses.
    """
    if runtimes:
        _list_runtimes(as_json=as_json)
        return
    if engine is None:
        checks = await _examine(remote) if remote.is_known else []
        if checks and (remote.is_named or any(check.healthy for check in checks)):
            _print_checks(checks, as_json=as_json)
        else:
            _check_this_machine(checks, as_json=as_json)
        return
    facts = ModelFacts() if tokenizer is None else ModelFacts.read(tokenizer)
    report = await probe(_check_address(engine), model, facts=facts)
    refusal = None
    try:
        report.wire(mode)
    except UsageError as error:
        refusal = str(error)
    command = "" if refusal else suggest_up(report, mode, tokenizer)
    values = report.to_dict() | {"refused": refusal, "next": command}

    def show() -> None:
        _show(report, refusal)
        if command:
            print_text(f"next: {command}")

    print_report(values, show, as_json=as_json, failed=bool(refusal))


def suggest_up(report: EngineReport, mode: Mode | None, tokenizer: Path | None) -> str:
    """Return the command that serves the engine; words in capitals are not known here."""
    words = ["tugline", "up", "--engine", report.url]
    if mode is Mode.TEXT:
        words.append("--messages-only")
    elif mode is not Mode.OBSERVED and Mode.EXACT in report.routes.values():
        file = (tokenizer or Path("MODEL")) / "tokenizer.json"
        words += ["--tokenizer", str(file), "--renderer", find_template(report.model) or "TEMPLATE"]
    return shlex.join(words)


def _check_address(url: str) -> str:
    """Check that ``--engine`` is a URL. Raises `UsageError`."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        valid = False
    if not valid:
        raise UsageError(f"--engine is {url!r}, must be http://HOST:PORT")
    return url


def _list_runtimes(*, as_json: bool) -> None:
    states: dict[str, dict[str, object]] = {}
    rows = []
    for name in list_names("runtime"):
        runtime: Runtime = find("runtime", name)()
        reason = runtime.check_available()
        weaknesses = [] if reason else list(runtime.list_weaknesses())
        states[name] = {"unavailable": reason, "weaknesses": weaknesses}
        sign = Text("unavailable", "red") if reason else Text("usable", "green")
        rows.append((name, sign, reason or "\n".join(weaknesses)))
    files = raise_file_limit()
    if files < 1000 * _FILES:
        low = f"{files} are enough for about {files // _FILES} agents; raise `ulimit -Hn`"
        states["open files"] = {"unavailable": None, "weaknesses": [low]}
        rows.append(("open files", Text("usable", "green"), low))
    table = make_table(("runtime", "", "weaknesses"), rows)
    print_report(states, lambda: print_text(table), as_json=as_json)


def _check_this_machine(ended: Sequence[HealthCheck], *, as_json: bool) -> None:
    """Print the checks of this machine, after those of the folder's server that has ended."""
    own = check_machine(Path.cwd())
    command = suggest_next(own)
    checks = [*ended, *own]

    def show() -> None:
        _show_checks(checks)
        print_text(f"next: {command}")

    values = {"checks": [check._asdict() for check in checks], "next": command}
    print_report(values, show, as_json=as_json, failed=not all(each.healthy for each in checks))


def _show_checks(checks: Sequence[HealthCheck]) -> None:
    signs = {True: ("healthy", "green"), False: ("unhealthy", "red")}
    rows = ((check.component, Text(*signs[check.healthy]), check.detail) for check in checks)
    print_text(make_table(("component", "", "detail"), rows))


async def _examine(remote: Remote) -> list[HealthCheck]:
    async with remote.connect(LOOK_S) as client:
        return await examine(client)


def _print_checks(checks: Sequence[HealthCheck], *, as_json: bool) -> None:
    print_report(
        [check._asdict() for check in checks],
        lambda: _show_checks(checks),
        as_json=as_json,
        failed=not all(check.healthy for check in checks),
    )


def _show(report: EngineReport, refusal: str | None) -> None:
    print_text(f"{report.engine} {report.version} at {report.url}: {report.model}")
    rows = (
        (check.name, Text(check.outcome, COLOURS[check.outcome]), check.detail)
        for check in report.checks
    )
    print_text(make_table(("check", "", "detail"), rows))
    for advice in report.advice:
        print_text(f"change {advice}", style="yellow")
    for name, mode in report.routes.items():
        weakness = "" if mode is Mode.EXACT else f"; {_ENGINE_ENCODES}"
        print_text(f"usable {mode} mode, through route {name}{weakness}", style="green")
    if refusal:
        print_text(f"refused {refusal}", style="red")

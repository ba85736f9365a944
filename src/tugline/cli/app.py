"""``tugline``: the command line, and known errors as a line and an exit code.

For a file with several mistakes, one line is printed for each.

Exit codes are 0: success; 2: an error that the caller can correct (`UsageError`, a file, or a
request that the server rejects); 1: any other failure; 130: interrupted. The module of a command is
imported when the command is called, so that ``--help`` is fast and a killed server restarts fast.
"""

import difflib
import io
import os
import sys
import tomllib
from pathlib import Path
from typing import Literal

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.exceptions import MissingArgumentError, UnknownOptionError

from tugline.errors import ServerError, TuglineError, UsageError

_TABLE = Path(__file__).with_name("commands.toml").read_text(encoding="utf-8")
GROUPS: dict[str, dict[str, str]] = tomllib.loads(_TABLE)
"""Help of each command, by group."""
COMMANDS = [name for commands in GROUPS.values() for name in commands]
_CLOSE = 0.7
"""Least similarity of an option that is meant."""
DEVELOP = "Develop Tugline"
"""Group that ``--help`` leaves out."""


def make_app() -> App:
    """Create the command line."""
    app = App(
        name="tugline",
        help="Reinforcement learning on real agent harnesses, unmodified.",
        version=_format_version,
        default_parameter=Parameter(negative=()),
        help_format="plaintext",
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for title, commands in GROUPS.items():
        group = Group.create_ordered(title, show=title != DEVELOP)
        for position, (name, summary) in enumerate(commands.items()):
            path = f"tugline.cli.{name}:{name}"
            app.command(path, name=name, help=summary, group=group, sort_key=position)

    options = Group.create_ordered("Options")

    @app.command(name="--completion", group=options)
    def completion(shell: Literal["bash", "zsh", "fish", "powershell"], /) -> None:
        """Print the completion script of a shell."""
        print(app.generate_completion(shell=shell))

    app["--help"].group = app["--version"].group = options
    app["--help"].help = "Show the commands; after a command, its options."
    app["--version"].help = "Print the version."
    return app


def _format_version() -> str:
    from importlib.metadata import version  # noqa: PLC0415 - takes a tenth of the time of --help

    return f"tugline {version('tugline')}"


def main() -> None:
    """Run a command; the entry point of the ``tugline`` program."""
    called = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until exit
    elif isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run(called)
        sys.stdout.flush()
    except CycloptsError as error:
        _exit(f"{_describe(error)} See tugline {called} --help", code=2)
    except TuglineError as error:
        refused = isinstance(error, ServerError) and 400 <= (error.status or 0) < 500
        correctable = refused or isinstance(error, UsageError)
        _exit(*map(str, error.problems), code=2 if correctable else 1)
    except BrokenPipeError:  # the reader of stdout has exited, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _exit(f"{where}{error.strerror or error}", code=2 if where else 1)
    except KeyboardInterrupt:
        _exit("interrupted", code=130)


def _run(called: str) -> None:
    app = make_app()
    if called not in app:  # the error of cyclopts would import all commands
        close = difflib.get_close_matches(called, app, n=1)
        hint = f"did you mean {close[0]!r}? See" if close else "see"
        raise UsageError(f"unknown command {called!r}; {hint} tugline --help")
    if called in COMMANDS:
        from tugline import log  # noqa: PLC0415 - start-up: --help does not log

        log.configure()  # warnings to stderr: stdout has only the output of commands
    app(sys.argv[1:])


def _describe(error: CycloptsError) -> str:
    """Return what is wrong with the arguments, and what would be right."""
    if isinstance(error, MissingArgumentError):
        return f"{error}{_describe_missing(error)}"
    if not isinstance(error, UnknownOptionError):
        return str(error)
    given = (error.token.keyword or error.token.value).partition("=")[0]
    known = [name for each in error.argument_collection if each.parse for name in each.names]
    close = difflib.get_close_matches(given, known, n=1, cutoff=_CLOSE)
    close = close or [name for name in known if len(given) == 2 and name.startswith(f"-{given}")]
    text = f"Unknown option: {given}."
    if close:
        return f"{text} Did you mean {close[0]}?"
    if "--set" not in known:
        return text
    key = given.strip("-").replace("-", "_")
    return f"{text} Keys of the file are changed by --set, such as --set {key}=VALUE."


def _describe_missing(error: MissingArgumentError) -> str:
    """Return what a missing argument is, and the variable that may have it."""
    if error.argument is None or error.app is None:
        return ""
    name = error.argument.name
    arguments = error.app.assemble_argument_collection(parse_docstring=True)
    text = next((each.parameter.help or "" for each in arguments if each.name == name), "")
    what = f" {name}: {text.splitlines()[0].rstrip('.')}." if text else ""
    variables = error.argument.parameter.env_var or ()
    return what + "".join(f" It may be in the variable {variable}." for variable in variables)


def _exit(*messages: str, code: int) -> None:
    for message in messages:
        print(f"tugline: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

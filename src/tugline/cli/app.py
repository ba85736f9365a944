"""``tugline``: dispatch to the commands, and report known errors by a line and an exit code.

For a file with several mistakes, one line is printed for each.

Exit codes are 0: success; 2: an error that the caller can correct (`UsageError`, a file, or a
request that the server rejects); 1: any other failure; 130: interrupted. The module of a command is
imported when the command is called, so that ``--help`` is fast and a killed server restarts fast.
"""

import io
import os
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from cyclopts import App, CycloptsError, Parameter

from tugline.errors import ServerError, TuglineError, UsageError

_TABLE = Path(__file__).with_name("commands.toml").read_text(encoding="utf-8")
GROUPS: dict[str, dict[str, str]] = tomllib.loads(_TABLE)
"""Summary of each command, by group."""
COMMANDS = {name: text for commands in GROUPS.values() for name, text in commands.items()}
MODULES = {"cancel": "status", "logs": "status", "node": "up", "plan": "bench", "server": "up"}
MODULES |= {"demo": "train", "eval": "run", "generate": "run", "rebuild": "export", "sft": "train"}
MODULES |= {"results": "status", "view": "verify"}
"""Module of each command whose module has another name."""
SHELLS = ("bash", "zsh", "fish", "powershell")


def make_app(*called: str) -> App:
    """Create the command line with only the called commands."""
    app = App(
        name="tugline",
        default_parameter=Parameter(negative=()),
        help_format="plaintext",
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name in called:
        module = import_module(f"tugline.cli.{MODULES.get(name, name)}")
        app.command(getattr(module, name), name=name)
    return app


def main() -> None:
    """Run a command; the entry point of the ``tugline`` program."""
    called = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until exit
    elif isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if called in COMMANDS:
            from tugline import log  # noqa: PLC0415 - start-up: --help does not log

            log.configure()  # warnings to stderr: stdout has only the output of commands
            make_app(called)(sys.argv[1:])
        else:
            _answer(called, *sys.argv[2:])
        sys.stdout.flush()
    except CycloptsError as error:
        _exit(f"{error} See tugline {called} --help", code=2)
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


def _answer(option: str, shell: str = "", *_more: str) -> None:
    """Handle an option without importing a command, so that the help is fast."""
    if option == "--version":
        print(f"tugline {version('tugline')}")
    elif option == "--completion" and shell in SHELLS:
        print(make_app(*COMMANDS).generate_completion(shell=shell))  # type: ignore[arg-type]
    elif option == "--completion":
        _exit(f"--completion is {shell!r}, must be one of {', '.join(SHELLS)}", code=2)
    elif option in {"--help", "-h"}:
        print(
            "Usage: tugline COMMAND [ARGS]\n\nReinforcement learning on real agent harnesses,"
            " unmodified."
        )
        for group, commands in GROUPS.items():
            print(f"\n{group}:")
            for name, summary in commands.items():
                print(f"  {name:<10}{summary}")
        print(
            "\ntugline COMMAND --help shows the options of a command, tugline --completion SHELL"
            f"\nprints the completion script of a shell: {', '.join(SHELLS)}."
        )
    else:
        _exit(f"unknown command {option!r}; see tugline --help", code=2)


def _exit(*messages: str, code: int) -> None:
    for message in messages:
        print(f"tugline: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""``tugline launch slurm``: run as a SLURM job, with the script of this package.

The script controls the job (docs/deploy.md). This command checks the settings before the job waits
in a queue, and allows one job of a run at a time.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tugline.cli.options import LOOK_S, Count, Json, Remote
from tugline.cli.output import print_report, print_text
from tugline.cli.tables import make_overview
from tugline.cli.task import read_checked
from tugline.cli.train import train
from tugline.client.overview import Monitor
from tugline.errors import ServerError, TuglineError, UsageError
from tugline.launch.folder_lock import folder_lock
from tugline.launch.settings import load_settings

SCRIPT = Path(__file__).parents[1] / "launch" / "tugline.sbatch"
JOB = "slurm-job"
"""File with the id of the last job, in the folder of a run."""
VARIABLES = re.findall(r'^: "\$\{(\w+):=', SCRIPT.read_text(), re.MULTILINE)
"""Environment variables of the script; an empty variable has its default."""

launch = App(name="launch")


@launch.command
async def slurm(
    config: Path | None = None,
    /,
    *,
    dry_run: bool = False,
    submit: bool = False,
    status: bool = False,
    run: Path | None = None,
    tasks: list[str] | None = None,
    settings: Path | None = None,
    nodes: Count = 1,
    engines: int = 0,
    engine_command: str = "",
    time: str = "24:00:00",
    sbatch: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    variables: Annotated[list[str] | None, Parameter("--set")] = None,
    as_json: Json = False,
) -> None:
    """Run `tugline train`, or tasks, as a job of SLURM: server, engines, nodes and trainer.

    Args:
        config: YAML or TOML file of `tugline train`.
        dry_run: Check the files, and print the command of --submit.
        submit: Submit the job, unless a job of this run is queued or running.
        status: Show the last job of the run, and the state of its server.
        run: Folder of the run, on a shared disk (default: runs/ and the name of CONFIG).
        tasks: Instead of CONFIG: tasks to run, as for `tugline submit`; repeatable.
        settings: File for server, nodes and gateways, as for `tugline up --config`.
        nodes: Number of machines.
        engines: Number of machines that run an engine, from the first one.
        engine_command: Command of an engine that listens on $HOST:$PORT.
        time: Walltime, in the format of sbatch.
        sbatch: Further options of sbatch, such as "--partition=main --gpus-per-node=8".
        variables: Set a variable of the script (docs/deploy.md), such as SLOTS=32; repeatable.
    """
    if dry_run + submit + status != 1:
        raise UsageError("give exactly one of --dry-run, --submit and --status")
    if (run or config) is None:
        raise UsageError("give CONFIG or --run, which name the run")
    run = (run or Path("runs", config.stem if config else "")).absolute()
    if status:
        return await _show_status(run, as_json=as_json)
    env = dict.fromkeys(VARIABLES, "")
    env |= {"CONFIG": str(config or ""), "TASKS": " ".join(tasks or ()), "RUN": str(run)}
    env |= {"SETTINGS": str(settings or ""), "ENGINES": str(engines), "ENGINE": engine_command}
    env |= {
        "TUGLINE": _find_program(),
        **dict(pair.partition("=")[::2] for pair in variables or ()),
    }
    _check(env, nodes, engines)
    argv = ["sbatch", "--parsable", f"--nodes={nodes}", f"--time={time}"]
    argv += [f"--output={run}/slurm-%j.log", *shlex.split(sbatch), str(SCRIPT)]
    text = " \\\n".join([*(f"{k}={shlex.quote(v)}" for k, v in env.items() if v), shlex.join(argv)])
    job = _submit(argv, env, run) if submit else None
    if submit:
        text = f"job {job}\ntugline launch slurm --run {run} --status\ntail {run}/slurm-{job}.log"
    print_report({"env": env, "argv": argv, "job": job}, lambda: print(text), as_json=as_json)
    return None


def _find_program() -> str:
    """Return the program of this command; with ``python -m`` the one on the PATH."""
    return sys.argv[0] if os.access(sys.argv[0], os.X_OK) else "tugline"


def _check(env: dict[str, str], nodes: int, engines: int) -> None:
    """Check everything that needs no engine. Raises `UsageError`, `Invalid`."""
    if unknown := env.keys() - VARIABLES:
        raise UsageError(f"--set has {min(unknown)}, must be one of {', '.join(VARIABLES)}")
    if not 0 <= engines <= nodes or bool(engines) != bool(env["ENGINE"]):
        raise UsageError(f"--engines is {engines}, must be 0 to --nodes; it needs --engine-command")
    load_settings(Path(env["SETTINGS"]) if env["SETTINGS"] else None, server={}, node={}, engine={})
    if bool(env["CONFIG"]) == bool(env["TASKS"]):
        raise UsageError("give either CONFIG to train or --tasks to run tasks")
    if env["TASKS"]:
        read_checked(env["TASKS"].split())
        return
    urls = [f"http://MACHINE-{n + 1}" for n in range(engines)] + env["ENGINE_URLS"].split()
    out = Path(env["RUN"], "train")
    host = "http://MACHINE-1"
    resume = (out / "config.json").exists()
    with contextlib.redirect_stdout(sys.stderr):
        train(Path(env["CONFIG"]), out=out, resume=resume, server=host, engine=urls, dry_run=True)


def _submit(argv: list[str], env: dict[str, str], run: Path) -> str:
    """Submit a job for a run without another job; return its id."""
    with folder_lock(run, instead="choose another --run"):
        if (run / JOB).exists() and "left" in (last := _read_job(run)):
            raise UsageError(f"job {last['job']} of {run} is {last['state']}; end it with scancel")
        job = _call(*argv, env=os.environ | env).partition(";")[0]
        (run / JOB).write_text(f"{job}\n")
    return job


def _read_job(run: Path) -> dict[str, str]:
    """Return the last job of a run; only a queued or running job has ``left``, its time."""
    if not (run / JOB).exists():
        raise UsageError(f"{run} has no job that was submitted with --submit")
    names = ("job", "state", "reason", "machines", "left")
    job = (run / JOB).read_text().strip()
    line = _call("squeue", "-h", "-j", job, "-o%T|%r|%N|%L", known="Invalid job id")
    line = line or _call("sacct", "-XnP", "-j", job, "-oState,Reason,NodeList", known="") or "ENDED"
    return dict(zip(names, (job, *line.split("|")), strict=False))


async def _show_status(run: Path, *, as_json: bool) -> None:
    report = _read_job(run)
    address = run / "up" / "address"
    overview = None
    if report["state"] == "RUNNING" and address.exists():
        report["server"] = address.read_text().strip()
        with contextlib.suppress(ServerError, UsageError):  # the server has ended, or hangs
            async with Remote(folder=run / "server").connect(LOOK_S) as client:
                overview = await Monitor(client).read()
    line = ", ".join(f"{name} {value}" for name, value in report.items() if value)
    parts = (line, make_overview(overview)) if overview else (line,)
    print_report({**report, "overview": overview}, lambda: print_text(*parts), as_json=as_json)


def _call(*argv: str, env: dict[str, str] | None = None, known: str | None = None) -> str:
    """Run a SLURM program; return no output for a failure whose message contains `known`."""
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UsageError(f"{argv[0]} is not on the PATH: SLURM is missing") from error
    if done.returncode and (known is None or known not in done.stderr):
        raise TuglineError(f"{argv[0]}: {done.stderr.strip()}")
    return done.stdout.strip()

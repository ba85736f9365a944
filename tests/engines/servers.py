"""Real inference servers as child processes: started with a deadline, ended by their own id."""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from chaos.fleet import free_ports
from engines.tool_model import WINDOW

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
START_S = 300.0
STOP_S = 30.0


def _vllm(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Scheduler and model in one process.

    In two they spin on `sched_yield` while they wait for each other; on two cores that kept
    everything else from running for seconds at a time.
    """
    home = installed("vllm")
    command = [
        str(home / "bin" / "vllm"), "serve", str(folder),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny",
        "--dtype", "float32", "--max-model-len", str(WINDOW), "--max-num-seqs", "32",
        "--enforce-eager", "--enable-scale-out", "--enable-auto-tool-choice",
        "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
        "--distributed-executor-backend", "uni",
    ]  # fmt: skip
    return command, {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PATH": f"{home / 'bin'}:{os.environ.get('PATH', '')}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }


def _sglang(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    command = [
        str(installed("sglang") / "bin" / "python"), "-m", "sglang.launch_server",
        "--model-path", str(folder), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--max-total-tokens", "16384", "--context-length", str(WINDOW),
        "--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3", "--skip-server-warmup",
        "--sleep-on-idle", "--enable-metrics",
    ]  # fmt: skip
    return command, {}


def _embedded(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    script = HERE / "embedded_server.py"
    return [sys.executable, str(script), str(folder), str(port)], {}


def _report_in_vllm(command: list[str], env: dict[str, str]) -> None:
    """Only model runner V2 reports routes and kept sets; on a CPU it needs Triton's interpreter."""
    command += ["--enable-return-routed-experts", "--return-sampling-mask"]
    command += ["--logprobs-mode", "processed_logprobs"]
    env |= {
        "PYTHONPATH": str(HERE / "interpreter"),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def _report_in_sglang(command: list[str], _env: dict[str, str]) -> None:
    """Kept sets need no flag."""
    command[1:3] = [str(HERE / "sglang_server.py")]
    command += ["--enable-return-routed-experts"]


REPORT = {"vllm": _report_in_vllm, "sglang": _report_in_sglang}
"""What makes an engine report routes and kept sets, where it does not do so anyway."""
COMMANDS: dict[str, Callable[[Path, int], tuple[list[str], dict[str, str]]]] = {
    "embedded": _embedded,
    "vllm": _vllm,
    "sglang": _sglang,
}


def installed(name: str) -> Path:
    """The folder into which `make test-engines` has installed it."""
    tool = runpy.run_path(str(ROOT / "tools" / "engines.py"))
    home: Path = tool["HOMES"][name]
    if not (home / tool["STAMP"]).exists():
        pytest.fail(f"{home} is not installed; run `make test-engines`, which does that")
    return home


class Server(NamedTuple):
    """Its URL and its process, which leads a session of its own."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill it as a power failure would: no connection is closed properly."""
        os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def running(
    name: str, folder: Path, logs: Path, *flags: str, reports: bool = False
) -> Iterator[Server]:
    """The engine, while it serves the model in `folder`; its log stays in `logs`.

    With `reports` it can report routes and kept sets.
    """
    (port,) = free_ports(1)
    command, more = COMMANDS[name](folder, port)
    if reports and name in REPORT:
        REPORT[name](command, more)
    command += flags
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}
    log = logs / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield Server(url, process)
    finally:
        _stop(process)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until it answers, and for the first small answer, which is slow in vLLM and SGLang."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            models = httpx.get(f"{url}/v1/models", timeout=10)
            if models.status_code == 200:
                if models.json()["data"][0]["owned_by"] == "tugline":
                    return  # the embedded engine serves token ids only, and starts at once
                body = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": "Hi."}],
                    "max_tokens": 2,
                    "top_k": 20,  # vLLM answers nothing without, if it reports kept sets
                }
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
                return
        time.sleep(0.5)
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
    state = f"ended with {process.returncode}" if process.poll() is not None else "did not answer"
    pytest.fail("\n".join([f"{process.args} {state}; {log} ends with:", *tail]))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate it, then kill its session, which has only the processes of the server."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)

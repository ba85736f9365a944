"""``tugline plan``: what a run needs, by what parts were measured to cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tugline.cli.app import main

RUN = {
    "--gpus": "4", "--model-tps": "1000", "--harness": "pi", "--turns": "10",
    "--turn-tokens": "100", "--result-tokens": "200", "--prompt": "1000", "--token-ms": "10",
    "--tool-s": "1", "--tool-cpu-s": "0", "--eval-s": "10",
}  # fmt: skip


def command(*words: str) -> list[str]:
    """The command line, with some options in place of others."""
    options = RUN | dict(zip(words[::2], words[1::2], strict=True))
    return ["tugline", "plan", *(word for pair in options.items() for word in pair)]


def planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> Any:
    """The plan as JSON."""
    monkeypatch.setattr("sys.argv", [*command(*words), "--json"])
    main()
    return json.loads(capsys.readouterr().out)


def test_a_plan_is_what_the_constants_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four sessions of 1,000 tokens a second, each of 31.14 s: computed by hand."""
    plan = planned(monkeypatch, capsys)
    assert plan["sessions_per_hour"] == pytest.approx(4 * 3600)
    assert plan["session_s"] == pytest.approx(0.8 + 10 * 0.034 + 10 * 1.0 + 10 * 1 + 10)
    assert plan["open_sessions"] == 125
    assert plan["busy"] == 1.0
    assert plan["kv_tokens"] == 125 * (1000 + 4000) // 2
    gateway_s = 10 * (0.0016 + 0.0000068 * 5) + 1000 * 0.000043 + 0.05
    assert plan["gateway_cores"] == pytest.approx(4 * gateway_s)
    assert plan["agent_cores"] == pytest.approx(4 * 11.14)
    assert plan["nodes_for"] == {"processors": 2, "memory": 1}
    assert plan["disk_gb_per_day"] == pytest.approx(4 * 86400 * (4000 * 1.5 + 7000) / 1e9)
    assert (plan["nodes"], plan["slots"], plan["servers"]) == (2, 63, 1)


@pytest.mark.parametrize(
    ("words", "narrowest"),
    [(("--cores", "8"), "processors"), (("--harness", "qwen_code", "--memory-gb", "16"), "memory")],
)
def test_the_narrowest_part_decides(
    words: tuple[str, ...],
    narrowest: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nodes are as many as the limit asks for that is met first; slots follow."""
    plan = planned(monkeypatch, capsys, *words)
    most = max(plan["nodes_for"], key=plan["nodes_for"].get)
    assert (most, plan["nodes"]) == (narrowest, plan["nodes_for"][narrowest])
    assert plan["slots"] * plan["nodes"] >= plan["open_sessions"]
    monkeypatch.setattr("sys.argv", command(*words))
    main()
    assert f"{narrowest} decide" in capsys.readouterr().out


def test_a_step_with_too_few_sessions_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """25 of 125 sessions keep a fifth of the engines busy."""
    assert planned(monkeypatch, capsys, "--sessions", "25")["busy"] == pytest.approx(0.2)
    monkeypatch.setattr("sys.argv", command("--sessions", "25"))
    main()
    assert "25 sessions a step keep 20% of the engines busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("--model-tps", "0"), "model-tps"),
        (("--tool-s", "-1"), "tool-s"),
        (("--harness", "vi"), "--harness is 'vi', must be one of claude_code, codex"),
    ],
)
def test_what_cannot_be_is_refused(
    words: tuple[str, ...],
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 2 and the name of the option."""
    with pytest.raises(SystemExit) as ended:
        planned(monkeypatch, capsys, *words)
    assert ended.value.code == 2
    assert wrong in capsys.readouterr().err

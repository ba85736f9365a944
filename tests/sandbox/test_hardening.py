"""The narrowed seccomp profile, in the form of each container engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tugline.sandbox import hardening

ALLOW, ERRNO = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"
PROFILE = {
    "defaultAction": ERRNO,
    "syscalls": [
        {"names": ["read", "ptrace", "keyctl", "clone", "clone3", "unshare"], "action": ALLOW},
        {"names": ["prlimit64"], "action": ALLOW, "includes": {"caps": ["CAP_KILL"]}},
        {"names": ["clone3", "io_setup"], "action": ERRNO, "errnoRet": 38},
        {"names": ["clone"], "action": ALLOW, "args": [{"index": 1}]},
    ],
}


def matches(rule: dict[str, Any], value: int) -> bool:
    """Whether the only condition of a rule matches."""
    (only,) = rule["args"]
    return bool(value & only["value"] == only["valueTwo"])


def test_calls_on_process_1_are_refused() -> None:
    """The 32 bits that the kernel reads decide; other processes and 0, the caller, are allowed."""
    rules = hardening.narrow_profile(PROFILE)["syscalls"]
    for name, argument in (("ptrace", 1), ("prlimit64", 0)):
        mine = [rule for rule in rules if name in rule["names"]]
        assert {rule["args"][0]["index"] for rule in mine} == {argument}
        refused = [n for n in range(70000) if not any(matches(rule, n) for rule in mine)]
        assert refused == [1]
        assert not any(matches(rule, 1 << 32 | 1) for rule in mine)
        assert any(matches(rule, (1 << 22) - 1) for rule in mine)
    assert all(rule.get("includes") for rule in rules if "prlimit64" in rule["names"])


def test_namespaces_and_keyrings_are_refused() -> None:
    """The profile loses calls for namespaces and keyrings, and keeps its conditional rules."""
    rules = hardening.narrow_profile(PROFILE)["syscalls"]
    allowed = {name for rule in rules if rule["action"] == ALLOW for name in rule["names"]}
    assert allowed == {"read", "ptrace", "prlimit64", "clone", "unshare", "socket"}
    sockets = [rule["args"] for rule in rules if "socket" in rule["names"]]
    assert sorted(only["value"] for (only,) in sockets) == [1, 2, 10, 16]
    assert [rule for rule in rules if "clone3" in rule["names"]] == [
        {"names": ["clone3", "io_setup"], "action": ERRNO, "errnoRet": 38}
    ]
    (unshare,) = [rule for rule in rules if "unshare" in rule["names"]]
    assert [matches(unshare, flags) for flags in (0, 0x10000000, 0x20000)] == [True, False, True]
    assert {"names": ["clone"], "action": ALLOW, "args": [{"index": 1}]} in rules


def test_the_profile_is_text_for_docker_and_a_file_for_podman(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker's own masked paths are listed, too, since a list replaces them."""
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "profile").write_text(json.dumps(PROFILE))
    security = [f"name=seccomp,profile={tmp_path / 'profile'}", "name=rootless"]
    docker, podman = (hardening.find_hardening(kind, security) for kind in ("docker", "podman"))
    (text,) = docker.host_config()["SecurityOpt"]
    assert json.loads(text.removeprefix("seccomp=")) == hardening.narrow_profile(PROFILE)
    knobs = ["/proc/1/autogroup", "/proc/1/oom_adj", "/proc/1/oom_score_adj"]
    paths = docker.host_config()["MaskedPaths"]
    assert {*hardening.MASKED, *knobs, "/proc/kcore"} < {*paths}
    mask, file = podman.host_config()["SecurityOpt"]
    assert mask == ":".join(["mask=/proc/1/mem:/proc/1/task", *knobs])
    assert json.loads(Path(file.removeprefix("seccomp=")).read_text()) == hardening.narrow_profile(
        PROFILE
    )


def test_no_hardening_without_a_strict_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile that is missing, or allows unlisted calls, is not used."""
    (tmp_path / "open").write_text(json.dumps({**PROFILE, "defaultAction": ALLOW}))
    monkeypatch.setattr(hardening, "_PROFILES", (str(tmp_path / "open"), str(tmp_path / "none")))
    assert hardening.find_hardening("docker", ["name=seccomp,profile=builtin"]) is None

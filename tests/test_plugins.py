from __future__ import annotations

from importlib import metadata

import pytest

from tugline.errors import UnknownPlugin
from tugline.plugins import BUILT_IN, find, list_names


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, table in BUILT_IN.items() for name in table]
)
def test_built_in_names_are_classes(kind: str, name: str) -> None:
    """Each entry of the table can be imported."""
    assert isinstance(find(kind, name), type)
    assert name in list_names(kind)


def test_any_class_can_be_named_by_its_module() -> None:
    """The name ``module:Class`` needs no registration."""
    assert find("harness", "collections:OrderedDict").__name__ == "OrderedDict"


def test_entry_points_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package adds a name by an entry point of the group ``tugline.<kind>``."""
    point = metadata.EntryPoint("mine", "collections:Counter", "tugline.harness")

    def entry_points(group: str, name: str = "mine") -> list[metadata.EntryPoint]:
        return [point] if (group, name) == (point.group, point.name) else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    assert "mine" in list_names("harness")
    assert find("harness", "mine").__name__ == "Counter"
    assert "mine" not in list_names("runtime")


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The message suggests the nearest name."""
    with pytest.raises(UnknownPlugin) as caught:
        find("harness", "shel")
    assert "unknown harness 'shel'; did you mean 'shell'?" in str(caught.value)
    assert f"(known: {', '.join(list_names('harness'))}, or module:Class)" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module:X", "No module named 'no_such_module'"),
        ("collections:Nothing", "no attribute 'Nothing'"),
        ("collections:", "no attribute ''"),
        (":X", "mpty module name"),
    ],
)
def test_import_errors_are_reported(target: str, reason: str) -> None:
    """The error has Python's own reason."""
    with pytest.raises(UnknownPlugin) as caught:
        find("harness", target)
    assert target in str(caught.value)
    assert reason in str(caught.value)

"""Named parts: our own, and those that another package brings by entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.config import UserError
from treadle.config.plugins import Parts


def test_unknown_name_suggests_the_nearest() -> None:
    parts: Parts = Parts("optimizer")
    parts.add("adamw")(object())
    with pytest.raises(UserError, match="unknown optimizer 'adamv', did you mean 'adamw'"):
        parts.get("adamv")


def test_a_part_of_another_package_is_imported_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lion_pkg.py").write_text("imported = True\ndef lion(): return 'lion'\n")
    info = tmp_path / "lion_pkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lion-pkg\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[treadle.animals]\nlion = lion_pkg:lion\nbroken = lion_pkg:absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    parts: Parts = Parts("animal")
    assert parts.names() == ["broken", "lion"]
    assert parts.get("lion")() == "lion"
    with pytest.raises(UserError, match="'broken' of package 'lion-pkg' does not import"):
        parts.get("broken")

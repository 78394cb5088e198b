"""What of `treadle quickstart` can be tested in no time: its run file, for folders of any name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.cli.quickstart import run_file_of, usable
from treadle.config import UserError, load_settings
from treadle.train.settings import RunSettings, batching

names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=30)


@given(names.filter(lambda name: name.strip(".")))
def test_the_run_file_names_its_folder_whatever_that_is_called(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    folder = Path(name)
    file = tmp_path_factory.getbasetemp() / "run.yaml"
    file.write_text(run_file_of(folder), "utf-8", newline="")
    settings = load_settings(RunSettings, file)
    assert settings.run == folder / "run"
    assert settings.data.train[0].path == folder / "corpus"
    assert batching(settings, settings.nproc).microbatches == 1


def test_folders_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert usable(Path('it\'s "my" größter #1: {x}')).is_dir()
    assert str(usable(Path("-x"))) == f"{tmp_path}/-x"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is no place to write to"):
        usable(Path("file"))
    with pytest.raises(UserError, match=r"the folder's name a\\xff is not valid UTF-8"):
        usable(Path(os.fsdecode(b"a\xff")))
    assert not os.path.exists(b"a\xff")

"""Parts of another package, found by name once it is installed: a source, a family, an operator, an optimizer, ..."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.train.runs import TINY, run_settings
from treadle.config import UserError, parse_settings
from treadle.train.build import check_run
from treadle.train.checkpoints import latest_good
from treadle.train.feed import open_feed
from treadle.train.settings import RunSettings

EXAMPLE = Path(__file__).parent.parent / "example_plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example package is installed as pip would: its module, its metadata, its entry points."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    shutil.copy(EXAMPLE / "example_plugin.py", folder)
    info = folder / f"example_plugin-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    text = "".join(f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in parts.items()) for group, parts in groups)
    (info / "entry_points.txt").write_text(text)
    return folder


def treadle(site: Path, *words: object, good: bool = True) -> subprocess.CompletedProcess[str]:
    path = f"{site}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "treadle", *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert (done.returncode == 0) == good, done.stderr
    return done


def test_a_run_made_of_another_packages_parts(site: Path, tmp_path: Path) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    treadle(site, "data", "prepare", "primes://700", "--out", corpus, "--train-tokenizer", 300, "--validation", 0.1)
    tree = run_settings(
        run,
        corpus,
        model={"config": {**TINY, "model_type": "twin"}},
        optimizer={"name": "sign", "lr": 0.01},
        schedule={"name": "steps", "warmup_steps": 0, "options": {"halvings": 3}},
        log={"sinks": ["csv"]},
        train={"steps": 12},
        nproc=2,
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    treadle(site, "train", tmp_path / "run.yaml")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    # The parts do what they say: the rate is halved three times, and the optimizer learns.
    rates = [record["learning_rate"] for record in records if "loss" in record]
    assert rates == [0.01] * 4 + [0.005] * 4 + [0.0025] * 4
    assert losses[-1] < losses[0] - 0.5
    assert len((run / "loss.csv").read_text().splitlines()) == 12
    checkpoint = latest_good(run)
    assert checkpoint is not None
    assert json.loads((checkpoint.path / "config.json").read_text())["model_type"] == "twin"
    # The optimizer's state is saved by name, and read back.
    assert any(name.endswith("/average") for name in checkpoint.tensors("optimizer"))
    resumed = treadle(site, "train", tmp_path / "run.yaml", "train.steps=14")
    assert "resumed  at step 12" in resumed.stderr
    assert "example_halve" in treadle(site, "ops").stdout


def test_without_the_package_its_names_are_unknown(tmp_path: Path, run_corpus: Path) -> None:
    for section, says in (
        ({"optimizer": {"name": "sign"}}, "unknown optimizer 'sign'"),
        ({"schedule": {"name": "steps"}}, "unknown schedule 'steps'"),
        ({"log": {"sinks": ["csv"]}}, "unknown sink 'csv'"),
        ({"model": {"config": {**TINY, "model_type": "twin"}}}, "unknown family 'twin'"),
    ):
        tree = run_settings(tmp_path / "run", run_corpus, **section)
        settings = parse_settings(RunSettings, tree)
        with pytest.raises(UserError, match=says):
            check_run(settings, open_feed(settings.data), 1)


def test_a_package_that_does_not_import_is_named(site: Path, tmp_path: Path, run_corpus: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "example_plugin.py").write_text("import a_module_that_is_not_there\n")
    tree = run_settings(tmp_path / "run", run_corpus, optimizer={"name": "sign"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    done = treadle(broken, "train", tmp_path / "run.yaml", good=False)
    assert done.returncode == 2
    assert "the optimizer 'sign' of package 'example-plugin' does not import" in done.stderr

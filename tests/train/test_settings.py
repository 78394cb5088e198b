"""A run's settings: what they must agree on, what one number decides, what a mistake is answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.train.runs import run_settings
from treadle.config import UserError, load_settings, parse_settings
from treadle.config.settings import save_settings
from treadle.model.families import read_spec
from treadle.train.build import config_of_depth
from treadle.train.settings import RunSettings, batching, total_steps


def parsed(**changes: Any) -> RunSettings:
    return parse_settings(RunSettings, run_settings(Path("run"), Path("corpus"), **changes))


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 64), st.integers(1, 64))
def test_a_cut_batch_is_the_whole_batch_or_a_sentence_says_which_would_be(
    samples: int, ranks: int, microbatch: int, length: int
) -> None:
    assume(length >= 2)
    settings = parsed(
        data={"sequence_length": length},
        train={"batch_tokens": samples * length, "microbatch_tokens": microbatch * length},
    )
    try:
        cut = batching(settings, ranks)
    except UserError as error:
        words = str(error).replace(";", " ").split()
        near = [int(word) for word in words if word.isdigit()][-1]
        key = "batch_tokens" if "batch_tokens" in words[0] and "micro" not in words[0] else "microbatch_tokens"
        train = {"batch_tokens": samples * length, "microbatch_tokens": microbatch * length, key: near}
        if key == "batch_tokens":
            train["microbatch_tokens"] = None
        # What the sentence proposes works.
        batching(parsed(data={"sequence_length": length}, train=train), ranks)
        return
    assert cut.microbatch_samples * cut.microbatches * ranks == cut.global_samples == samples
    assert cut.microbatch_samples <= microbatch


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 6, 8, 12, 20, 24])
def test_one_number_decides_a_model_and_its_training(depth: int) -> None:
    tree = run_settings(Path("run"), Path("corpus"), train={"steps": None})
    tree["model"], tree["optimizer"] = {"depth": depth}, {"name": "adamw"}
    settings = parse_settings(RunSettings, tree)
    spec = read_spec(config_of_depth(depth, 4096, 512))
    attention = spec.layers[0].attention
    assert (len(spec.layers), spec.width, attention.heads * attention.head_size) == (depth, 64 * depth, 64 * depth)
    assert attention.heads % attention.kv_heads == 0
    count = spec.parameters_count()
    assert total_steps(settings, count) * 384 == pytest.approx(20 * count, rel=0.01)
    deeper = parse_settings(RunSettings, {**tree, "model": {"depth": 4 * depth}})
    assert deeper.optimizer.lr == pytest.approx(settings.optimizer.lr / 2, rel=1e-2)
    given_rate = parse_settings(RunSettings, {**tree, "optimizer": {"lr": 0.5}})
    assert given_rate.optimizer.lr == 0.5


def test_steps_are_required_where_nothing_else_says_how_long(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.steps is required"):
        total_steps(parsed(train={"steps": None}), 1000)


def test_resolved_settings_read_back_as_themselves(tmp_path: Path) -> None:
    for model in ({"depth": 3}, {"from": "somewhere", "lora": {"rank": 4}}):
        tree = run_settings(Path("run"), Path("corpus"))
        settings = parse_settings(RunSettings, {**tree, "model": model})
        save_settings(settings, tmp_path / "settings.yaml")
        assert load_settings(RunSettings, tmp_path / "settings.yaml") == settings


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {}}, "'model': needs exactly one of config, depth and from, it has none"),
        ({"model": {"depth": 3, "from": "x"}}, "it has depth and from"),
        ({"model": {"form": "x"}}, "unknown key 'model.form', did you mean 'from'?"),
        ({"train": {"precision": "bf61"}}, "'train.precision' is 'bf61'"),
        ({"train": {"clip": -1}}, "'train.clip' is -1"),
        ({"data": {"train": []}}, "data.train"),
        ({"stop": {"patiense": 3}}, "did you mean 'patience'"),
        ({"spikes": {"policy": "ignore"}}, "'skip', 'rewind', 'stop' or 'off'"),
        ({"nproc": 0}, "'nproc' is 0"),
        ({"plan": {"cp": 2}}, "unknown key 'plan.cp'"),
    ],
)
def test_a_mistake_names_the_key_and_what_is_allowed(changes: dict[str, Any], says: str) -> None:
    tree = {**run_settings(Path("run"), Path("corpus")), **changes}
    with pytest.raises(UserError) as error:
        parse_settings(RunSettings, tree)
    assert says in str(error.value)

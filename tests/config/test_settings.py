"""Settings: what is wrong is named, with the way out; what is right is read back as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from treadle.config import Settings, UserError, load_settings, parse_settings
from treadle.config.settings import read_yaml, save_settings, set_dotted


class Inner(Settings):
    steps: int = Field(10, ge=1)
    learning_rate: float = Field(3e-4, gt=0)
    precision: Literal["fp32", "bf16"] = "fp32"


class Source(Settings):
    path: str
    weight: float = 1.0


class Outer(Settings):
    train: Inner = Inner()
    sources: list[Source] = []
    name: str = "x"


def write(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text)
    return file


def test_file_and_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, "train: {steps: 5}\nsources: [{path: a}]\n")
    settings = load_settings(Outer, file, ["train.learning_rate=1e-3", "sources.0.weight=2", "name=run 7"])
    assert settings.train == Inner(steps=5, learning_rate=1e-3)
    assert settings.sources == [Source(path="a", weight=2.0)]
    assert settings.name == "run 7"


def test_merge_keys_are_merged_and_own_keys_win(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "sources:\n- &first {path: a, weight: 2}\n- {<<: *first, path: b}\n- &last {weight: 3, <<: *first}\n"
        "- {<<: [*last, {path: d, weight: 7}], path: c}\n",
    )
    found = [(source.path, source.weight) for source in load_settings(Outer, file).sources]
    assert found == [("a", 2), ("b", 2), ("a", 3), ("c", 3)]


def test_merging_again_and_again_stays_small(tmp_path: Path) -> None:
    layers = ["a0: &a0 {k: 1}"]
    layers += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 30)]  # 9 to the 29th
    assert read_yaml(write(tmp_path, "\n".join(layers)))["a29"] == {"k": 1}


def test_override_makes_the_path_it_needs() -> None:
    assert load_settings(Outer, None, ["train.steps=3"]).train.steps == 3


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("train: {stpes: 5}", [], ["run.yaml", "train.stpes", "did you mean 'steps'"]),
        ("trian: {}", [], ["trian", "did you mean 'train'"]),
        ("zzz: 1", [], ["zzz", "known keys", "sources"]),
        ("train: {steps: 0}", [], ["train.steps", "0", "greater than or equal to 1"]),
        ("train: {steps: many}", [], ["train.steps", "'many'", "integer"]),
        ("train: {precision: bf17}", [], ["train.precision", "'bf17'", "'fp32' or 'bf16'"]),
        ("sources: [{paht: a}]", [], ["sources.0.paht", "did you mean 'path'", "sources.0.path", "required"]),
        ("train: {steps: 1}\ntrain: {steps: 2}", [], ["run.yaml", "'train' is given twice"]),
        ("- 1", [], ["keys and values"]),
        ("a: [", [], ["not valid YAML"]),
        ("? [1]\n: 2", [], ["not valid YAML", "a key is not a word"]),
        ("name: 2026-99-99", [], ["not valid YAML", "month"]),
        ("a: " + "[" * 9999, [], ["not valid YAML"]),
        ("train: {<<: 5}", [], ["not valid YAML", "<< merges a mapping"]),
        ("train: &a {steps: 3}\nsources: [{<<: *a, path: x}]", [], ["sources.0.steps"]),
        ("", ["name=2026-99-99"], ["name=2026-99-99", "not valid YAML"]),
        ("sources: [1]", ["sources.0.path.name=a"], ["sources.0.path"]),
        ("", ["train.steps"], ["train.steps", "key.path=value"]),
        ("", ["sources.0.path=a"], ["'sources'", "valid list"]),
        ("sources: [{path: a}]", ["sources.3.path=a"], ["sources", "list of 1"]),
        ("", ["train.stesp=4"], ["train.stesp", "did you mean 'steps'"]),
    ],
)
def test_each_mistake_is_named_in_one_line(tmp_path: Path, text: str, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_settings(Outer, write(tmp_path, text), overrides)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_what_two_keys_must_agree_on_is_said_without_a_name() -> None:
    class Pair(Settings):
        low: int = 1
        high: int = 2

        @model_validator(mode="after")
        def _ordered(self) -> Pair:
            if self.low > self.high:
                raise ValueError("low must not be above high")
            return self

    with pytest.raises(UserError, match=r"^the settings: low must not be above high$"):
        parse_settings(Pair, {"low": 3})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        load_settings(Outer, tmp_path / "nowhere.yaml")


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not valid YAML"):
        load_settings(Outer, write(tmp_path, "name: !!python/object/apply:os.system ['true']"))


def test_settings_do_not_change_after_validation() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Outer().name = "y"  # pyrefly: ignore


@given(
    steps=st.integers(1, 10**9),
    rate=st.floats(1e-12, 1e6),
    name=st.text(st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters="\x85\u2028\u2029\ufeff")),
)
def test_saved_settings_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, steps: int, rate: float, name: str
) -> None:
    settings = parse_settings(
        Outer, {"train": {"steps": steps, "learning_rate": rate}, "name": name, "sources": [{"path": name}]}
    )
    file = tmp_path_factory.mktemp("settings") / "settings.yaml"
    save_settings(settings, file)
    assert load_settings(Outer, file) == settings


@given(number=st.floats(1e-300, 1e300))
def test_numbers_in_every_notation_are_numbers(number: float) -> None:
    tree: dict = {}
    set_dotted(tree, f"x={number!r}")
    set_dotted(tree, f"y={number:e}")
    assert tree["x"] == number
    assert tree["y"] == pytest.approx(number, rel=1e-6)
    set_dotted(tree, "z=3e-4")
    assert tree["z"] == 3e-4


class Named(Settings):
    name: str


class Choosing(Settings):
    one: int | list[int] | Named = 1
    many: list[str | list[Named]] = []


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"one": {"nam": "x"}}, "key 'one.name' is required; unknown key 'one.nam', did you mean 'name'?"),
        ({"one": [1, "x"]}, "'one.1' is 'x': input should be a valid integer, unable to parse string as an integer"),
        ({"one": "x"}, "'one' is 'x': input should be a valid integer, unable to parse string as an integer"),
        ({"many": ["x", [{"name": 5}]]}, "'many.1.0.name' is 5: input should be a valid string"),
    ],
)
def test_of_several_allowed_kinds_the_closest_is_explained(tree: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_settings(Choosing, tree, source="it")
    assert str(error.value) == f"it: {message}"

"""docs/serving.md: its tables are what the server says of itself, its commands are accepted, its examples run."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.serving import Served
from tests.serve.tiny import CONFIG, build
from treadle.cli import main
from treadle.cli.serve import app
from treadle.model.families import read_spec
from treadle.model.tokenizer import Tokenizer
from treadle.serve.engine import Engine
from treadle.serve.model import Model
from treadle.serve.settings import ServeSettings, read_settings

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
DEFAULT = re.compile(r"(.*) \(default: (.*)\)\.")


def blocks(language: str) -> list[str]:
    """Return the page's examples in a language."""
    found = BLOCK.finditer(PAGE.read_text("utf-8"))
    return [re.sub(f"^{one[1]}", "", one[3], flags=re.MULTILINE) for one in found if one[2] == language]


def commands(program: str) -> list[list[str]]:
    """Return the arguments of each call of a program, with the operators of the shell that stand behind them."""
    lines = "".join(blocks("bash")).replace("\\\n", "").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [one[one.index(program) + 1 :] for one in words if program in one]


def flags() -> dict[str, str]:
    """Return for each flag the row that the table should have: its names, its default, its help without that."""
    found = {}
    for option in typer.main.get_command(app).params:
        names = [f"`{name}`" for name in (*option.opts, *option.secondary_opts) if name.startswith("-")]
        if not names or names == ["`--debug`"]:
            continue
        said = DEFAULT.fullmatch(getattr(option, "help", None) or "")
        assert said, f"the help of {names[0]} must end in (default: ...)."
        found[names[0]] = f"| {', '.join(names)} | {said[2]} | {said[1]} |"
    return found


def metrics(text: str) -> list[str]:
    """Return for each metric the row that the table should have."""
    rows = []
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return rows


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Generator[Served]:
    """A server of a model that says anything at all, which is enough: the examples ask for forms, not for facts."""
    long = Model(build(read_spec({**CONFIG, "max_position_embeddings": 4096})), tokenizer)
    server = Served(Engine(long, max_num_seqs=4, seed=2), ["my-model"])
    yield server
    server.close()


def test_the_table_of_flags_is_what_help_says() -> None:
    assert re.findall(r"^\| `--.*\|$", PAGE.read_text("utf-8"), re.MULTILINE) == list(flags().values())


def test_the_table_of_metrics_is_what_the_server_gives(served: Served) -> None:
    shown = re.findall(r"^\| `treadle_.*\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(metrics(served.http.get("/metrics").text))


def test_its_commands_start_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[ServeSettings] = []
    monkeypatch.setattr("treadle.serve.launch.serve", started.append)
    monkeypatch.chdir(tmp_path)
    config = next(block for block in blocks("yaml") if block.startswith("# server.yaml"))
    Path("server.yaml").write_text(config)
    asked = [words for words in commands("treadle") if words[0] == "serve"]
    assert len(asked) >= 10
    for words in asked:
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0, words
    assert len(started) == len(asked)
    (from_file,) = [one for one in started if one.model == "path/to/model"]
    assert (from_file.port, from_file.max_num_seqs, from_file.kv_cache_dtype) == (8001, 32, "int8")
    assert read_settings("server.yaml", {}).port == 8000
    assert yaml.safe_load(blocks("yaml")[-1])["scrape_configs"][0]["static_configs"][0]["targets"] == [ADDRESS[7:]]


def test_its_other_commands_give_texts(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.save(tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    asked = [words for words in commands("treadle") if words[0] != "serve"]
    assert len(asked) >= 7
    for words in asked:
        few = ["--max-tokens", "8"]  # a model of random weights seldom ends, and this one has a context of 128 tokens
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x\n")))
        with pytest.raises(SystemExit) as end:
            main([*words, *few])
        shown = capsys.readouterr()
        assert end.value.code == 0, (words, shown.err)


def test_its_python_examples_run(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    examples = blocks("python")
    assert len(examples) >= 6
    for example in examples:
        exec(compile(example.replace(ADDRESS, served.url), str(PAGE), "exec"), names)
    shown = capsys.readouterr().out
    assert re.search(r'\{\s*"colour"', shown) and re.search(r'weather \{"city": "(Oslo|Rome)"\}', shown)
    assert re.search(r"^(yes|no)$", shown, re.MULTILINE) and "2 32\n" in shown


def test_its_calls_of_curl_are_answered(served: Served) -> None:
    """The same requests, without depending on curl itself; test_admin.py has those that change the server."""
    asked = [words for words in commands("curl") if not any(part in " ".join(words) for part in ("https:", "SECRET"))]
    assert len(asked) >= 5
    for words in asked:
        headers = dict(words[at + 1].split(": ") for at, word in enumerate(words) if word == "-H")
        body = next((words[at + 1] for at, word in enumerate(words) if word == "-d"), None)
        address = next(word for word in words if word.startswith(ADDRESS)).replace(ADDRESS, served.url)
        answer = httpx.request("GET" if body is None else "POST", address, headers=headers, content=body, timeout=60)
        assert answer.status_code == 200, (words, answer.text)


if __name__ == "__main__":
    print("\n".join(flags().values()))

"""`treadle serve` with ranks, as a user runs it: on one machine and on two, to a good end and to a bad one."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.cli.test_serve import stream
from tests.serve.running import Process, serving
from tests.serve.test_ranks import free_port
from tests.serve.tiny import CONFIG, TEXT, TOKENS, build
from treadle.cli import main
from treadle.model.families import read_spec
from treadle.model.tokenizer import Tokenizer
from treadle.serve.model import Model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models") / "tiny"
    Model(build(read_spec(CONFIG)), Tokenizer.train([TEXT] * 4, TOKENS)).save(found)
    return found


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    return [one for one in process.children(recursive=True) if "treadle.serve.worker" in one.cmdline()]


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_killed_rank_ends_the_server_and_requests_are_told(folder: Path, axis: str) -> None:
    with serving(str(folder), "--port", "0", f"--{axis}-parallel-size", "2") as (process, url):
        assert re.search(r"ranks +2 \((tp=2\), sums go through (shared memory|Gloo)|pp=2\)\n)", "".join(process.lines))
        family = psutil.Process(process.child.pid).children(recursive=True)
        (worker,) = ranks_of(psutil.Process(process.child.pid))
        connection, response = stream(url, max_tokens=120, n=64)
        worker.kill()
        events = response.read().decode().strip().split("\n\n")
        error = json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        assert "rank 1 was ended by SIGKILL during a step of " in error
        assert events[-1] == "data: [DONE]"
        code, err = process.end()
        assert code == 1
        assert "rank 1 was ended by SIGKILL" in err.strip().splitlines()[-1] and "Traceback" not in err
        connection.close()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


def test_two_nodes_serve_and_end_together(folder: Path) -> None:
    port = free_port()
    words = [str(folder), "--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", str(port)]
    node = Process(*words, "--node-rank", "1")
    with serving(*words, "--port", "0") as (process, url):
        assert "ranks     2 (tp=2, 1 on each of 2 nodes)" in "".join(process.lines)
        connection, response = stream(url, max_tokens=5)
        assert response.read().decode().strip().endswith("data: [DONE]")
        connection.close()
        process.child.send_signal(signal.SIGTERM)
        assert process.end()[0] == 0
    code, err = node.end()
    assert (code, err) == (0, "")
    assert f"node 1 of 2 joins node 0 at 127.0.0.1:{port} as rank 1" in "".join(node.lines)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-tp", "3"), "4 query heads cannot be shared evenly; set it to 1 or 2 or 4"),
        (("-pp", "3"), "more stages than the model has layers, 2"),
        (("-tp", "2", "--nnodes", "2"), "need a master_port"),
        (("-tp", "2", "-dp", "2", "--nnodes", "2", "--master-port", "9"), "data_parallel_size 1"),
        (("-tp", "3", "--nnodes", "2", "--master-port", "9"), "3 ranks cannot be shared evenly by nnodes=2"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", str(folder), "--port", "0", *words])
    err = capsys.readouterr().err
    assert end.value.code == 2 and says in err and err.count("\n") == 1

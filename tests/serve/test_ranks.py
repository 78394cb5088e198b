"""A model on several ranks: the logits of one process; a rank that is lost is named, and all others end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from tests.tiny_models import TINY, ours_of, reference_of, some_tokens
from treadle.config import TreadleError, UserError
from treadle.model.context import PackedContext
from treadle.model.transformer import Transformer
from treadle.parallel.plan import Plan
from treadle.serve.batch import StepBatch
from treadle.serve.microbatches import LEAST_TOKENS
from treadle.serve.parallel_runner import ParallelRunner
from treadle.serve.parallel_settings import Nodes
from treadle.serve.rank_commands import Call, FreeCache, LoadWeights, MakeCache, Measure, Step
from treadle.serve.ranks import Ranks
from treadle.weights.load import load_model
from treadle.weights.save import save_model

# Of the logits' spread: sums over ranks are added in another order than within one matrix product.
TOLERANCE = 1e-5
BLOCK, BLOCKS = 4, 160
TP, PP = Plan(tp=2, dp_shard=1), Plan(pp=2, dp_shard=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved models: windows and tied weights, a head of its own, more stages than layers."""
    found = {}
    for name in ("gemma3_text", "smollm3-window"):
        model = ours_of(reference_of(TINY[name]), TINY[name]).requires_grad_(False)
        found[name] = tmp_path_factory.mktemp(name)
        save_model(found[name], model.spec, dict(model.named_parameters()))
    return found


def start(folder: Path, plan: Plan, groups: int = 2, **options: object) -> Ranks:
    ranks = Ranks(plan, str(folder), device="cpu", threads=1, **options)  # pyrefly: ignore
    try:
        ranks.all(LoadWeights(1, "", "auto"))
        ranks.all(MakeCache([BLOCKS] * groups, BLOCK, "auto"))
    except BaseException:
        ranks.close()
        raise
    return ranks


class Sequences:
    """Two sequences that a runner computes piece by piece, each with blocks of its own."""

    def __init__(self, groups: int = 2) -> None:
        self.groups, self.tokens = groups, [some_tokens(300, seed=seed).tolist() for seed in (5, 6)]
        self.done = [0, 0]

    def batch(self, *counts: int, pooled: bool = False) -> StepBatch:
        """Return the step that computes so many more tokens of each; the logits after each one's last are wanted."""
        width = BLOCKS // 2 - 1
        table = np.arange(1, 1 + 2 * width, dtype=np.int32).reshape(2, width)
        tokens = [
            token
            for own, done, count in zip(self.tokens, self.done, counts, strict=True)
            for token in own[done : done + count]
        ]
        pasts, rows = self.done.copy(), [counts[0] - 1, sum(counts) - 1]
        self.done = [done + count for done, count in zip(self.done, counts, strict=True)]
        tables = [table.tobytes()] * self.groups
        return StepBatch(tokens, list(counts), pasts, self.done.copy(), rows, tables, [], rows[:1] if pooled else [])

    def expected(self, whole: Transformer) -> Tensor:
        """Return the logits after each sequence's last computed token."""
        tokens = [token for own, done in zip(self.tokens, self.done, strict=True) for token in own[:done]]
        rows = torch.tensor(self.done).cumsum(0) - 1
        logits = whole(torch.tensor(tokens), PackedContext.of_lengths(self.done), rows=rows)
        assert isinstance(logits, Tensor)
        return logits


def check_steps(runner: ParallelRunner, whole: Transformer) -> None:
    sequences = Sequences()
    # One is long enough for microbatches, of which the first sequence has the first and a part of the second.
    for counts in ((11, 3), (1, 9), (1, 1), (7, 1), (2 * LEAST_TOKENS - 90, 90), (1, 1)):
        output = runner.step(sequences.batch(*counts))
        expected = sequences.expected(whole)
        assert output.logits.dtype == torch.float32
        assert (output.logits - expected).abs().max() <= TOLERANCE * (expected.max() - expected.min())
    output = runner.step(sequences.batch(1, 1, pooled=True))
    assert output.hidden.shape == (1, whole.spec.width)


@pytest.mark.parametrize("name", ["gemma3_text", "smollm3-window"])
@pytest.mark.parametrize("plan", [PP, Plan(pp=2, tp=2, dp_shard=1)], ids=["pp", "both"])
def test_steps_are_those_of_one_process(folders: dict[str, Path], name: str, plan: Plan) -> None:
    ranks = start(folders[name], plan)
    try:
        check_steps(ParallelRunner(ranks, 1), load_model(folders[name]))
        processes = [peer.process for peer in ranks.peers]
    finally:
        ranks.close()
    assert [process.poll() for process in processes if process is not None] == [0] * (plan.ranks() - 1)


def test_commands_beside_steps(folders: dict[str, Path]) -> None:
    folder = folders["gemma3_text"]
    whole, ranks = load_model(folder), start(folder, TP)
    check_steps(ParallelRunner(ranks, 1), whole)
    loaded = ranks.all(LoadWeights(2, str(folder), "float32"))
    assert sum(one["parameters"] for one in loaded) >= sum(one.numel() for one in whole.parameters())
    ParallelRunner(ranks, 1).forget()
    ranks.all(FreeCache())
    ranks.all(MakeCache([BLOCKS] * 2, BLOCK, "auto"))
    for measured in ranks.all(Measure()):
        assert measured["available"] > 1 << 20 and measured["each"] >= whole.spec.width
    check_steps(ParallelRunner(ranks, 2), whole)
    # What cannot be carried out leaves the ranks well.
    with pytest.raises(UserError, match="nowhere does not exist"):
        ranks.all(LoadWeights(3, "nowhere", "auto"))
    with pytest.raises(AssertionError, match="same shape"):
        ranks.all(LoadWeights(3, str(folders["smollm3-window"]), "auto"))
    check_steps(ParallelRunner(ranks, 2), whole)
    ranks.close()


def broken_step(ranks: Ranks, sequences: Sequences) -> TreadleError:
    with pytest.raises(TreadleError) as failed:
        ParallelRunner(ranks, 1).step(sequences.batch(1, 1))
    with pytest.raises(TreadleError) as again:
        ParallelRunner(ranks, 1).step(sequences.batch(1, 1))
    assert str(again.value) == str(failed.value), "what was lost stays lost, for the same reason"
    processes = [peer.process for peer in ranks.peers if peer.process is not None]
    ranks.close()
    assert all(process.poll() is not None for process in processes), "no rank is left behind"
    return failed.value


@pytest.mark.parametrize("plan", [TP, PP], ids=["tp", "pp"])
def test_a_killed_rank_is_named_at_once(folders: dict[str, Path], plan: Plan) -> None:
    ranks, sequences = start(folders["gemma3_text"], plan), Sequences()
    ParallelRunner(ranks, 1).step(sequences.batch(5, 5))
    process = ranks.peers[0].process
    assert process is not None
    process.kill()
    error = broken_step(ranks, sequences)
    assert "rank 1 was ended by SIGKILL during a step of 2 sequences (2 tokens)" in str(error) or (
        "rank 1 was ended by SIGKILL during waiting for work" in str(error)  # it was noticed before the step
    )


def test_a_rank_that_hangs_is_named_within_the_timeout(folders: dict[str, Path]) -> None:
    ranks, sequences = start(folders["gemma3_text"], TP, timeout=2.0), Sequences()
    ParallelRunner(ranks, 1).step(sequences.batch(5, 5))
    process = ranks.peers[0].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    error = broken_step(ranks, sequences)
    assert str(error) == "rank 1 gave no sign for 2 s during a step of 2 sequences (2 tokens)"


def test_an_error_on_one_rank_is_the_one_that_is_told(folders: dict[str, Path]) -> None:
    ranks, sequences = start(folders["gemma3_text"], TP), Sequences()
    batch = sequences.batch(5, 5)
    ranks._send(ranks.peers[0], Call(0, Step(77, batch)))  # weights that only this rank is asked for
    error = broken_step(ranks, sequences)
    assert "rank 1 failed during" in str(error) and "KeyError: 77" in str(error)


def test_a_rank_lost_while_nothing_runs_is_told(folders: dict[str, Path]) -> None:
    told: list[TreadleError] = []
    noticed = threading.Event()

    def lost(error: TreadleError) -> None:
        told.append(error)
        noticed.set()

    ranks = start(folders["gemma3_text"], TP, on_lost=lost)
    process = ranks.peers[0].process
    assert process is not None
    process.kill()
    assert noticed.wait(20)
    assert "rank 1 was ended by SIGKILL during waiting for work" in str(told[0])
    with pytest.raises(TreadleError, match="SIGKILL"):
        ranks.all(Measure())
    ranks.close()


def test_what_cannot_start_says_so_and_leaves_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(UserError, match="does not exist"):
        start(tmp_path / "nothing", TP)
    with pytest.raises(UserError, match=r"tp=3.*query heads"):
        start(folders["gemma3_text"], Plan(tp=3, dp_shard=1))
    assert set(psutil.Process().children()) == before
    assert not torch.distributed.is_initialized()


SERVER = """
import os, sys
from pathlib import Path
from tests.serve.test_ranks import TP, start
ranks = start(Path(sys.argv[1]), TP)
print(ranks.peers[0].process.pid, flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_rank_0(folders: dict[str, Path]) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folders["gemma3_text"])],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    worker = psutil.Process(int(server.stdout.readline()))
    worker.suspend()  # one that hangs must go as well
    server.kill()
    server.wait()
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_an_address_that_is_taken_or_elsewhere_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for nodes in (
            Nodes(nnodes=2, master_port=server.getsockname()[1]),
            Nodes(nnodes=2, master_port=1, master_addr="192.0.2.1"),
        ):
            with pytest.raises(UserError, match="node 0 cannot listen at"):
                Ranks(TP, "", nodes=nodes, timeout=2.0)


NODE = """
import sys
from treadle.serve.nodes import serve_node
from treadle.serve.parallel_settings import Nodes
rank, ranks = int(sys.argv[3]), int(sys.argv[4])
serve_node(Nodes(nnodes=ranks, node_rank=rank, master_port=int(sys.argv[1])), ranks, sys.argv[2], threads=1)
"""


def start_node(port: int, folder: Path, rank: int = 1, ranks: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", NODE, str(port), str(folder), str(rank), str(ranks)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_two_nodes_serve_one_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """The model lies elsewhere on the other node."""
    folder, port = folders["gemma3_text"], free_port()
    elsewhere = tmp_path / "copy"
    elsewhere.symlink_to(folder)
    node = start_node(port, elsewhere)
    ranks = start(folder, TP, nodes=Nodes(nnodes=2, master_port=port))
    check_steps(ParallelRunner(ranks, 1), load_model(folder))
    ranks.close()
    assert node.wait(20) == 0


def test_a_lost_node_is_named_and_all_end(folders: dict[str, Path]) -> None:
    """While nothing runs, so that no one is told by a neighbour that falls silent."""
    folder, port, lost = folders["gemma3_text"], free_port(), threading.Event()
    nodes = [start_node(port, folder, rank, 3) for rank in (1, 2)]
    everyone = Nodes(nnodes=3, master_port=port)
    ranks = start(folder, Plan(pp=3, dp_shard=1), nodes=everyone, on_lost=lambda _: lost.set())
    (worker,) = psutil.Process(nodes[0].pid).children()
    worker.kill()
    assert lost.wait(20)
    error = broken_step(ranks, Sequences())
    assert "rank 1 on " in str(error) and "lost its connection during waiting for work" in str(error)
    assert [node.wait(20) for node in nodes] == [1, 1]
    assert nodes[0].stderr is not None and "rank 1 of this node was ended by SIGKILL" in nodes[0].stderr.read()


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (Nodes(nnodes=2), "need a master_port"),
        (Nodes(nnodes=3, master_port=1), "2 ranks cannot be shared evenly by nnodes=3"),
        (Nodes(nnodes=2, node_rank=2, master_port=1), "node_rank=2 is no node of nnodes=2"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(nodes: Nodes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        nodes.ranks_each(2)

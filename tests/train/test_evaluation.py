"""Evaluation: the numbers of an independent computation, whatever the batch size and the number of ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.train.runs import go, run_settings, texts
from treadle.cli import main
from treadle.config import UserError
from treadle.data import Corpus, evaluation_batches
from treadle.model.tokenizer import Tokenizer
from treadle.serve.engine import Engine
from treadle.serve.model import load
from treadle.serve.request import SamplingSettings
from treadle.train import harness
from treadle.train.evaluation import Measured, measure
from treadle.train.harness import complete, sampling, score
from treadle.train.held_out import HeldOut, windows
from treadle.weights.load import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, run_corpus: Path) -> Path:
    """A little trained model, so that its losses differ from token to token."""
    tree = run_settings(tmp_path_factory.mktemp("model") / "run", run_corpus, train={"steps": 20})
    tree["model"]["config"] = {**tree["model"]["config"], "max_position_embeddings": 64}
    return go(tree).checkpoint.resolve()


def reference(model: Path, text: str, length: int, stride: int) -> tuple[float, int]:
    """Return the loss sum in float64 over a text by Transformers, window by window, and the tokens predicted."""
    theirs = AutoModelForCausalLM.from_pretrained(model).double()
    ids = Tokenizer.load(model).encode(text)
    total, counted = 0.0, 1
    while counted < len(ids):
        start = 0 if counted == 1 else next(s for s in range(0, len(ids), stride) if s + length > counted - 1)
        end = min(start + length, len(ids) - 1)
        with torch.no_grad():
            losses = -theirs(input_ids=torch.tensor([ids[start:end]])).logits[0].log_softmax(-1)
        for position in range(counted, end + 1):
            total += float(losses[position - 1 - start, ids[position]])
        counted = end + 1
    return total, len(ids) - 1


@pytest.mark.parametrize(("length", "stride"), [(64, None), (48, 48), (32, 8), (64, 1)])
def test_text_is_measured_as_transformers_measures_it(tmp_path: Path, model: Path, length: int, stride: int) -> None:
    text = "ünïcode and " + texts()[3][:700]
    (tmp_path / "text.txt").write_text(text, "utf-8")
    total, tokens = reference(model, text, length, stride or length)
    report = HeldOut(model, sequence_length=length).texts([tmp_path / "text.txt"], stride)
    assert report["tokens"] == tokens
    assert report["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert report["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert report["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text.encode()), rel=1e-5)
    assert report["perplexity_per_word"] == pytest.approx(math.exp(total / len(text.split())), rel=1e-4)


def test_the_batch_size_changes_nothing_but_rounding(model: Path, run_corpus: Path) -> None:
    losses = [HeldOut(model, sequence_length=40, batch_tokens=n).corpus(run_corpus)["loss"] for n in (1, 200, 10**6)]
    # The same products in other tiles: fp32 rounding of single tokens, averaged over thousands.
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-7)


def _measured(model: Path, corpus: Path) -> tuple[float, float]:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batches = evaluation_batches(Corpus.open(corpus, "validation"), 40, 7, rank, size)
    found = measure(load_model(model, torch.float32), batches, torch.device("cpu"))
    return found.loss_sum, found.tokens


def test_the_number_of_ranks_changes_nothing_but_rounding(model: Path, run_corpus: Path, ranks) -> None:
    one, many = _measured(model, run_corpus), ranks(3).run(_measured, model, run_corpus)
    assert len(set(many)) == 1
    assert many[0][1] == one[1] == Corpus.open(run_corpus, "validation").tokens - 1
    assert many[0][0] == pytest.approx(one[0], rel=1e-6)


def test_a_whole_corpus_gives_exact_words_and_bytes_and_a_part_an_estimate(model: Path, run_corpus: Path) -> None:
    held_out, text = HeldOut(model), texts()[-1]
    whole, part = held_out.corpus(run_corpus), held_out.corpus(run_corpus, tokens=1500)
    assert (whole["bytes"], whole["words"]) == (len(text.encode()), len(text.split()))
    assert 1400 <= part["tokens"] <= 1600
    assert part["bytes"] / part["tokens"] == pytest.approx(whole["bytes"] / whole["tokens"], rel=1e-2)


@given(st.integers(2, 200), st.integers(2, 50), st.data())
def test_windows_count_every_token_but_the_first_once(tokens: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    counted = []
    for sample in windows(list(range(tokens)), length, stride):
        assert len(sample.tokens) <= length
        assert (sample.targets == sample.tokens + 1).all()
        counted += sample.targets[sample.token_weights > 0].tolist()
    assert counted == list(range(1, tokens))


def test_infinite_and_empty_measures_are_told_as_such() -> None:
    assert Measured(1e6, 1.0).report()["perplexity"] == math.inf
    assert math.isnan(Measured(0.0, 0.0).report()["loss"])


def test_the_verb_prints_numbers_and_json(model: Path, run_corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--json"], []):
        with pytest.raises(SystemExit) as end:
            main(["eval", str(model), "--data", str(run_corpus), *words])
        assert end.value.code == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    report = json.loads(first)
    assert {"loss", "perplexity", "bits_per_byte", "perplexity_per_word", "tokens", "seconds"} <= report.keys()
    assert f"{report['bits_per_byte']:.4f}" in rest and f"{report['loss']:.4f}" in rest


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "one of --data CORPUS"),
        (["--data", "nowhere"], "nowhere"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "binary"], "binary is not UTF-8 text (byte 1)"),
        (["--text", "empty"], "fewer than two tokens"),
        (["--text", "good", "--sequence-length", "65"], "the model's 64 positions, it is 65"),
        (["--text", "good", "--stride", "0"], "--stride must lie from 1"),
        (["--text", "good", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["--text", "good", "--data", "good"], "one of --data CORPUS"),
    ],
)
def test_mistakes_are_one_sentence(
    model: Path,
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"a\xff\xfe")
    Path("empty").touch()
    Path("good").write_text("def main(): return 0")
    with pytest.raises(SystemExit) as end:
        main(["eval", str(model), *words])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_the_harness_scores_continuations_as_transformers_does(model: Path) -> None:
    ours, theirs = load(model, "float32"), AutoModelForCausalLM.from_pretrained(model).double()
    random = np.random.default_rng(0)
    pairs = [
        (random.integers(5, 300, int(a)).tolist(), random.integers(5, 300, int(b)).tolist())
        for a, b in random.integers(1, 30, (20, 2))
    ]
    pairs[3] = (pairs[3][0] * 20, pairs[3][1])  # longer than the model's 64 positions: cut at the left
    for batch_tokens in (1, 100, 10_000):
        for (value, greedy), (context, ending) in zip(score(ours, pairs, batch_tokens), pairs, strict=True):
            ids = (context + ending)[-65:]
            with torch.no_grad():
                logits = theirs(input_ids=torch.tensor([ids[:-1]])).logits[0, -len(ending) :]
            wanted = torch.tensor(ending)
            expected = logits.log_softmax(-1).gather(1, wanted[:, None]).sum()
            assert value == pytest.approx(float(expected), rel=1e-4)
            assert greedy == bool((logits.argmax(-1) == wanted).all())


def test_the_harness_generates_all_at_once_what_transformers_does(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = load(model, "float32"), AutoModelForCausalLM.from_pretrained(model)
    tokenizer = Tokenizer.load(model)
    random = np.random.default_rng(1)
    # Some longer than the model's 64 positions: they lose tokens at their left, so that the answer has room.
    prompts = [random.integers(5, 300, int(size)).tolist() for size in random.integers(1, 120, 12)]
    wants = [{"max_gen_toks": 7, "until": []}, {"max_new_tokens": 16, "do_sample": False, "temperature": 0.9}] * 6
    expected = []
    for prompt, wanted in zip(prompts, wants, strict=True):
        most = next(iter(wanted.values()))
        ids = torch.tensor([prompt[-(64 - most) :]])
        with torch.no_grad():
            found = theirs.generate(ids, max_new_tokens=most, do_sample=False)[0, ids.shape[1] :].tolist()
        expected.append(tokenizer.decode(found))
    engines: list[Engine] = []
    monkeypatch.setattr(
        harness, "Engine", lambda *given, **named: engines.append(Engine(*given, **named)) or engines[0]
    )
    assert complete(ours, [*zip(prompts, wants, strict=True)]) == expected
    cut = sum(len(prompt) > 64 - next(iter(wanted.values())) for prompt, wanted in zip(prompts, wants, strict=True))
    assert 2 < cut < 12 and f"{cut} of 12 prompts were cut at their left" in capsys.readouterr().err
    assert engines[0].stats.steps < engines[0].stats.generated_tokens / 3  # many answers in each step


def test_what_the_harness_wants_of_an_answer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sampling({}) == SamplingSettings(max_tokens=256, temperature=0.0)
    assert sampling({"until": "\n", "do_sample": True}) == SamplingSettings(max_tokens=256, temperature=0, stop=("\n",))
    assert sampling({"until": ["", "a"], "temperature": 0.5, "top_k": 3, "max_tokens": 9}) == SamplingSettings(
        max_tokens=9, temperature=0.5, stop=("a",), top_k=3
    )
    ours = load(model, "float32")
    with pytest.raises(UserError, match=r"answers of up to 64 tokens \(max_gen_toks\), but .* context holds 64"):
        complete(ours, [([5], {"max_gen_toks": 64})])
    (text,) = complete(ours, [([5], {"max_gen_toks": 4, "num_beams": 2, "until": "zz"})])
    assert text and "num_beams have no effect here" in capsys.readouterr().err


def test_a_missing_harness_names_the_extra(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.train.harness import run_tasks

    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(UserError, match=r"pip install 'treadle\[eval\]'"):
        run_tasks(load(model), ["hellaswag"])

"""lm-evaluation-harness (the extra `eval`) over a Treadle model: its tasks, our forward pass and engine."""

from __future__ import annotations

import itertools
import os
import queue
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from treadle.config import UserError
from treadle.config.errors import nearest
from treadle.config.progress import progress
from treadle.model.context import PackedContext
from treadle.serve.engine import Engine
from treadle.serve.interface import raise_if_failed
from treadle.serve.model import Model
from treadle.serve.request import Delta, SamplingSettings

# So many logits are held at once (but always those of a whole sequence).
LOGITS = 64 << 20


def run_tasks(
    model: Model,
    tasks: Sequence[str],
    fewshot: int | None = None,
    limit: int | None = None,
    task_folder: str | Path | None = None,
    online: bool = False,
    batch_tokens: int = 8192,
) -> dict[str, dict[str, Any]]:
    """Return task -> metric -> value. `task_folder` holds task files besides the harness's own.

    Without `online` only data sets that are already on this machine are used. Raises UserError for a missing package,
    an unknown task and data that is not there.
    """
    if not online:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    try:
        import lm_eval  # pyrefly: ignore[missing-import]
        from lm_eval.tasks import TaskManager  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise UserError("lm-evaluation-harness is not installed; pip install 'treadle[eval]'") from error
    manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    for name in tasks:
        if not manager.match_tasks([name]):
            raise UserError(f"unknown task '{name}'{nearest(name, manager.all_tasks) or '; see lm-eval ls tasks'}")
    try:
        results = lm_eval.simple_evaluate(
            model=adapter(model, batch_tokens),
            tasks=list(tasks),
            num_fewshot=fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
        )
    except (ConnectionError, OSError) as error:
        way_out = "" if online else "; --online lets it be downloaded"
        raise UserError(
            f"the data of {', '.join(tasks)} is not there: {' '.join(str(error).split())}{way_out}"
        ) from error
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and "stderr" not in name
        }
        for task, metrics in results["results"].items()
    }


def adapter(model: Model, batch_tokens: int) -> Any:
    """Return the harness's view of a model. Raises UserError where it has no tokenizer."""
    from lm_eval.api.model import TemplateLM  # pyrefly: ignore[missing-import]

    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError("the model has no tokenizer, which the tasks' texts need")

    class TreadleLM(TemplateLM):
        """Scores continuations in packed batches, generates with the engine."""

        @property
        def eot_token_id(self) -> int:
            return next(iter(tokenizer.eos_ids), 0)

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_id is None else tokenizer.bos_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return tokenizer.encode(string, special_tokens=add_special_tokens is not False)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return score(model, [(context, ending) for _, context, ending in requests], batch_tokens)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            from lm_eval.utils import (  # pyrefly: ignore[missing-import]
                get_rolling_token_windows,
                make_disjoint_window,
            )

            # The windows of all texts are scored together: short texts share batches.
            pairs, ends = [], [0]
            for request in requests:
                ids = self.tok_encode(request.args[0], add_special_tokens=False)
                parts = get_rolling_token_windows(ids, self.prefix_token_id, model.spec.max_positions, 1)
                pairs += [make_disjoint_window(part) for part in parts]
                ends.append(len(pairs))
            values = [value for value, _ in score(model, pairs, batch_tokens)]
            return [sum(values[start:end]) for start, end in itertools.pairwise(ends)]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            pairs = [request.args for request in requests]
            encoded = [(self.tok_encode(text) or [self.prefix_token_id], wanted) for text, wanted in pairs]
            return complete(model, encoded)

    return TreadleLM()


def complete(model: Model, prompts: Sequence[tuple[list[int], Mapping[str, Any]]]) -> list[str]:
    """Return the answer to each (prompt, what the harness wants of its answer), all in one engine at once.

    As in the harness's own backends, a prompt loses tokens at its left where it and the answer that may follow are
    longer than the context. Raises UserError where the answer alone is.
    """
    texts, finished, cut = [""] * len(prompts), 0, 0
    ignored: set[str] = set()
    deltas: queue.SimpleQueue[tuple[int, Delta]] = queue.SimpleQueue()
    with Engine(model, seed=0) as engine, progress("Generating", total=len(prompts), unit="answers") as step:
        for index, (tokens, wanted) in enumerate(prompts):
            settings = sampling(wanted)
            ignored |= wanted.keys() - KNOWN
            assert settings.max_tokens is not None
            room = engine.max_model_len - settings.max_tokens
            if room < 1:
                raise UserError(
                    f"the task wants answers of up to {settings.max_tokens} tokens (max_gen_toks), but the model's "
                    f"context holds {engine.max_model_len} with the prompt; take a task with shorter answers"
                )
            cut += len(tokens) > room
            engine.submit(tokens[-room:], settings, lambda delta, index=index: deltas.put((index, delta)))
        while finished < len(prompts):
            index, delta = deltas.get()
            raise_if_failed(delta)
            texts[index] += delta.text
            if delta.finish_reason is not None:
                finished += 1
                step()
    if cut:
        print(f"note: {cut} of {len(prompts)} prompts were cut at their left to fit the context", file=sys.stderr)
    if ignored:
        print(f"warning: the tasks' settings {', '.join(sorted(ignored))} have no effect here", file=sys.stderr)
    return texts


MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")
KNOWN = {"until", "do_sample", "temperature", *MAX_TOKENS, *SAMPLING}


def sampling(wanted: Mapping[str, Any]) -> SamplingSettings:
    """Return what the harness's generation settings mean; it samples only where a temperature is given."""
    until = wanted.get("until") or ()
    given = {name: wanted[name] for name in SAMPLING if wanted.get(name) is not None}
    return SamplingSettings.of(
        max_tokens=int(next((wanted[name] for name in MAX_TOKENS if wanted.get(name) is not None), 256)),
        temperature=0.0 if wanted.get("do_sample") is False else float(wanted.get("temperature") or 0.0),
        stop=tuple(text for text in ((until,) if isinstance(until, str) else until) if text),
        **given,
    )


@torch.no_grad()
def score(model: Model, pairs: Sequence[tuple[list[int], list[int]]], batch_tokens: int) -> list[tuple[float, bool]]:
    """Return for each (context, continuation) the log probability of the continuation and whether it is greedy.

    What is too long for the model loses tokens at its left.
    """
    longest = model.spec.max_positions
    # Sorted by length, so that a batch holds sequences of like size; the answer has the order of the question.
    order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index][0]) - len(pairs[index][1]))
    results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    with progress("Scoring", total=len(pairs), unit="continuations") as step:
        batch: list[int] = []
        held = rows = 0
        for index in order:
            context, ending = pairs[index]
            size = min(longest, len(context) + len(ending) - 1)
            too_long = held + size > batch_tokens or (rows + len(ending)) * model.spec.vocabulary > LOGITS
            if batch and too_long:
                _score_batch(model, pairs, batch, longest, results)
                step(len(batch))
                batch, held, rows = [], 0, 0
            batch.append(index)
            held, rows = held + size, rows + len(ending)
        if batch:
            _score_batch(model, pairs, batch, longest, results)
            step(len(batch))
    return results


def _score_batch(model: Model, pairs: Any, batch: list[int], longest: int, results: list[tuple[float, bool]]) -> None:
    tokens: list[int] = []
    lengths, rows, targets = [], [], []
    for index in batch:
        context, ending = pairs[index]
        ids = (context + ending)[-longest - 1 :]
        scored = min(len(ending), len(ids) - 1)
        base = len(tokens)
        tokens += ids[:-1]
        lengths.append(len(ids) - 1)
        rows.append(range(base + len(ids) - 1 - scored, base + len(ids) - 1))
        targets.append(ids[len(ids) - scored :])
    flat = torch.tensor([row for part in rows for row in part], device=model.device)
    wanted = torch.tensor([token for part in targets for token in part], device=model.device)
    context = PackedContext.of_lengths(lengths, model.device)
    logits = model.module(torch.tensor(tokens, device=model.device), context, rows=flat).float()
    values = (logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(-1)).double()
    greedy = logits.argmax(-1) == wanted
    at = 0
    for index, part in zip(batch, rows, strict=True):
        end = at + len(part)
        results[index] = (float(values[at:end].sum()), bool(greedy[at:end].all()))
        at = end

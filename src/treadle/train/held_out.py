"""`treadle eval`: a model measured on a prepared corpus or on text files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle.config import UserError
from treadle.config.progress import progress
from treadle.data import Corpus, PackedBatch, evaluation_batches
from treadle.data.loader import collate
from treadle.data.packing import Sample
from treadle.model.families import read_spec
from treadle.model.tokenizer import Tokenizer
from treadle.model.transformer import Transformer
from treadle.train.evaluation import Measured, measure
from treadle.weights.checkpoint import open_checkpoint
from treadle.weights.load import load_model, load_tokenizer

# Longer contexts cost more and say little more about most models; --sequence-length asks for them.
LONGEST_DEFAULT = 2048


class HeldOut:
    """A model and how it is to be measured: how many tokens it sees before each, how many at once."""

    def __init__(
        self,
        path: str | Path,
        dtype: torch.dtype | None = torch.float32,
        device: torch.device | str = "cpu",
        sequence_length: int | None = None,
        batch_tokens: int = 8192,
    ) -> None:
        """Load the model at `path`. Raises UserError where it cannot be, or the lengths do not fit."""
        self.path, self.device = path, torch.device(device)
        # Weights come last: whatever else is wrong is said before they are read.
        checkpoint = open_checkpoint(path)
        spec = read_spec(checkpoint.config)
        self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint, spec.vocabulary)
        longest = spec.max_positions
        self.length = min(longest, LONGEST_DEFAULT) if sequence_length is None else sequence_length
        if not 2 <= self.length <= longest:
            raise UserError(
                f"--sequence-length must lie from 2 to the model's {longest} positions, it is {self.length}"
            )
        self.samples = max(1, batch_tokens // self.length)
        self.model: Transformer = load_model(checkpoint, dtype, device)

    def corpus(self, folder: str | Path, split: str = "validation", tokens: int = 0) -> dict[str, Any]:
        """Return the report on a split of a prepared corpus, on about `tokens` of it (0: all). Raises UserError."""
        corpus = Corpus.open(folder, split)
        if self.tokenizer is not None:
            corpus.check_tokenizer(self.tokenizer, whose=f"the model {self.path}")
        elif corpus.vocabulary_size > self.model.spec.vocabulary:
            raise UserError(
                f"the corpus {folder} has more tokens than the model {self.path} knows; prepare it for the model"
            )
        most = None if not tokens else max(1, tokens // self.length)
        batches = evaluation_batches(corpus, self.length, self.samples, max_samples=most)
        total = corpus.tokens - corpus.documents
        measured = self._measure(batches, min(total, tokens) if tokens else total)
        # Where only a part was read, it is taken to be like the whole in bytes and words a token.
        share = measured.tokens / max(1, total)
        if not corpus.has_mask:
            measured = replace(measured, words=corpus.words * share, text_bytes=corpus.text_bytes * share)
        return self._report(measured, data=str(folder), split=split)

    def texts(self, files: Sequence[str | Path], stride: int | None = None, tokens: int = 0) -> dict[str, Any]:
        """Return the report on text files, each a document; `tokens` limits each (0: all).

        Windows of the sequence length begin every `stride` tokens (default: side by side); of those that overlap only
        what is new counts, so a smaller stride gives each token more context. Raises UserError.
        """
        if self.tokenizer is None:
            raise UserError(f"{self.path} has no tokenizer, so it cannot read text; give --data with a prepared corpus")
        step = self.length if stride is None else stride
        if not 1 <= step <= self.length:
            raise UserError(f"--stride must lie from 1 to the sequence length {self.length}, it is {step}")
        samples, words, size = [], 0, 0
        for file in files:
            text = _read_text(Path(file))
            ids = self.tokenizer.encode(text, parse_special=False)
            if tokens and len(ids) > tokens:
                ids = ids[:tokens]
                text = self.tokenizer.decode(ids)
            samples += windows(ids, self.length, step)
            words, size = words + len(text.split()), size + len(text.encode())
        batches = (collate(samples[at : at + self.samples]) for at in range(0, len(samples), self.samples))
        measured = self._measure(batches, sum(float(sample.token_weights.sum()) for sample in samples))
        return self._report(replace(measured, words=words, text_bytes=size), data=", ".join(map(str, files)))

    def _measure(self, batches: Iterable[PackedBatch], tokens: float) -> Measured:
        self.seconds = time.perf_counter()
        with progress("Evaluating", total=tokens, unit="tokens") as step:

            def shown() -> Iterator[PackedBatch]:
                for batch in batches:
                    yield batch
                    step(float(batch.token_weights.count_nonzero()))

            measured = measure(self.model, shown(), self.device)
        self.seconds = time.perf_counter() - self.seconds
        if not measured.tokens:
            raise UserError("there is nothing to predict: the text has fewer than two tokens")
        return measured

    def _report(self, measured: Measured, **about: str) -> dict[str, Any]:
        dtype = str(self.model.embedding.weight.dtype).removeprefix("torch.")
        return {
            "model": str(self.path),
            **about,
            **measured.report(),
            "sequence_length": self.length,
            "dtype": dtype,
            "seconds": round(self.seconds, 3),
        }


def windows(ids: Sequence[int], length: int, stride: int) -> list[Sample]:
    """Return samples of at most `length` tokens, `stride` apart, in which every token but the first counts once."""
    tokens = np.asarray(ids, np.int64)
    samples, counted = [], 0
    for start in range(0, max(1, len(tokens) - 1), stride):
        end = min(start + length, len(tokens) - 1)
        if end <= counted:
            break
        weights = np.zeros(end - start, np.float32)
        weights[counted - start :] = 1
        positions = np.arange(end - start, dtype=np.int32)
        starts = np.array([0, end - start], np.int32)
        samples.append(Sample(tokens[start:end], tokens[start + 1 : end + 1], positions, starts, weights, 0))
        counted = end
    return samples


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error

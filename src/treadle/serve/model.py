"""The Python face of a model: weights, tokenizer and a few verbs.

model = treadle.load("path/to/model")          # a Hugging Face directory, a checkpoint, a GGUF file
print(model.generate("Once upon a time", max_tokens=32))
model.logits([1, 2, 3])                        # [T, V]
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from treadle.config import UserError, parse_settings
from treadle.config.errors import nearest
from treadle.config.progress import amount_text
from treadle.model.context import PackedContext
from treadle.model.spec import ModelSpec
from treadle.model.transformer import Transformer

if TYPE_CHECKING:
    from treadle.model.tokenizer import Tokenizer
    from treadle.serve.ranks import Ranks
    from treadle.serve.request import Completion

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}


class Model:
    """A model ready to use.

    `module` is the torch module: it can be inspected, changed and trained; what the other methods return follows it.
    `tokenizer` is None for a model that came without one. `ranks` are the processes that share a model which was loaded
    on several; `module` is then the first one's part. `path` is where the weights were read from, None for a model that
    was made in memory; `version` names them, for one from disk by its content.
    """

    def __init__(
        self,
        module: Transformer,
        tokenizer: Tokenizer | None = None,
        ranks: Ranks | None = None,
        path: str | None = None,
        version: str = "in-memory",
    ) -> None:
        self.module, self.tokenizer, self.ranks = module, tokenizer, ranks
        self.path, self.version = path, version
        self._read = _marks(module) if path is not None else []

    @property
    def on_disk(self) -> bool:
        """Whether the weights can be read again: they came from a path and were not changed since."""
        return self.path is not None and _marks(self.module) == self._read

    @property
    def spec(self) -> ModelSpec:
        """What the model is, as frozen data."""
        return self.module.spec

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def device(self) -> torch.device:
        return self.module.device

    @torch.no_grad()
    def logits(self, tokens: Sequence[int] | Tensor) -> Float[Tensor, "T V"]:
        """Return the logits after each token of one sequence, in fp32. Raises UserError for what is no token id."""
        self._check_whole("logits")
        ids = token_ids(tokens, self.spec.vocabulary)
        context = PackedContext.of_lengths([len(ids)], self.device)
        logits = self.module(torch.tensor(ids, device=self.device), context)
        assert isinstance(logits, Tensor)
        return logits.float()

    def generate(self, prompt: str | Sequence[int] | Tensor, **sampling: Any) -> Completion:
        """Return the completion of one prompt, a text or its token ids; `str()` of it is its text.

        Takes what SamplingSettings has: max_tokens (default: up to the end of the context), temperature (default 1;
        0 is greedy), seed, top_p, stop, ... For many prompts, or a stream, use `treadle.Engine`. Raises UserError.
        """
        from treadle.serve.engine import Engine
        from treadle.serve.request import SamplingSettings

        settings = SamplingSettings.of(**sampling)
        if settings.n != 1:
            raise UserError("generate returns one completion; use treadle.Engine for n > 1")
        tokens = self.encode(prompt)
        with Engine(self, max_num_seqs=1, max_model_len=self.room_for(tokens, settings.max_tokens)) as engine:
            return engine.generate([tokens], settings)[0]

    def encode(self, prompt: str | Sequence[int] | Tensor) -> list[int]:
        """Return a prompt's token ids. Raises UserError where there are none, or one is not in the vocabulary."""
        return encode_prompt(self.tokenizer, self.spec.vocabulary, prompt)

    def room_for(self, tokens: Sequence[int], max_tokens: int | None) -> int | None:
        """Return the context that a prompt and its answer need, so that no more is set aside; None for all there is."""
        needed = len(tokens) + (max_tokens or self.spec.max_positions)
        return needed if needed <= self.spec.max_positions else None

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face model directory that Transformers, vLLM and Treadle load as it is; adapters are merged.

        Raises UserError where `folder` exists and is not empty, TreadleError when the disk is full.
        """
        from treadle.config.files import atomic_folder
        from treadle.model.lora import merged_state
        from treadle.weights.save import save_model

        self._check_whole("saving")
        with atomic_folder(folder) as aside:
            save_model(aside, self.spec, merged_state(self.module), self.tokenizer)

    def close(self) -> None:
        """End the other ranks of a model that was loaded on several; harmless otherwise."""
        if self.ranks is not None:
            self.ranks.close()

    def _check_whole(self, what: str) -> None:
        if self.ranks is not None:
            raise UserError(f"{what} needs the whole model in this process; load it without tensor_parallel_size")

    def __repr__(self) -> str:
        count = self.spec.parameters_count()
        return f"Model({self.spec.family}, {amount_text(count, 'parameters')}, {_name(self.dtype)} on {self.device})"


def load(
    path: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    check_tokenizer: Callable[[Tokenizer | None], None] | None = None,
    **parallel: Any,
) -> Model:
    """Return the model at `path`: a Hugging Face directory, a checkpoint or a GGUF file.

    `dtype` is a torch dtype or its name (default: the checkpoint's own); `device` defaults to the accelerator that
    PyTorch sees, else the CPU. `check_tokenizer` may refuse the tokenizer before the weights are read. With
    `tensor_parallel_size` or `pipeline_parallel_size` (see ParallelSettings) other processes hold their parts of it.
    Raises UserError naming what is missing or wrong.
    """
    from treadle.model.families import read_spec
    from treadle.serve.parallel_settings import ParallelSettings
    from treadle.weights.checkpoint import open_checkpoint
    from treadle.weights.identity import content_version
    from treadle.weights.load import load_model, load_tokenizer

    place = choose_device(device)
    kind = parse_dtype(dtype)
    # Weights come last: whatever else is wrong is said before they are read.
    checkpoint = open_checkpoint(path)
    spec = read_spec(checkpoint.config)
    tokenizer = load_tokenizer(checkpoint, spec.vocabulary)
    if check_tokenizer is not None:
        check_tokenizer(tokenizer)
    layout = parse_settings(ParallelSettings, parallel, source="the settings of the ranks")
    source, version = os.path.abspath(path), content_version(checkpoint)
    if layout.plan.ranks() == 1:
        return Model(load_model(checkpoint, kind, place), tokenizer, None, source, version)
    from treadle.serve.parallel_runner import load_on_ranks

    ranks = load_on_ranks(path, spec, layout, kind, place.type)
    return Model(ranks.rank.module, tokenizer, ranks, source, version)


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the torch dtype that a name stands for; None and "auto" leave the choice to the checkpoint."""
    if dtype is None or dtype == "auto":
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        hint = nearest(str(dtype), DTYPES) or "; use float32, bfloat16, float16 or auto"
        raise UserError(f"unknown dtype '{dtype}'{hint}")
    return found


def encode_prompt(tokenizer: Tokenizer | None, vocabulary: int, prompt: str | Sequence[int] | Tensor) -> list[int]:
    """Return a prompt's token ids. Raises UserError where there are none, or one is not in the vocabulary."""
    if not isinstance(prompt, str):
        return token_ids(prompt, vocabulary)
    if tokenizer is None:
        raise UserError("the model has no tokenizer; give the prompt as token ids")
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise UserError("the prompt is empty; give at least one token")
    return tokens


def token_ids(tokens: Sequence[int] | Tensor, vocabulary: int) -> list[int]:
    """Return `tokens` as a list of int. Raises UserError where it is empty or one is outside the vocabulary."""
    values = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    try:
        ids = [operator.index(token) for token in values]
    except TypeError as error:
        raise UserError(f"token ids must be one list of whole numbers: {error}") from error
    if not ids:
        raise UserError("the list of tokens is empty; give at least one")
    for token in ids:
        if not 0 <= token < vocabulary:
            raise UserError(f"{token} is not a token id of this model; they lie in 0 to {vocabulary - 1}")
    return ids


def choose_device(device: torch.device | str | None) -> torch.device:
    """Return the device of that name, by default the accelerator, else the CPU. Raises UserError."""
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the device '{device}' cannot be used here ({reason}); leave it out or use cpu") from error
    return place


def _marks(module: Transformer) -> list[tuple[int, int]]:
    """Return what changes with the parameters: where they are, and how often each was written to in place."""
    return [(parameter.data_ptr(), parameter._version) for parameter in module.parameters()]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

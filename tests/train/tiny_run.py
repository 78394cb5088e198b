"""A tiny training run that saves and resumes, for the tests of checkpoints; also a program that saves all the time."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from treadle.model.context import PackedContext
from treadle.model.families import read_spec
from treadle.model.spec import ModelSpec
from treadle.model.tokenizer import Tokenizer
from treadle.model.transformer import Transformer
from treadle.train.checkpoints import (
    Checkpoint,
    CheckpointSettings,
    CheckpointWriter,
    Content,
    latest_good,
    lock_run,
)
from treadle.train.optimizers import (
    OptimizerSettings,
    build_optimizer,
    laid_out_like,
    load_named_state,
    named_state,
)

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def spec(**changes: Any) -> ModelSpec:
    return read_spec({**CONFIG, **changes})


def tokenizer() -> Tokenizer:
    return Tokenizer.train(["def main(): return 0", "the quick brown fox"] * 3, 280)


class TinyRun:
    """A model, its optimizer and a step count, on one process or sharded over `ranks`."""

    def __init__(self, optimizer: str = "adamw", ranks: int | None = None, model_spec: ModelSpec | None = None) -> None:
        self.model = Transformer(model_spec or spec())
        self.model.initialize(seed=1)
        if ranks is not None:
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = build_optimizer(OptimizerSettings(name=optimizer, lr=0.01), self.model.named_parameters())
        self.step = 0
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        """Take steps until `steps` are done; the data of a step depends on its number alone."""
        while self.step < steps:
            generator = torch.Generator().manual_seed(self.step)
            tokens = torch.randint(0, self.model.spec.vocabulary, (24,), generator=generator)
            loss, _ = self.model(tokens[:-1], PackedContext.of_lengths([10, 13]), tokens[1:])
            (loss / 23).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.step += 1

    def content(self, state: dict[str, Any] | None = None) -> Content:
        parameters = dict(self.model.named_parameters())
        return Content(
            self.step,
            self.model.spec,
            parameters,
            {"optimizer": named_state(self.optimizer, parameters.items())},
            state or {"counters": {"step": self.step}},
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        weights, parameters = checkpoint.weights(), dict(self.model.named_parameters())
        assert set(weights) == set(parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(laid_out_like(parameter, weights[name]))
        saved = checkpoint.tensors()
        load_named_state(self.optimizer, parameters.items(), saved, saved.__getitem__)
        self.step = checkpoint.state["counters"]["step"]

    def whole(self) -> dict[str, torch.Tensor]:
        """Return every parameter and the optimizer's state, whole."""
        everything = dict(self.model.named_parameters())
        everything |= named_state(self.optimizer, list(everything.items()))
        return {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
            for name, tensor in everything.items()
        }


def save_without_end(run: Path, say: Any) -> None:
    """Resume, then step and save at every step; `say` is told the step before it is visible and after."""
    with lock_run(run), CheckpointWriter(run, CheckpointSettings(keep_last=2)) as writer:
        tiny = TinyRun()
        checkpoint = latest_good(run)
        if checkpoint is not None:
            tiny.restore(checkpoint)
        say(f"resumed {tiny.step}")
        while True:
            tiny.train(tiny.step + 1)
            writer.save(tiny.content())
            say(f"completed {tiny.step - 1}")  # save() has waited for the one before
            assert math.isfinite(tiny.losses[-1])


if __name__ == "__main__":
    save_without_end(Path(sys.argv[1]), lambda text: print(text, flush=True))

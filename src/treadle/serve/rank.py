"""One rank's part of a parallel model: its weights, its cache, and how each command changes them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from treadle import ops
from treadle.model.layout import Layout
from treadle.model.parallel import lay_out
from treadle.model.spec import ModelSpec
from treadle.model.stages import Microbatch, ParallelModel
from treadle.model.transformer import Transformer
from treadle.parallel.mesh import Mesh
from treadle.serve import rank_commands as commands
from treadle.serve.adapters import AppliedAdapters, Terms
from treadle.serve.batch import LayerGroup, StepBatch, StepOutput, layer_groups
from treadle.serve.capacity import available_memory
from treadle.serve.kv_cache import KVCache, KVFormat
from treadle.serve.measure import activations
from treadle.serve.microbatches import cut_batch, microbatch_count
from treadle.serve.model import parse_dtype
from treadle.serve.paged import PagedContext
from treadle.serve.room import WEIGHTS_WAY_OUT, Reserve, check_room
from treadle.weights.adapter import open_adapter
from treadle.weights.load import load_model


def local_groups(layout: Layout) -> tuple[LayerGroup, ...]:
    """Return the layer groups of the whole model with the layers that a rank has, numbered as the rank numbers them.

    A group of which it has none stays, empty, so that each block table of a batch has its place.
    """
    first = layout.layers.start
    return tuple(
        LayerGroup(group.window, tuple(layer - first for layer in group.layers if layer in layout.layers))
        for group in layer_groups(layout.spec)
    )


class Rank:
    """Carries out commands. Commands that compute are called by one thread; `LoadWeights` may run beside them."""

    def __init__(self, mesh: Mesh, model: str, node_ranks: int) -> None:
        """`model` is the path that "" stands for, `node_ranks` how many ranks share this machine."""
        self.mesh, self.model, self.node_ranks, self.deterministic = mesh, model, node_ranks, False
        self.weights: dict[int, ParallelModel] = {}
        self.adapters: dict[int, Terms] = {}  # by slot
        self._applied: dict[int, AppliedAdapters] = {}  # by the number of the weights
        self.cache: KVCache | None = None
        self._tensor, self._pipeline = mesh.tensor_group(), mesh.pipeline_group()

    @property
    def module(self) -> Transformer:
        """This rank's part of the model, under the first of its weights."""
        return next(iter(self.weights.values())).module

    @property
    def layout(self) -> Layout:
        """This rank's place in the plan of the model."""
        layout = self.module.layout
        assert layout is not None
        return layout

    def run(self, command: commands.Command) -> Any:
        """Carry a command out and return what it gives: a StepOutput, or plain data."""
        match command:
            case commands.Step():
                return self.step(command)
            case commands.LoadWeights():
                return self.load(command)
            case commands.DropWeights():
                self.weights.pop(command.number, None)
                self._applied.pop(command.number, None)
            case commands.LoadAdapter():
                self.load_adapter(command)
            case commands.DropAdapter():
                self.adapters.pop(command.slot, None)
            case commands.Measure():
                return self.measure()
            case commands.MakeCache():
                self.make_cache(command)
            case commands.FreeCache():
                if self.cache is not None:
                    self.cache.release()
            case commands.Leave():
                pass
        return None

    @torch.inference_mode()
    def step(self, command: commands.Step) -> StepOutput:
        """Compute a step, with all other ranks. What it gives is on the first rank, elsewhere it is empty."""
        device, batch = self.mesh.device, command.batch
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)  # of this thread
        # Which rows an adapter is for is said once a step, so a step with adapters goes through the stages whole.
        parts = [batch] if batch.adapters else cut_batch(batch, microbatch_count(batch, self.mesh.plan.pp))
        model = self.weights[command.weights]
        if batch.adapters and command.weights not in self._applied:
            self._applied[command.weights] = AppliedAdapters(model.module, self.adapters)
        applied = self._applied[command.weights].to_rows(batch.adapters, batch.counts) if batch.adapters else None
        with ops.row_invariant(self.deterministic), applied or contextlib.nullcontext():
            logits, hidden = model(*map(self._microbatch, parts))
        return StepOutput(logits.float(), hidden.float())

    def _microbatch(self, batch: StepBatch) -> Microbatch:
        assert self.cache is not None, "there is no cache yet"
        context = PagedContext(self.cache, batch, self.mesh.device, self.deterministic)
        tokens = torch.tensor(batch.tokens, device=self.mesh.device)
        return Microbatch(tokens, context, context.rows, context.pooled)  # pyrefly: ignore[bad-argument-type]

    def measure(self) -> dict[str, float]:
        """Return `available` bytes of memory, and the `fixed` ones and those for `each` token that a step takes."""
        available = available_memory(self.mesh.device) // self._sharing
        measured = activations(self.module)
        return {"available": available, "fixed": measured.fixed, "each": measured.each}

    def load(self, command: commands.LoadWeights) -> dict[str, Any]:
        """Read this rank's part of a model. Returns how many parameters and bytes that were, and how many elements are
        `owned`: counted on one of the ranks that hold them, so that the ranks' sum is the whole. Raises UserError."""
        reports = []

        def lay(module: Transformer) -> None:
            self._check_same(module.spec)
            lay_out(module, Layout(module.spec, self.mesh.plan, self.mesh.rank), self._tensor)
            needed = sum(parameter.nbytes for parameter in module.parameters())
            self._check_room(f"this rank's part of {command.path}", needed, command.reserve, WEIGHTS_WAY_OUT)

        path = command.path or self.model
        module = load_model(path, parse_dtype(command.dtype), self.mesh.device, reports.append, lay)
        self.weights[command.number] = ParallelModel(module, self._pipeline)
        layout = module.layout
        assert layout is not None
        owned = sum(layout.owned(name, parameter.shape) for name, parameter in module.named_parameters())
        return {"parameters": reports[0].parameters, "bytes": reports[0].bytes_read, "owned": owned}

    def load_adapter(self, command: commands.LoadAdapter) -> None:
        """Read this rank's part of an adapter. Raises UserError."""
        module = self.module
        stored = open_adapter(Transformer(module.spec, device="meta"), command.path)
        needed = stored.elements() * module.dtype.itemsize
        self._check_room(f"the adapter {command.path}", needed, command.reserve, "remove another one")
        self.adapters[command.slot] = stored.terms(module)

    def _check_room(self, what: str, needed: int, reserve: Reserve, way_out: str) -> None:
        """Raise UserError where so many bytes do not fit beside the cache; at the start there is none."""
        if self.cache is not None:
            check_room(what, needed, self.cache, reserve, self._sharing, way_out)

    @property
    def _sharing(self) -> int:
        """How many ranks share this one's memory: those of its machine where the device is the host."""
        return self.node_ranks if self.mesh.device.type == "cpu" else 1

    def _check_same(self, spec: ModelSpec) -> None:
        """A cache that is there holds what was computed by a model of one shape."""
        if self.weights:
            assert self.layout.spec == spec, "other weights of the same model have the same shape"

    def make_cache(self, command: commands.MakeCache) -> None:
        """Make the cache, in place of one that is there."""
        self.deterministic = command.deterministic
        if self._tensor is not None:
            self._tensor.ordered = command.deterministic
        format = KVFormat.of(command.format, self.module.dtype, self.mesh.device)
        self.cache = KVCache(
            self.layout.local,
            local_groups(self.layout),
            command.blocks,
            command.block_size,
            format,
            self.mesh.device,
        )

"""The weight ledger: every tensor of a checkpoint is consumed exactly once, every parameter written, tied or declared.

`settle` draws up the account before anything is read, from names and shapes alone; `Ledger` closes it afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.config import UserError
from treadle.config.progress import amount_text
from treadle.model.families import family_of
from treadle.model.families.base import Family
from treadle.model.spec import ModelSpec
from treadle.model.transformer import Transformer
from treadle.weights.checkpoint import Checkpoint, Stored

SHOWN = 4  # names in one message; the count says how many there are


@dataclass(frozen=True)
class LoadReport:
    """What a load did. `str()` of it is what --verbose prints."""

    path: str
    family: str
    parameters: int
    tensors: int
    bytes_read: int
    stored_as: Mapping[str, int]  # how many tensors of each stored dtype
    dtype: torch.dtype
    tied: str  # how the head gets its weight where it has none of its own
    unused: tuple[str, ...]  # declared by the family: the model does not read them
    seconds: float = 0.0
    rank: str = ""  # whose part of the model it is, where it is not all

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.stored_as.items())
        where = f" on {self.rank}" if self.rank else ""
        lines = [
            f"{self.path}: {self.family}, {amount_text(self.parameters, '')} parameters{where}",
            f"  {self.tensors} tensors ({kinds}), {amount_text(self.bytes_read, 'B')}, each consumed once, "
            f"in {self.seconds:.2f} s",
            f"  computed in {str(self.dtype).removeprefix('torch.')}",
        ]
        if self.tied:
            lines.append(f"  {self.tied}")
        if self.unused:
            lines.append(f"  {len(self.unused)} tensors that the model does not read: {_some(self.unused)}")
        return "\n".join(lines)


class Ledger:
    """Which tensor fills which parameter, in the order in which the tensors lie on disk, and which are done."""

    def __init__(self, sources: Mapping[str, Stored], report: LoadReport) -> None:
        self.sources, self._report = sources, report
        self._written: Counter[str] = Counter()

    def part(self, shards: Mapping[str, Tensor], rank: str) -> Ledger:
        """Return the ledger of one rank's part of the model: `shards` are its parameters, by name.

        Bytes are counted as the shards' share of the tensors that are read.
        """
        unknown = set(shards) - set(self.sources)
        assert not unknown, f"no tensor for {sorted(unknown)}"
        sources = {name: stored for name, stored in self.sources.items() if name in shards}
        shares = {name: shards[name].numel() / math.prod(stored.shape) for name, stored in sources.items()}
        report = dataclasses.replace(
            self._report,
            parameters=sum(shard.numel() for shard in shards.values()),
            tensors=len(sources),
            bytes_read=round(sum(stored.nbytes * min(1.0, shares[name]) for name, stored in sources.items())),
            stored_as=dict(Counter(stored.stored_as for stored in sources.values())),
            rank=rank,
        )
        return Ledger(sources, report)

    def written(self, parameter: str) -> None:
        """Enter that a parameter was filled from its tensor."""
        self._written[parameter] += 1

    def close(self, seconds: float) -> LoadReport:
        """Return the report; asserts that each parameter was written once."""
        wrong = {name for name in {*self.sources, *self._written} if self._written[name] != 1}
        assert not wrong, f"parameters not written exactly once: {sorted(wrong)}"
        return dataclasses.replace(self._report, seconds=seconds)


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by our names, in the model's order."""
    model = Transformer(spec, device="meta")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def settle(checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> Ledger:
    """Return which tensor of the checkpoint fills which parameter.

    Raises UserError naming the tensors that are missing, unexpected, of a wrong shape or dtype, or there twice.
    """
    family = family_of(checkpoint.config)
    names, shapes = family.names(spec), parameter_shapes(spec)
    assert set(names) == set(shapes), f"{family.model_type}: names and parameters differ: {set(names) ^ set(shapes)}"
    held, unused = _by_name(checkpoint, family)
    head = family.names(dataclasses.replace(spec, tied=False))["head.weight"]
    tied = _settle_head(held, names, head, checkpoint) if spec.tied else ""
    problems = _compare(held, names, shapes, head)
    if problems:
        raise UserError(f"{checkpoint.path} is not the {family.model_type} model of its config.json: {problems}")
    places = {stored.name: place for place, stored in enumerate(checkpoint.tensors)}
    sources = dict(sorted(((o, held[t]) for o, t in names.items()), key=lambda pair: places[pair[1].name]))
    for stored in sources.values():
        if not stored.dtype.is_floating_point:
            raise UserError(
                f"{checkpoint.path}: tensor '{stored.name}' is of dtype {stored.stored_as}, which is not supported; "
                "use a version of the model in float32, bfloat16 or float16"
            )
    report = LoadReport(
        path=str(checkpoint.path),
        family=spec.family,
        parameters=spec.parameters_count(),
        tensors=len(checkpoint.tensors) - len(unused),
        bytes_read=sum(stored.nbytes for stored in sources.values()),
        stored_as=dict(Counter(stored.stored_as for stored in sources.values())),
        dtype=dtype,
        tied=tied,
        unused=unused,
    )
    return Ledger(sources, report)


def _by_name(checkpoint: Checkpoint, family: Family) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """Return the tensors by the names that the family uses, and the names of those that it declares unused."""
    held: dict[str, Stored] = {}
    unused = []
    # Saved without its language-model head, a checkpoint's names lack the prefix that tells the two apart.
    bare = any(stored.name == "embed_tokens.weight" for stored in checkpoint.tensors)
    for stored in checkpoint.tensors:
        if family.unused.fullmatch(stored.name):
            unused.append(stored.name)
            continue
        name = family.renamed(stored.name)
        if bare and name.startswith(("embed_tokens.", "layers.", "norm.")):
            name = f"model.{name}"
        if name in held:
            first = held[name]
            raise UserError(
                f"{checkpoint.path} holds tensor '{name}' twice, in {first.file} as '{first.name}' and in "
                f"{stored.file} as '{stored.name}'; download the model again"
            )
        held[name] = stored
    return held, tuple(unused)


def _settle_head(held: dict[str, Stored], names: Mapping[str, str], head: str, checkpoint: Checkpoint) -> str:
    """Of a tied model consume a head that is stored all the same, which must then equal the embedding, or stand in for
    it. Returns what to report. Raises UserError where the two differ: one of them would be lost."""
    embedding = names["embedding.weight"]
    if head not in held:
        return f"the head shares the weight of {embedding}"
    if embedding not in held:
        held[embedding] = held.pop(head)
        return f"the embedding and the head share {head}"
    stored, other = held[head], held[embedding]
    if stored.shape != other.shape or not torch.equal(stored.read(), other.read()):
        raise UserError(
            f"{checkpoint.path}: config.json ties the head to the embedding (tie_word_embeddings), but '{stored.name}' "
            f"and '{other.name}' differ; set tie_word_embeddings to false to keep both, or remove '{stored.name}'"
        )
    held.pop(head)
    return f"the head shares the weight of {embedding}; {head} is stored too, and equal"


def _compare(
    held: Mapping[str, Stored], names: Mapping[str, str], shapes: Mapping[str, Sequence[int]], head: str
) -> str:
    problems = []
    if missing := [name for name in names.values() if name not in held]:
        hint = "; a tied model needs tie_word_embeddings true in config.json" if missing == [head] else ""
        problems.append(f"{_counted(missing, 'tensor')} missing ({_some(missing)}{hint})")
    if unexpected := sorted(set(held) - set(names.values())):
        problems.append(f"{_counted(unexpected, 'tensor')} unexpected ({_some(unexpected)})")
    wrong = [
        f"{theirs}: {list(held[theirs].shape)} instead of {list(shapes[ours])}"
        for ours, theirs in names.items()
        if theirs in held and held[theirs].shape != tuple(shapes[ours])
    ]
    if wrong:
        problems.append(f"{_counted(wrong, 'tensor')} of a wrong shape ({_some(wrong)})")
    return "; ".join(problems)


def _counted(names: Sequence[str], noun: str) -> str:
    return f"{len(names)} {noun}{'s are' if len(names) > 1 else ' is'}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more

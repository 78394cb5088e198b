"""Pipeline parallelism: how layers are cut into stages, and the hidden states' way from one to the next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def split_layers(costs: Sequence[int], stages: int, first: int = 0, last: int = 0) -> list[range]:
    """Return the layers of each stage: contiguous, at least one, so that the costliest stage costs the least possible.

    `costs` are the layers', `first` and `last` what the first and the last stage have beside layers. Among the best
    splits it is the one whose early stages are full. Raises ValueError for more stages than layers.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} stages")
    sums = [0, *itertools.accumulate(costs)]

    def cost(stage: int, begin: int, end: int) -> int:
        return sums[end] - sums[begin] + first * (stage == 0) + last * (stage == stages - 1)

    # best[s][b]: the least possible cost of the costliest stage where stages s and later hold the layers from b on.
    best = [[0] * (len(costs) + 1) for _ in range(stages)]
    choice = [[0] * (len(costs) + 1) for _ in range(stages)]
    for stage in reversed(range(stages)):
        for begin in range(stage, len(costs) - (stages - 1 - stage)):
            ends = [len(costs)] if stage == stages - 1 else range(len(costs) - (stages - 1 - stage), begin, -1)
            worst = {
                end: max(cost(stage, begin, end), best[stage + 1][end] if stage < stages - 1 else 0) for end in ends
            }
            choice[stage][begin] = min(worst, key=worst.__getitem__)
            best[stage][begin] = worst[choice[stage][begin]]
    found, begin = [], 0
    for stage in range(stages):
        found.append(range(begin, choice[stage][begin]))
        begin = found[-1].stop
    return found


class PipelineGroup:
    """The ranks that hold the stages of one model, and this one's stage among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.stage, self.stages = group.rank(), group.size()

    def send(self, x: Tensor, stage: int) -> None:
        """Send a tensor to a stage, which must know its shape and dtype. What has no elements is not sent."""
        self.start_send(x, stage).wait()

    def receive(self, x: Tensor, stage: int) -> Tensor:
        """Fill `x` with what a stage sends, and return it."""
        return self.start_receive(x, stage).wait()

    def start_send(self, x: Tensor, stage: int, number: int = 0) -> Transfer:
        """Begin to send a tensor; several at once to one stage have numbers of their own, the same on both sides."""
        x = x.contiguous()
        return Transfer(x, dist.isend(x, group=self.group, tag=number, group_dst=stage) if x.numel() else None)

    def start_receive(self, x: Tensor, stage: int, number: int = 0) -> Transfer:
        """Begin to receive a tensor into `x`."""
        return Transfer(x, dist.irecv(x, group=self.group, tag=number, group_src=stage) if x.numel() else None)


class Transfer:
    """A tensor on its way, which is kept until it has arrived."""

    def __init__(self, x: Tensor, work: dist.Work | None) -> None:
        self._x, self._work = x, work

    def wait(self) -> Tensor:
        """Return the tensor once it has arrived, or was taken from here."""
        if self._work is not None:
            self._work.wait()
        return self._x

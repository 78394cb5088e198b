"""What is asked and when: lengths, prompts, arrivals. The same seed asks every server for the same."""

from __future__ import annotations

import argparse
import itertools
import random
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# About one token each in the usual vocabularies.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body back parent "
    "face level office door health person art war history party result change morning reason research girl guy moment"
).split()
LONGEST = 1 << 20


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: fixed:N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MOST]."""

    kind: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read the written form. Raises argparse's error, so that it can be a type of an option."""
        kind, _, rest = text.partition(":")
        counts = {"fixed": (1,), "uniform": (2,), "lognormal": (2, 3)}
        try:
            values = tuple(float(value) for value in rest.split(","))
        except ValueError:
            values = ()
        if len(values) not in counts.get(kind, ()) or not all(0 <= value <= LONGEST for value in values):
            raise argparse.ArgumentTypeError(
                f"'{text}' is not fixed:N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MOST]"
            )
        if kind == "uniform" and values[0] > values[1]:
            raise argparse.ArgumentTypeError(f"'{text}': the low end is above the high one")
        return cls(kind, values)

    def draw(self, dice: random.Random) -> int:
        """Return one length, 1 at least."""
        if self.kind == "fixed":
            return max(1, round(self.values[0]))
        if self.kind == "uniform":
            return max(1, dice.randint(round(self.values[0]), round(self.values[1])))
        most = self.values[2] if len(self.values) > 2 else LONGEST
        return max(1, round(min(most, self.values[0] * dice.lognormvariate(0, self.values[1]))))

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(f'{value:g}' for value in self.values)}"


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: str
    answer_tokens: int


@dataclass(frozen=True)
class Load:
    """How requests come: a Poisson process of `rate` a second, or `clients` that ask again when they are answered."""

    rate: float = 0.0
    clients: int = 0

    @property
    def level(self) -> float:
        return self.rate or self.clients

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate else f"{self.clients} clients"


def asks(prompt: Lengths, answer: Lengths, seed: str) -> Iterator[Ask]:
    """Yield requests without end. No two prompts begin alike, so no prefix cache helps."""
    dice = random.Random(seed)
    for number in itertools.count():
        words = [dice.choice(WORDS) for _ in range(prompt.draw(dice))]
        words[0] = f"{dice.choice(WORDS)}{number}" if len(words) > 2 else words[0]
        yield Ask(" ".join(words), answer.draw(dice))


def arrivals(load: Load, count: int, seed: str) -> list[float]:
    """Return when each of `count` requests comes, in seconds from the start; zeros for a closed loop."""
    if not load.rate:
        return [0.0] * count
    dice = random.Random(seed)
    return list(itertools.accumulate(dice.expovariate(load.rate) for _ in range(count)))


def read_workload(file: Path, name: str) -> tuple[Load, Lengths, Lengths]:
    """Return a workload of the peers' file: so many sequences at once, of so many words, with so many new tokens."""
    if not file.is_file():
        raise SystemExit(f"{file} is not there; give the file with --workloads")
    workloads = runpy.run_path(str(file)).get("WORKLOADS", {})
    if name not in workloads:
        raise SystemExit(f"{file} has no workload '{name}'; it has {', '.join(workloads)}")
    sequences, words, new = workloads[name]
    return Load(clients=sequences), Lengths("fixed", (words,)), Lengths("fixed", (new,))

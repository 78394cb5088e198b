"""An engine that gives the answers it was told to, in the pieces it was told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.model.spec import ModelSpec
from treadle.model.tokenizer import Tokenizer
from treadle.serve.capacity import Capacity
from treadle.serve.interface import EngineInterface, Prepared, Ticket
from treadle.serve.request import Delta, FinishReason
from treadle.serve.stats import EngineStats


class ScriptedEngine(EngineInterface):
    """Answers every prompt with `pieces`; `asked` is what it was given."""

    stats = EngineStats()  # pyrefly: ignore
    failure = unhealthy = weight_version = ""  # pyrefly: ignore
    pending = 0  # pyrefly: ignore

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        pieces: Sequence[str],
        reason: FinishReason = FinishReason.STOP,
        **last: Any,
    ) -> None:
        super().__init__(tokenizer, spec, 4096)
        self.capacity = Capacity(4, 4096, (1024,), 16, 1 << 20, 1 << 20)
        self.pieces, self.reason, self.last = list(pieces), reason, last
        self.asked: list[Prepared] = []

    def hand_over(self, prepared: Prepared, deliver: Callable[[Delta], None]) -> Ticket:
        self.asked.append(prepared)
        for index in range(prepared.settings.n):
            for number, piece in enumerate(self.pieces):
                last = number == len(self.pieces) - 1
                deliver(
                    Delta(
                        index, piece, (number,),
                        finish_reason=self.reason if last else None,
                        prompt_tokens=len(prepared.tokens), completion_tokens=number + 1,
                        **(self.last if last else {}),
                    )
                )  # fmt: skip
        return _Ticket()

    def command(self, name: str, /, **arguments: Any) -> Any:
        raise NotImplementedError

    def close(self, timeout: float = 0.0) -> None:
        pass

    def prompt(self, number: int = -1) -> str:
        """Return the text of a prompt that was asked."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(self.asked[number].tokens, skip_special_tokens=False)


class _Ticket(Ticket):
    prompt_tokens = 0

    def cancel(self) -> None:
        pass

"""A run's checkpoints: what of its state goes into one, and how it comes back."""

from __future__ import annotations

from pathlib import Path

from treadle.model.tokenizer import Tokenizer
from treadle.parallel.collectives import from_first, together
from treadle.parallel.shard import fill
from treadle.train.checkpoints import CheckpointSettings, CheckpointWriter, Content, check_same_model, latest_good
from treadle.train.checkpoints.reader import Checkpoint, open_checkpoint
from treadle.train.optimizers import load_named_state
from treadle.train.state import TrainState


class Keeper:
    """Saves and restores the state of the run in `run`; every rank calls each method at the same step."""

    def __init__(self, run: Path, settings: CheckpointSettings, tokenizer: Tokenizer) -> None:
        self.run, self.settings, self.tokenizer = run, settings, tokenizer
        self.writer = CheckpointWriter(run, settings)

    def restore(self, state: TrainState) -> bool:
        """Put the newest good checkpoint into `state`; False where there is none. Raises UserError.

        Rank 0 looks for it and compares checksums; the others read what it found.
        """

        def find() -> Checkpoint | None:
            return latest_good(self.run, self.settings.verify) if self.writer.first else None

        checkpoint = together(find)
        path = from_first(str(checkpoint.path) if checkpoint else "")
        if not path:
            return False

        def put() -> None:
            found = checkpoint or open_checkpoint(path, checksums=False)
            check_same_model(found, state.model.spec, self.tokenizer.fingerprint)
            weights, optimizer = found.weights(), found.tensors("optimizer")
            fill(state.model, ((name, weights[name]) for name in weights))
            state.optimizer.state.clear()
            load_named_state(state.optimizer, state.model.named_parameters(), optimizer, optimizer.__getitem__)
            state.load_scalars(dict(found.state["run"]))

        together(put)
        self.writer.last_step = state.counters.step
        return True

    def save(self, state: TrainState, wait: bool = False) -> None:
        """Begin to save `state`, or, with `wait`, save it. Raises TreadleError on every rank where that fails."""
        content = Content(
            step=state.counters.step,
            spec=state.model.spec,
            weights=state.parameters(),
            tensors={"optimizer": state.optimizer_tensors()},
            state={"run": state.scalars()},
            tokenizer=self.tokenizer,
        )
        self.writer.save(content, wait)

    def finish(self) -> None:
        """Return when what was begun is saved. Raises TreadleError on every rank where that failed."""
        together(self.writer.close)

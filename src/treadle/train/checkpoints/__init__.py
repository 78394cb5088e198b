"""Checkpoints: each is a Hugging Face model directory, with what a run needs to go on beside it.

run/checkpoints/step-00000100/
    config.json, model*.safetensors, tokenizer files     the model, as Transformers, vLLM and Treadle load it
    training/optimizer.safetensors                       <parameter name>/<key>, whole tensors
    training/state.json                                  counters, plan, versions, fingerprints
    training/manifest.json                               size and SHA-256 of every other file, written last
"""

from treadle.train.checkpoints.format import DamagedCheckpoint
from treadle.train.checkpoints.lock import lock_run
from treadle.train.checkpoints.reader import Checkpoint, check_same_model, latest_good, open_checkpoint
from treadle.train.checkpoints.writer import CheckpointSettings, CheckpointWriter, Content, SaveReport

__all__ = [
    "Checkpoint",
    "CheckpointSettings",
    "CheckpointWriter",
    "Content",
    "DamagedCheckpoint",
    "SaveReport",
    "check_same_model",
    "latest_good",
    "lock_run",
    "open_checkpoint",
]

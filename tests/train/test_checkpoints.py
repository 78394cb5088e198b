"""Checkpoints: what a folder holds, that any damage is seen, and that a run goes on from it bit for bit."""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tiny_run import CONFIG, TinyRun, spec, tokenizer
from treadle.config import TreadleError, UserError
from treadle.train.checkpoints import (
    CheckpointSettings,
    CheckpointWriter,
    DamagedCheckpoint,
    check_same_model,
    latest_good,
    open_checkpoint,
)
from treadle.train.checkpoints import writer as writer_module

BLOCKING = CheckpointSettings(asynchronous=False, keep_last=10)


def save(run: Path, tiny: TinyRun, settings: CheckpointSettings = BLOCKING) -> Path:
    with CheckpointWriter(run, settings) as writer:
        writer.save(tiny.content())
    return run / "checkpoints" / f"step-{tiny.step:08d}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with everything in it, not to be changed."""
    run = tmp_path_factory.mktemp("saved")
    tiny = TinyRun()
    tiny.train(2)
    with CheckpointWriter(run, BLOCKING) as writer:
        writer.save(writer_module.Content(**{**vars(tiny.content()), "tokenizer": tokenizer()}))
    return run / "checkpoints" / "step-00000002"


def test_transformers_loads_the_folder_as_it_is(saved: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    weights = open_checkpoint(saved).weights()
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, weights["layers.1.mlp.up.weight"])
    text = "def main(): the fox"
    assert AutoTokenizer.from_pretrained(saved)(text)["input_ids"] == tokenizer().encode(text)


def test_latest_points_at_the_newest(saved: Path) -> None:
    assert (saved.parent / "latest").resolve() == saved.resolve()
    assert open_checkpoint(saved.parent / "latest").step == 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_half_and_resume_equal_the_whole_bit_for_bit(tmp_path: Path, optimizer: str, asynchronous: bool) -> None:
    straight = TinyRun(optimizer)
    straight.train(8)
    first = TinyRun(optimizer)
    first.train(4)
    with CheckpointWriter(tmp_path, CheckpointSettings(asynchronous=asynchronous)) as writer:
        writer.save(first.content())
        first.train(6)  # goes on at once: the checkpoint must hold step 4 all the same
    second = TinyRun(optimizer)
    checkpoint = latest_good(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 4
    second.restore(checkpoint)
    second.train(8)
    assert second.losses == straight.losses[4:]
    for name, tensor in straight.whole().items():
        assert torch.equal(second.whole()[name], tensor), name


def train_and_save(run: Path, ranks: int, steps: int) -> list[float]:
    tiny = TinyRun(ranks=ranks)
    checkpoint = latest_good(run)
    if checkpoint is not None:
        tiny.restore(checkpoint)
    tiny.train(steps)
    with CheckpointWriter(run, BLOCKING) as writer:
        writer.save(tiny.content())
    return tiny.losses


def restored(run: Path, step: int, ranks: int | None) -> dict[str, torch.Tensor]:
    tiny = TinyRun(ranks=ranks)
    tiny.restore(open_checkpoint(run / "checkpoints" / f"step-{step:08d}"))
    return tiny.whole()


def restored_equals(run: Path, step: int, ranks: int, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in restored(run, step, ranks).items():
        assert torch.equal(tensor, expected[name]), name


def test_any_number_of_ranks_restores_what_any_other_saved(tmp_path: Path, ranks: Callable) -> None:
    straight = ranks(2).run(train_and_save, tmp_path / "straight", 2, 6)
    ranks(2).run(train_and_save, tmp_path / "parts", 2, 3)
    resumed = ranks(2).run(train_and_save, tmp_path / "parts", 2, 6)
    assert [losses[3:] for losses in straight] == resumed  # the same layout: the same bits
    one = restored(tmp_path / "straight", 6, None)
    for name, tensor in restored(tmp_path / "parts", 6, None).items():
        assert torch.equal(tensor, one[name]), name
    ranks(3).run(restored_equals, tmp_path / "straight", 6, 3, one)
    train_and_save_alone = TinyRun()
    train_and_save_alone.train(2)
    save(tmp_path / "alone", train_and_save_alone)
    ranks(3).run(restored_equals, tmp_path / "alone", 2, 3, train_and_save_alone.whole())


def fails_on_every_rank(run: Path, expected: str) -> None:
    tiny = TinyRun(ranks=2)
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)

    def full(*arguments: object, **options: object) -> None:
        raise TreadleError(expected)

    original, writer_module.save_model = writer_module.save_model, full
    try:
        with pytest.raises(TreadleError, match=expected):
            CheckpointWriter(run, BLOCKING).save(tiny.content())
    finally:
        writer_module.save_model = original


def test_an_error_of_the_writing_rank_ends_all_ranks(tmp_path: Path, ranks: Callable) -> None:
    ranks(2).run(fails_on_every_rank, tmp_path, "the disk is full")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_every_file_is_watched(saved: Path, tmp_path: Path) -> None:
    assert {"config.json", "model.safetensors", "training/optimizer.safetensors"} < set(files(saved))
    for name in files(saved):
        for harm in ("removed", "cut", "longer", "flipped"):
            copy = tmp_path / f"{name.replace('/', '-')}-{harm}"
            shutil.copytree(saved, copy)
            content = (copy / name).read_bytes()
            if harm == "removed":
                (copy / name).unlink()
            elif harm == "cut":
                (copy / name).write_bytes(content[:-1])
            elif harm == "longer":
                (copy / name).write_bytes(content + b"\n")
            else:
                for place in sorted({0, len(content) // 3, len(content) // 2, len(content) - 1}):
                    (copy / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
                    with pytest.raises(DamagedCheckpoint):
                        open_checkpoint(copy)
            with pytest.raises(DamagedCheckpoint, match=name):
                open_checkpoint(copy)
            shutil.rmtree(copy)


def test_a_file_that_the_disk_does_not_give_back_is_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    whole = Path.open

    def broken(path: Path, *mode: Any, **options: Any) -> Any:
        return Broken() if path.name == "model.safetensors" else whole(path, *mode, **options)

    monkeypatch.setattr(Path, "open", broken)
    with pytest.raises(DamagedCheckpoint, match=r"damaged: model\.safetensors cannot be read \(Input/output error\)"):
        open_checkpoint(saved)


def test_a_manifest_cannot_lead_out_of_its_folder(saved: Path, tmp_path: Path) -> None:
    from treadle.train.checkpoints.format import _manifest_bytes

    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    body = {"format": 1, "step": 2, "files": {"../../secret": {"size": 1, "sha256": ""}}}
    (copy / "training" / "manifest.json").write_bytes(_manifest_bytes(body))
    with pytest.raises(UserError, match="leads out of"):
        open_checkpoint(copy)
    for files in ([], {"config.json": 3}, {"config.json": {"size": 1}}, None):
        (copy / "training" / "manifest.json").write_bytes(_manifest_bytes({**body, "files": files}))
        with pytest.raises(DamagedCheckpoint):
            open_checkpoint(copy)


def test_a_damaged_newest_is_named_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = TinyRun()
    for step in (1, 2, 3):
        tiny.train(step)
        save(tmp_path, tiny)
    folder = tmp_path / "checkpoints"
    weights = folder / "step-00000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    (folder / "step-00000002" / "training" / "manifest.json").unlink()
    found = latest_good(tmp_path)
    assert found is not None
    assert found.step == 1
    words = capsys.readouterr().err
    assert "step-00000003 is damaged: model.safetensors has" in words
    assert "step-00000002 is no whole checkpoint" in words
    assert "using step-00000001" in words
    (folder / "step-00000001" / "config.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole .*config\.json is missing.* start over"):
        latest_good(tmp_path)


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert latest_good(tmp_path) is None
    (tmp_path / "checkpoints" / ".step-00000001.4.tmp").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert latest_good(tmp_path) is None


def test_a_damaged_checkpoint_of_the_same_step_makes_way(tmp_path: Path) -> None:
    tiny = TinyRun()
    tiny.train(1)
    path = save(tmp_path, tiny)
    (path / "config.json").write_text("{}")
    save(tmp_path, tiny)
    assert open_checkpoint(path).step == 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["latest", "step-00000001"]


def test_the_same_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(writer_module, "write_checkpoint", lambda folder, content: written.append(content.step))
    tiny = TinyRun()
    with CheckpointWriter(tmp_path, BLOCKING) as writer:
        writer.save(tiny.content())
        writer.save(tiny.content(), wait=True)
        tiny.train(1)
        writer.save(tiny.content())
    assert written == [0, 1]


def test_a_full_disk_fails_the_next_step_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    tiny = TinyRun()
    save(tmp_path, tiny)
    tiny.train(1)
    monkeypatch.setattr("os.fsync", full)
    writer = CheckpointWriter(tmp_path, CheckpointSettings())
    writer.save(tiny.content())
    assert writer._thread is not None
    writer._thread.join()
    with pytest.raises(TreadleError, match=r"disk is full: could not write .*step-00000001; free some space"):
        writer.check()
    writer.check()  # said once
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000000"]
    writer.save(tiny.content(), wait=True)  # once there is space again, the same step can be saved
    assert latest_good(tmp_path).step == 1  # pyrefly: ignore


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, order = threading.Event(), []

    def slow(folder: Path, content: writer_module.Content) -> None:
        gate.wait(10)
        order.append(content.step)

    monkeypatch.setattr(writer_module, "write_checkpoint", slow)
    tiny = TinyRun()
    with CheckpointWriter(tmp_path, CheckpointSettings()) as writer:
        writer.save(tiny.content())
        tiny.train(1)
        assert order == []
        threading.Timer(0.05, gate.set).start()
        report = writer.save(tiny.content())
        assert order[:1] == [0]
        assert 0 < report.waited_seconds <= report.seconds
        assert report.bytes == sum(tensor.nbytes for tensor in tiny.whole().values())
    assert order == [0, 1]


def test_an_error_at_the_end_does_not_hide_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(folder: Path, content: writer_module.Content) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(writer_module, "write_checkpoint", broken)
    with pytest.raises(KeyError, match="first"), CheckpointWriter(tmp_path, CheckpointSettings()) as writer:
        writer.save(TinyRun().content())
        raise KeyError("first")
    assert "could not write" in capsys.readouterr().err
    with pytest.raises(TreadleError, match=r"could not write .*step-00000000: ValueError: odd"):
        save(tmp_path, TinyRun(), CheckpointSettings())


def test_another_model_is_refused_by_its_keys(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    check_same_model(checkpoint, spec(), tokenizer().fingerprint)
    check_same_model(checkpoint, spec(torch_dtype="bfloat16", use_cache=False))
    with pytest.raises(UserError, match="another model") as caught:
        check_same_model(checkpoint, spec(hidden_size=32, rms_norm_eps=1e-6))
    assert "hidden_size 16 there, 32 here, rms_norm_eps 1e-05 there, 1e-06 here" in str(caught.value)
    with pytest.raises(UserError, match="another tokenizer"):
        check_same_model(checkpoint, spec(), "0" * 64)


def test_state_is_plain_json_and_exact(tmp_path: Path) -> None:
    tiny = TinyRun()
    state = {"counters": {"step": 0, "seconds": 0.1 + 0.2}, "list": [1e-323, 2**63], "none": None}
    with CheckpointWriter(tmp_path, CheckpointSettings()) as writer:
        writer.save(tiny.content(state))
        state["list"].append(4)  # later steps change what the snapshot has seen
    found = latest_good(tmp_path)
    assert found is not None
    assert {key: found.state[key] for key in state} == {**state, "list": [1e-323, 2**63]}
    assert found.state["versions"]["torch"] == torch.__version__
    json.loads((found.path / "training" / "state.json").read_text())


def test_nothing_is_pickled(saved: Path) -> None:
    for name in files(saved):
        content = (saved / name).read_bytes()
        if name.endswith(".safetensors"):
            assert json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        elif name.endswith(".json"):
            json.loads(content)
        else:
            assert name == "chat_template.jinja"


def test_config_is_the_one_that_the_model_was_made_of(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    assert {key: config[key] for key in CONFIG} == CONFIG

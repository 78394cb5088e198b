"""The native library: loading, variants, threads, forks, the end of the process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from treadle.config import UserError
from treadle.ops import gated_activation, native, rms_norm

needs_native = pytest.mark.skipif(bool(native.missing()), reason="there is no compiler, so there is no native library")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process."""
    command = [sys.executable, "-X", "faulthandler", "-W", "error::DeprecationWarning:treadle", "-c", code]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TREADLE_")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**variables, **environment})


def test_the_library_is_built_where_there_is_a_compiler() -> None:
    if shutil.which(os.environ.get("CXX", "c++")):
        assert native.missing() == "", "run `make native`"
        assert native.variant() in native.runnable() and native.runnable()[-1] == "baseline"


@needs_native
def test_the_variants_follow_the_processor() -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    wide = {"avx512_bf16", "avx512_vnni"} <= set(flags.split())
    if wide and "avx_vnni" in flags.split():
        assert native.runnable() == ["avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "baseline"]
    elif wide:
        assert native.runnable() == ["avx512_bf16", "avx512_vnni", "avx512", "avx2", "baseline"]
    elif "avx2" in flags.split():
        assert "avx2" in native.runnable()


@needs_native
def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(UserError, match=r"did you mean 'avx2'|this processor runs"):
        native.select("avx3")


@needs_native
def test_the_environment_names_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.variant()
    try:
        native._load.cache_clear()
        monkeypatch.setenv("TREADLE_ISA", "baseline")
        assert native.variant() == "baseline"
        native._load.cache_clear()
        monkeypatch.setenv("TREADLE_ISA", "mmx")
        with pytest.raises(UserError, match="no native variant 'mmx' runs here"):
            native.variant()
    finally:
        monkeypatch.undo()
        native._load.cache_clear()
        native.select(before)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 63, 3000])
def test_every_number_of_threads_gives_the_same(threads: int, rows: int) -> None:
    x, up, weight = torch.randn(rows, 96), torch.randn(rows, 96), torch.randn(96)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = rms_norm(x, weight, 1e-6), gated_activation(x, up, "silu")
        torch.set_num_threads(threads)
        for _ in range(20):
            assert torch.equal(rms_norm(x, weight, 1e-6), expected[0])
            assert torch.equal(gated_activation(x, up, "silu"), expected[1])
    finally:
        torch.set_num_threads(before)


@needs_native
def test_several_python_threads_at_once() -> None:
    """The pool serves one caller at a time; the others work alone, and nobody gets another's rows."""
    weight, wrong = torch.randn(64), []

    def work(seed: int) -> None:
        x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(seed))
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
        for _ in range(40):
            if not torch.allclose(rms_norm(x, weight, 1e-6), expected, atol=1e-5):
                wrong.append(seed)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.set_num_threads(before)
    assert not wrong and not any(thread.is_alive() for thread in threads)


# In the child nothing of PyTorch runs in parallel: its own thread pool (OpenMP) does not survive a fork.
FORK = """
import os, torch
from treadle.ops import rms_norm
torch.set_num_threads(4)
x, w = torch.randn(4000, 64), torch.ones(64)
norm = lambda: rms_norm(x, w, 1e-6).numpy().tobytes()
expected = norm()
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if all(norm() == expected for _ in range(10)) else 3)
    assert norm() == expected
    assert os.waitpid(child, 0)[1] == 0
print("ended well")
"""


@needs_native
def test_a_forked_child_makes_its_own_threads() -> None:
    result = python(FORK)
    assert (result.returncode, result.stdout) == (0, "ended well\n"), result.stderr


# The library is called without PyTorch's dispatcher, which does not let a daemon thread end in the middle of a call.
THREAD_AT_EXIT = """
import threading, torch
from treadle.ops.native import abi
x, up, out = torch.randn(3, 4000, 64)
rows = [abi.dense_rows(part) for part in (x, up, out)]
arguments = abi.GatedActivation(0, 0, 64, *rows, *[abi.NO_ROWS] * 3)
function, started = abi.function("gated_activation"), threading.Event()
def forever():
    while True:
        function(arguments, 4000, 4)
        started.set()
threading.Thread(target=forever, daemon=True).start()
started.wait()
"""


@needs_native
def test_the_process_ends_while_kernels_run() -> None:
    result = python(THREAD_AT_EXIT)
    assert (result.returncode, result.stderr) == (0, "")


IDLE = """
import resource, time, torch
from treadle.ops import rms_norm
torch.set_num_threads(3)
x, w = torch.randn(4000, 64), torch.ones(64)
rms_norm(x, w, 1e-6)
time.sleep(0.05)
before = resource.getrusage(resource.RUSAGE_SELF)
time.sleep(0.5)
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""


@needs_native
def test_nothing_spins_when_there_is_nothing_to_do() -> None:
    # PyTorch's own threads are kept out of it: they are never started, since no PyTorch operator runs in parallel here.
    assert float(python(IDLE).stdout) < 0.05


@needs_native
def test_a_library_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    native._load.cache_clear()
    try:
        assert "is of another version of Treadle" in native.missing() and native.broken()
        assert native.variant() == "" and native.runnable() == []
    finally:
        monkeypatch.undo()
        native._load.cache_clear()
        assert native.missing() == ""


def test_a_damaged_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / native.NAME).write_bytes(b"not a library")
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    native._load.cache_clear()
    try:
        assert f"{tmp_path / native.NAME} does not load" in native.missing() and native.broken()
    finally:
        monkeypatch.undo()
        native._load.cache_clear()


WITHOUT = """
import sys, torch
import treadle.ops.native as native
native.__path__ = [sys.argv[1] if len(sys.argv) > 1 else "/nonexistent"]
from treadle import ops
from treadle.ops.norm import RMS_NORM
x, w = torch.randn(3, 8), torch.ones(8)
assert "no C++20 compiler" in native.missing() and not native.broken()
assert RMS_NORM.kernel_for(x, w, 1e-6).name == "reference"
assert torch.allclose(ops.rms_norm(x, w, 1e-6), torch.nn.functional.rms_norm(x, (8,), w, 1e-6), atol=1e-6)
print("fine")
"""


def test_everything_runs_without_a_library() -> None:
    result = python(WITHOUT)
    assert result.stdout == "fine\n", result.stderr


@needs_native
def test_the_structures_are_those_of_the_header() -> None:
    from treadle.ops.native import abi

    size = native.library().treadle_size
    for number, structure in enumerate(abi.STRUCTURES):
        assert size(number) == ctypes.sizeof(structure), structure.__name__
    assert size(len(abi.STRUCTURES)) == -1

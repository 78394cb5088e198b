"""Facts about the host, read from made-up files as containers show them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from treadle.device import host


def write(root: Path, contents: dict[str, str]) -> Path:
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_cores_follow_the_affinity(tmp_path: Path) -> None:
    assert host.cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("100000 100000", 1), ("50000 100000", 1), ("1000000 100000", None), ("max 100000", None), ("rubbish", None)],
)
def test_cores_follow_a_version_2_quota(tmp_path: Path, quota: str, expected: int | None) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/cpu.max": quota + "\n"})
    (root / "sys/fs/cgroup/job/step").mkdir()
    assert host.cores(root) == (expected or len(os.sched_getaffinity(0)))


def test_cores_follow_a_version_1_quota(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/cpu,cpuacct"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/job\n3:memory:/other\n",
            f"{group}/job/cpu.cfs_quota_us": "20000",
            f"{group}/job/cpu.cfs_period_us": "100000",
            f"{group}/cpu.cfs_quota_us": "-1",
            f"{group}/cpu.cfs_period_us": "100000",
        },
    )
    assert host.cores(root) == 1


def test_memory_without_a_limit_is_the_machine_s(tmp_path: Path) -> None:
    found = host.memory(tmp_path)
    assert found.total == psutil.virtual_memory().total and found.limit == "machine"
    assert 0 < found.available <= found.total


def test_memory_within_a_version_2_group(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": "64000000",
            "sys/fs/cgroup/job/memory.current": "50000000",
            "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 30000000\n",
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/step/memory.current": "1000",
        },
    )
    assert host.memory(root) == host.Memory(64_000_000, 44_000_000, "control group")


def test_memory_within_a_version_1_group(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    contents = {
        "proc/self/cgroup": "6:memory:/job\n0::/\n",
        f"{group}/job/memory.limit_in_bytes": "1000000",
        f"{group}/job/memory.usage_in_bytes": "2000000",
        f"{group}/memory.limit_in_bytes": str(2**63 - 4096),
    }
    assert host.memory(write(tmp_path, contents)) == host.Memory(1_000_000, 0, "control group")


def test_a_group_path_cannot_lead_out(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/../../etc\n", "etc/memory.max": "5"})
    assert host.memory(root).limit == "machine"


def test_instruction_sets_of_x86_and_arm(tmp_path: Path) -> None:
    x86 = write(
        tmp_path, {"x86": "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma amx_bf16\n\nflags: sve\n"}
    )
    assert host.isa(x86 / "x86") == ("avx2", "fma", "amx_bf16")
    assert host.processor(x86 / "x86") == "Some CPU"
    arm = write(tmp_path, {"arm": "processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n"})
    assert host.isa(arm / "arm") == ("asimd", "i8mm", "bf16")
    assert host.isa(tmp_path / "missing") == ()
    assert host.processor(tmp_path / "missing")


def test_this_host_is_plain_data() -> None:
    import json

    facts = host.this_host().facts()
    assert json.loads(json.dumps(facts)) is not None
    assert 1 <= facts["cores"] <= facts["machine_cores"]
    assert bool(facts["accelerators"]) == torch.accelerator.is_available()

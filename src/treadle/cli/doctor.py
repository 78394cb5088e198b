"""`treadle doctor`: what this machine can do and what Treadle will use, ending in a verdict."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

import typer

from treadle.cli import verb_app

app = verb_app("Show what this machine can do and what Treadle will use.")

CORE = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")
EXTRAS = {
    "s3": ("s3fs", "read s3:// addresses"),
    "mlflow": ("mlflow", "log runs to MLflow"),
    "tensorboard": ("tensorboard", "log runs to TensorBoard"),
    "eval": ("lm_eval", "evaluate on lm-eval's tasks"),
}


@app.command()
def doctor(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> int:
    report = examine()
    if as_json:
        import json

        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Return everything that doctor shows, as plain data; `problems` are what keeps Treadle from working."""
    import platform

    from treadle import __version__
    from treadle.config.progress import progress

    with progress("Looking at this machine", total=4) as step:
        from treadle.device import this_host
        from treadle.ops import listing, native
        from treadle.ops.registry import allowed_kernels

        packages = {name: _version(name) for name in CORE}
        problems = [f"the package {name} is missing; install Treadle again" for name in CORE if not packages[name]]
        if native.broken():
            problems.append(native.missing())
        cache = _cache()
        entries = listing.listing()
        return {
            "treadle": __version__,
            "python": platform.python_version(),
            "packages": packages,
            "host": this_host().facts(),
            "ceilings": _ceilings(step),
            "native": {"variant": native.variant(), "runnable": native.runnable(), "missing": native.missing()},
            "operators": {entry["operator"]: entry.get("runs", "error") for entry in entries},
            "allowed_kernels": allowed_kernels(),
            "extras": {name: _version(package) for name, (package, _) in EXTRAS.items()},
            "cache": cache,
            "problems": problems,
            "warnings": [*listing.fallbacks(entries), *([cache["problem"]] if cache["problem"] else [])],
        }


def show(report: dict[str, Any]) -> None:
    """Print the report for reading, no wider than the terminal, with a verdict at the end."""
    host, native = report["host"], report["native"]
    print(f"Treadle {report['treadle']}, Python {report['python']}, {host['system']} on {host['architecture']}\n")
    _row("Packages", ", ".join(f"{name} {version or 'missing'}" for name, version in report["packages"].items()))
    of_all = f" of the machine's {host['machine_cores']}" if host["cores"] < host["machine_cores"] else ""
    _row("Processor", f"{host['processor']}, {_count(host['cores'], 'core')}{of_all}")
    _row("Instructions", " ".join(host["isa"]) or "not known on this system")
    memory = host["memory"]
    limited = ", limited by the control group" if memory["limit"] != "machine" else ""
    _row("Memory", f"{_gib(memory['total'])}{limited}; {_gib(memory['available'])} free")
    devices = [f"{one['device']} {one['name']} {_gib(one['memory'])}" for one in host["accelerators"]]
    _row("Accelerators", "; ".join(devices) or "none that PyTorch can use")
    ceilings = report["ceilings"]
    rates = ", ".join(f"{ceilings[name] / 1e9:,.0f} GFLOP/s in {name}" for name in ("float32", "bfloat16"))
    _row("Measured", f"matrix products {rates}; memory reads {ceilings['read'] / 1e9:,.0f} GB/s")
    _row("Native", native["variant"] + f" (of {', '.join(native['runnable'])})" if native["variant"] else "not in use")
    runs = report["operators"].values()
    fast = sum(kernel not in ("reference", "error") for kernel in runs)
    _row("Operators", f"{fast} on fast kernels, {len(runs) - fast} on PyTorch alone (`treadle ops` lists them)")
    if report["allowed_kernels"] is not None:
        _row("Setting", f"TREADLE_KERNELS={','.join(report['allowed_kernels'])} limits the kernels")
    absent = [name for name, version in report["extras"].items() if not version]
    _row("Extras", ", ".join(f"{name} {version}" for name, version in report["extras"].items() if version) or "none")
    for name in absent:
        _row("", f"to {EXTRAS[name][1]}: pip install 'treadle[{name}]'")
    cache = report["cache"]
    _row("Cache", f"{cache['folder']}, " + ("not writable" if cache["problem"] else f"{_gib(cache['free'])} free"))
    print()
    for warning in report["warnings"]:
        _row("Note", warning)
    for problem in report["problems"]:
        _row("Problem", problem)
    if report["problems"]:
        print(f"Not ready: {_count(len(report['problems']), 'problem')} to mend.")
    else:
        where = "on " + host["accelerators"][0]["name"] if host["accelerators"] else "on this processor"
        print(f"Ready: Treadle trains and serves {where}{', with slower kernels' if report['warnings'] else ''}.")


def _row(name: str, text: str) -> None:
    width = max(40, min(shutil.get_terminal_size().columns, 110))
    print(textwrap.fill(text, width, initial_indent=f"{name:<14}", subsequent_indent=" " * 14, break_long_words=False))


def _ceilings(step: Any) -> dict[str, float]:
    import torch

    from treadle.device import cores, matmul_peak, read_bandwidth

    measured = {}
    for name in ("float32", "bfloat16"):
        step(1, "matrix products")
        measured[name] = matmul_peak(getattr(torch, name), cores(), again=True)
    step(1, "memory")
    measured["read"] = read_bandwidth(cores(), again=True)
    return measured


def _cache() -> dict[str, Any]:
    from treadle.config.errors import TreadleError
    from treadle.config.files import cache_home, write_atomically

    folder = cache_home()
    problem, free = "", 0
    try:
        trial = folder / ".doctor"
        write_atomically(trial, b"")
        trial.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
    except (OSError, TreadleError) as error:
        problem = f"the cache folder {folder} cannot be written ({error}); set TREADLE_CACHE to one that can"
    return {"folder": str(folder), "free": free, "problem": problem}


def _version(package: str) -> str:
    """Return the installed version of a package, "" where it is missing."""
    import importlib.metadata
    import importlib.util

    if importlib.util.find_spec(package) is None:
        return ""
    for name in (package, f"{package}-skinny"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(unknown version)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

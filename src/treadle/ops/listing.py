"""What `treadle ops` shows: each operator, its kernels, which one runs here and why the others do not."""

from __future__ import annotations

from typing import Any

from treadle.config.errors import UserError
from treadle.ops.registry import OPERATORS, Operator, refusal


def listing() -> list[dict[str, Any]]:
    """Return one entry an operator, as plain data.

    `runs` is the kernel that is tried first here, "reference" where there is none; `kernels` lists each with what it
    `takes` and, in `refused`, why it does not run here ("" where it does). An operator of another package that does
    not import has an `error` instead.
    """
    entries = []
    for name in OPERATORS.names():
        try:
            entries.append(_entry(OPERATORS.get(name)))
        except UserError as error:
            entries.append({"operator": name, "error": str(error)})
    return entries


def _entry(operator: Operator) -> dict[str, Any]:
    kernels = [
        {"name": kernel.name, "takes": kernel.takes, "refused": refusal(kernel)} for kernel in operator.all_kernels()
    ]
    runs = next((kernel["name"] for kernel in kernels if not kernel["refused"]), "reference")
    return {
        "operator": operator.name,
        "runs": runs,
        "kernels": kernels,
        "note": operator.note,
        "schema": f"{operator.name}{operator.schema}",
    }


def fallbacks(entries: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for the operators that have kernels of which none runs here, one for each reason."""
    sentences: list[str] = []
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        if "error" in entry:
            sentences.append(entry["error"])
        elif entry["kernels"] and entry["runs"] == "reference":
            reasons = "; ".join(dict.fromkeys(kernel["refused"] for kernel in entry["kernels"]))
            by_reason.setdefault(reasons, []).append(entry["operator"])
    for reason, names in by_reason.items():
        who = (
            f"{names[0]} runs on its reference"
            if len(names) == 1
            else f"{len(names)} operators run on their references"
        )
        sentences.append(f"{who}: {reason}")
    return sentences

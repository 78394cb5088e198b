"""Which device to compute on."""

from __future__ import annotations

import torch

from treadle.config import UserError


def choose_device(wanted: torch.device | str | None = None, local_rank: int | None = None) -> torch.device:
    """Return the device of that name; for None and "auto" the accelerator that PyTorch sees, else the CPU.

    With `local_rank` it is the one of that number among this machine's devices of the kind, counted from `wanted`.
    Raises UserError where there is none.
    """
    if wanted is None or wanted == "auto":
        place = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    else:
        place = _named(wanted)
    if place.type == "cpu" or local_rank is None:
        return place
    number, count = (place.index or 0) + local_rank, torch.accelerator.device_count()
    if number >= count:
        raise UserError(
            f"process {local_rank} of this machine finds no {place.type} device of its own, there are {count}; start "
            "as many processes, or use the device cpu"
        )
    return torch.device(place.type, number)


def _named(wanted: torch.device | str) -> torch.device:
    try:
        place = torch.device(wanted)
        torch.empty(0, device=place)
        if place.type == "meta":
            raise RuntimeError("it holds no values")
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the device '{wanted}' cannot be used here ({reason}); leave it out or use cpu") from error
    return place

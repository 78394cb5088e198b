"""The loss scale of fp16: halved by an overflow, doubled after a long good stretch, untouched for other precisions."""

from __future__ import annotations

from treadle.train.precision import GOOD_STEPS_TO_RAISE, LARGEST_SCALE, first_scaler, next_scaler
from treadle.train.state import ScalerState


def test_an_overflow_halves_the_scale_and_starts_the_count_again() -> None:
    assert next_scaler(ScalerState(1024.0, 7), "fp16", overflowed=True) == ScalerState(512.0, 0)
    assert next_scaler(ScalerState(1.0, 7), "fp16", overflowed=True) == ScalerState(1.0, 0)


def test_good_steps_raise_the_scale_up_to_a_limit() -> None:
    scaler = first_scaler("fp16")
    first = scaler.scale
    for _ in range(GOOD_STEPS_TO_RAISE - 1):
        scaler = next_scaler(scaler, "fp16", overflowed=False)
    assert scaler.scale == first
    assert next_scaler(scaler, "fp16", overflowed=False) == ScalerState(2 * first, 0)
    top = ScalerState(LARGEST_SCALE, GOOD_STEPS_TO_RAISE)
    assert next_scaler(top, "fp16", overflowed=False).scale == LARGEST_SCALE


def test_other_precisions_have_no_scale() -> None:
    for precision in ("fp32", "bf16"):
        scaler = first_scaler(precision)
        assert scaler.scale == 1.0
        assert next_scaler(scaler, precision, overflowed=True) == scaler

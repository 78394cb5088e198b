"""From answers to figures: percentiles, ratios, JSON, and pictures of latency against load."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from serving.client import Answer

SHARES = (0.5, 0.9, 0.95, 0.99)
COLORS = ("#2f6fdb", "#d64545", "#2e9e6b", "#b7791f", "#7c4dbe", "#4a5568")
PANELS = (("first_token_ms", "time to first token"), ("gap_ms", "between tokens"), ("request_ms", "whole request"))


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Return percentiles (the value that this share does not exceed), mean and maximum; {} of nothing."""
    ordered = sorted(values)
    if not ordered:
        return {}
    found = {f"p{100 * share:g}": ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in SHARES}
    found |= {"mean": statistics.fmean(ordered), "max": ordered[-1]}
    return {name: round(value, 3) for name, value in found.items()}


def summarize(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Return the figures of one run; times in milliseconds, rates a second."""
    good = [answer for answer in answers if not answer.error]
    errors: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            errors[answer.error] = errors.get(answer.error, 0) + 1
    tokens = sum(answer.tokens for answer in good)
    events = sum(len(answer.pieces) for answer in good)
    return {
        "requests": len(answers),
        "errors": errors,
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(tokens / seconds, 2),
        "total_tokens_per_second": round((tokens + sum(answer.prompt_tokens for answer in good)) / seconds, 2),
        "first_token_ms": percentiles(1000 * answer.first for answer in good),
        "gap_ms": percentiles(1000 * gap for answer in good for gap in answer.gaps),
        "per_token_ms": percentiles(
            1000 * (answer.pieces[-1] - answer.pieces[0]) / (answer.tokens - 1) for answer in good if answer.tokens > 1
        ),
        "request_ms": percentiles(1000 * (answer.ended - answer.due) for answer in good),
        # More than 1 where a server sends several tokens in one event: then a gap is that of several tokens.
        "tokens_per_event": round(tokens / events, 3) if events else 0.0,
        # How late the generator itself was: if it is much, the figures are those of the generator.
        "late_ms": percentiles(1000 * (answer.sent - answer.due) for answer in answers if answer.sent),
    }


def median_of(runs: Sequence[dict[str, Any]], *path: str) -> float:
    """Return the median over the rounds of one figure."""
    values = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value.get(key, math.nan)
            if not isinstance(value, dict):
                break
        values.append(float(value) if not isinstance(value, dict) else math.nan)
    return statistics.median(values)


def ratios(points: Sequence[dict[str, Any]], first: str, other: str) -> list[dict[str, Any]]:
    """Return how `first` stands to `other` at each load: throughput above 1 is better, latencies below."""
    found = []
    for load in dict.fromkeys(point["load"] for point in points):
        runs = {
            label: [point for point in points if point["load"] == load and point["server"] == label]
            for label in (first, other)
        }
        if all(runs.values()):
            figures = {
                "tokens": ("output_tokens_per_second",),
                "p99_gap": ("gap_ms", "p99"),
                "p50_gap": ("gap_ms", "p50"),
                "p99_first_token": ("first_token_ms", "p99"),
                "p50_first_token": ("first_token_ms", "p50"),
            }
            found.append(
                {"load": load, "server": first, "against": other}
                | {
                    name: round(median_of(runs[first], *path) / (median_of(runs[other], *path) or math.nan), 3)
                    for name, path in figures.items()
                }
            )
    return found


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    from treadle.device.host import cores, processor

    return {
        "processor": processor(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def write_result(folder: Path, name: str, result: dict[str, Any], picture: str = "") -> Path:
    """Write the figures, and a picture beside them, under today's date; returns the path of the figures."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    names = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    command = f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(names)}"
    result = {**result, "machine": machine(), "command": _without_folders(command), "date": date}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{date}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    if picture:
        path.with_suffix(".svg").write_text(picture)
    return path


def _without_folders(command: str) -> str:
    """Return a command with the files' names instead of where they lie on this machine."""
    import re

    return re.sub(r"(?<![\w/])/(?:[\w.+-]+/)+([\w.+-]+)", r"\1", command)


def picture(points: Sequence[dict[str, Any]], title: str, axis: str) -> str:
    """Return an SVG picture: latency (p50 and p99, logarithmic) against load, one panel for each kind of latency."""
    width, height, top = 420, 360, 60
    labels = list(dict.fromkeys(point["server"] for point in points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * width} {height + 70}" width="{3 * width}" '
        f'height="{height + 70}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{3 * width}" height="{height + 70}" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="15" fill="#1f2933">{escape(title)}</text>',
    ]
    for place, label in enumerate(labels):
        x, color = 16 + 190 * place, COLORS[place % len(COLORS)]
        parts.append(f'<path d="M{x} {height + 52}h22" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28}" y="{height + 56}" fill="#1f2933">{escape(label)}</text>')
    parts.append(
        f'<text x="{3 * width - 16}" y="{height + 56}" text-anchor="end" fill="#616e7c">'
        "solid: median, dashed: 99th percentile; milliseconds, logarithmic</text>"
    )
    for place, (key, name) in enumerate(PANELS):
        box = (width * place + 60, top, width * (place + 1) - 16, height - 10)
        parts += _panel(points, labels, key, name, axis, box)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    points: Sequence[dict[str, Any]],
    labels: Sequence[str],
    key: str,
    name: str,
    axis: str,
    box: tuple[int, int, int, int],
) -> list[str]:
    left, top, right, bottom = box
    lines: list[tuple[int, str, list[tuple[float, float]]]] = []
    for place, label in enumerate(labels):
        for share in ("p50", "p99"):
            line = []
            for level in sorted({point["level"] for point in points if point["server"] == label}):
                runs = [point for point in points if point["server"] == label and point["level"] == level]
                value = median_of(runs, key, share)
                if value > 0:
                    line.append((level, value))
            lines.append((place, share, line))
    everything = [point for _, _, line in lines for point in line]
    if not everything:
        return []
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    bottom_power, top_power = math.floor(math.log10(low)), math.ceil(math.log10(high * 1.0001))
    x_low, x_high = min(x for x, _ in everything), max(x for x, _ in everything)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = left + (point[0] - x_low) / ((x_high - x_low) or 1) * (right - left)
        share = (math.log10(point[1]) - bottom_power) / (top_power - bottom_power)
        return x, bottom - share * (bottom - top)

    parts = [f'<text x="{left}" y="{top - 10}" fill="#1f2933">{name} (ms)</text>']
    for power in range(bottom_power, top_power + 1):
        y = at((x_low, 10.0**power))[1]
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#616e7c">{10.0**power:g}</text>')
    for level in sorted({x for x, _ in everything}):
        x = at((level, low))[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#616e7c">{level:g}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 34}" text-anchor="end" fill="#616e7c">{escape(axis)}</text>')
    parts.append(f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#9aa5b1"/>')
    for place, share, line in lines:
        color, dash = COLORS[place % len(COLORS)], ' stroke-dasharray="5 4"' if share == "p99" else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in map(at, line)]
    return parts

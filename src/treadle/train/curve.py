"""The loss curve as a picture: in the terminal with braille dots, and as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

Points = Sequence[tuple[float, float]]

# The bit of each dot of a braille character, by column and row from the top (Unicode 15.1, block U+2800).
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
SPARKS = "▁▂▃▄▅▆▇█"


def finite(points: Points) -> list[tuple[float, float]]:
    """Return the points whose value is a number."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as one line of bars, each the mean of its share of them."""
    values = [value for value in values if value is not None and math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    cells = []
    for index in range(count):
        part = values[
            index * len(values) // count : max((index + 1) * len(values) // count, index * len(values) // count + 1)
        ]
        cells.append(sum(part) / len(part))
    low, high = min(cells), max(cells)
    span = (high - low) or 1.0
    return "".join(SPARKS[round((cell - low) / span * (len(SPARKS) - 1))] for cell in cells)


def terminal_curve(points: Points, width: int = 64, height: int = 10, label: str = "loss") -> list[str]:
    """Return lines that draw the points as a curve with its axes; no line where there are fewer than two points."""
    points = finite(points)
    if len(points) < 2:
        return []
    left, right = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    span = (high - low) or 1.0
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for column in range(columns):
        x = left + (right - left) * column / (columns - 1)
        row = round((high - _at(points, x)) / span * (rows - 1))
        # Join to the column before, so that a steep fall is a line and not a few scattered dots.
        begin, end = (row, row) if previous is None else sorted((row, previous))
        for dot in range(begin, end + 1):
            cells[dot // 4][column // 2] |= DOTS[column % 2][dot % 4]
        previous = row
    lines = []
    for index, cell_row in enumerate(cells):
        value = high - span * (index + 0.5) / height
        shown = f"{high:.3f}" if index == 0 else f"{low:.3f}" if index == height - 1 else f"{value:.3f}"
        axis = f"{shown:>8} ┤" if index % 3 == 0 or index == height - 1 else " " * 8 + " │"
        lines.append(axis + "".join(chr(0x2800 + bits) for bits in cell_row).rstrip("\u2800"))
    lines.append(" " * 9 + "└" + "─" * width)
    first, last = f"{left:g}", f"step {right:g}"
    lines.append(" " * 10 + first + f"{last:>{max(1, width - len(first))}}")
    return [f"{label:>8}", *lines]


def _at(points: Points, x: float) -> float:
    """The value at x between the two nearest points."""
    import bisect

    index = bisect.bisect_left(points, (x, -math.inf))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def smoothed(points: Points, share: float = 0.02) -> list[tuple[float, float]]:
    """Return an exponential moving average over about `share` of the points, started without bias."""
    keep = 1 - 1 / max(1.0, share * len(points))
    total = weight = 0.0
    result = []
    for x, y in points:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        result.append((x, total / weight))
    return result


def svg_curve(training: Points, validation: Points, title: str, width: int = 860, height: int = 420) -> str:
    """Return an SVG picture of both curves over the steps, with axes, grid and a legend."""
    training, validation = finite(training), finite(validation)
    everything = [*training, *validation]
    if not everything:
        everything = [(0.0, 0.0)]
    x_low, x_high = min(x for x, _ in everything), max(x for x, _ in everything)
    smooth = smoothed(training)
    y_ticks = ticks(min(y for _, y in everything), max(y for _, y in everything))
    x_ticks = [tick for tick in ticks(x_low, x_high) if x_low <= tick <= x_high]
    y_low, y_high = y_ticks[0], y_ticks[-1]
    left, top, right, bottom = 64, 44, width - 20, height - 44

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = left + (point[0] - x_low) / ((x_high - x_low) or 1) * (right - left)
        return x, bottom - (point[1] - y_low) / ((y_high - y_low) or 1) * (bottom - top)

    def line(points: Points, style: str) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, _thinned(points, 2 * width)))
        return f'<polyline points="{path}" fill="none" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="24" font-size="15" fill="#1f2933">{escape(title)}</text>',
    ]
    for tick in y_ticks:
        y = place((x_low, tick))[1]
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#616e7c">{tick:g}</text>')
    for tick in x_ticks:
        x = place((tick, y_low))[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#616e7c">{tick:g}</text>')
    parts.append(f'<text x="{right}" y="{height - 10}" text-anchor="end" fill="#616e7c">step</text>')
    parts.append(f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#9aa5b1"/>')
    if training:
        parts.append(line(training, 'stroke="#2f6fdb" stroke-opacity="0.3"'))
        parts.append(line(smooth, 'stroke="#2f6fdb" stroke-width="2"'))
    if validation:
        parts.append(line(validation, 'stroke="#d64545" stroke-width="2"'))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#d64545"/>' for x, y in map(place, validation)]
    legend = [("training loss (nats a token)", "#2f6fdb")] * bool(training) + [("validation", "#d64545")] * bool(
        validation
    )
    for index, (text, color) in enumerate(legend):
        x = right - 190
        y = top + 10 + 18 * index
        parts.append(f'<path d="M{x} {y}h22" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28}" y="{y + 4}" fill="#1f2933">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return round numbers that span low to high: steps of 1, 2 or 5 times a power of ten."""
    span = (high - low) or max(abs(high), 1.0)
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def _thinned(points: Points, most: int) -> Points:
    stride = max(1, len(points) // most)
    return [*points[::stride], points[-1]] if stride > 1 else points

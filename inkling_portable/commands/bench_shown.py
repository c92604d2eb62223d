"""The table and the plot of `inkling-portable bench serve`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

METRICS = {"ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms", "tokens_per_s": "tokens/s"}
COLOURS = {"plugin": "#1a5fb4", "off": "#b0461e"}
NAMES, PANEL, TOP, STEP = 200, 250, 62, 18  # of the plot, in pixels


class Point(NamedTuple):
    """One load as vLLM's benchmark reports it: medians, and output tokens a second."""

    drafts: int
    context: int
    at_once: int
    prompts: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    ttft_p99_ms: float
    tpot_p99_ms: float


def by_load(points: Mapping[str, Sequence[Point]]) -> dict[tuple[int, ...], dict[str, Point]]:
    """The points of each load (drafts, context, at once), by variant."""
    found: dict[tuple[int, ...], dict[str, Point]] = {}
    for variant, measured in points.items():
        for point in measured:
            found.setdefault(point[:3], {})[variant] = point
    return dict(sorted(found.items()))


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(points: Mapping[str, Sequence[Point]]) -> str:
    """A line for each load; `gain` is how many times better the plugin is."""
    heads = ["context", "at once", "drafts"]
    heads += [f"{title} {name}" for title in METRICS.values() for name in (*points, "gain")]
    rows = [heads]
    for (drafts, context, at_once), at in by_load(points).items():
        row = [f"{context:,}", str(at_once), str(drafts)]
        for key in METRICS:
            values = {name: float(getattr(p, key)) for name, p in at.items()}
            row += [number(values[name]) if name in values else "-" for name in points]
            ours, theirs = values.get("plugin"), values.get("off")
            gain = theirs / ours if ours and theirs else None
            gain = 1 / gain if gain and key == "tokens_per_s" else gain
            row.append("-" if gain is None else f"{gain:.2f}")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{c:>{w}}" for c, w in zip(r, widths, strict=True)) for r in rows)


def plot(points: Mapping[str, Sequence[Point]], title: str) -> str:
    """An SVG with a panel for each metric, a line for each load, values on logarithmic axes."""
    loads = by_load(points)
    width, height = NAMES + PANEL * len(METRICS), TOP + STEP * len(loads) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" role="img">',
        f'<title>{escape(title)}</title><rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="18" font-size="14">{escape(title)}</text>',
        '<text x="10" y="34" fill="#555">filled: plugin · ring: off · medians, logarithmic</text>',
    ]
    for i, (drafts, context, at_once) in enumerate(loads):
        label = f"{context:,} tokens, {at_once} at once" + (f", {drafts} drafts" if drafts else "")
        out.append(f'<text x="10" y="{TOP + STEP * i + 12}">{label}</text>')
    for j, (key, head) in enumerate(METRICS.items()):
        values = [getattr(p, key) for at in loads.values() for p in at.values()]
        low = math.floor(math.log10(min([v for v in values if v > 0], default=1)))
        high = max(low + 1, math.ceil(math.log10(max([*values, 10.0**low]))))
        left, scale = NAMES + PANEL * j + 12, (PANEL - 40) / (high - low)
        out.append(f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{head}</text>')
        for power in range(low, high + 1):
            x = round(left + (power - low) * scale, 1)
            out.append(f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{height - 24}" stroke="#ddd"/>')
            out.append(f'<text x="{x}" y="{height - 10}" text-anchor="middle">1e{power}</text>')
        for i, at in enumerate(loads.values()):
            for variant, point in at.items():
                value, colour = getattr(point, key), COLOURS[variant]
                x = round(left + (math.log10(max(value, 10.0**low)) - low) * scale, 1)
                fill = colour if variant == "plugin" else "none"
                tip = f"<title>{variant} {number(value)}</title>"
                out.append(f'<circle cx="{x}" cy="{TOP + STEP * i + 8}" r="4" fill="{fill}" '
                           f'stroke="{colour}">{tip}</circle>')  # fmt: skip
    return "\n".join([*out, "</svg>", ""])

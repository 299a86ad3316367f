"""The pictures of the concepts page, drawn from the package's own functions: ``python docs/drawings.py``."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

import fedtail as ft
from fedtail.core.momentum import cgnm_direction
from fedtail.data.sets import long_tail_counts
from fedtail.rates import FedHOO

STYLE = """
.bg{fill:#fff;stroke:#dfe2e6}.box{fill:#f4f6f8;stroke:#c9ced5}text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,
Helvetica,Arial,sans-serif;fill:#1b1f24}.soft{fill:#5b6470}.small{font-size:12.5px}.bold{font-weight:600}
.mono{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px}.mid{text-anchor:middle}.end{text-anchor:end}
.line{stroke:#67707d;fill:none;stroke-width:1.5}
.thin{stroke:#c9ced5;fill:none}.dash{stroke:#67707d;stroke-dasharray:4 4}
.a{fill:#0b6fb8}.b{fill:#cf4a0c}.c{fill:#67707d}.sa{stroke:#0b6fb8;fill:none;stroke-width:2.5}
.sb{stroke:#cf4a0c;fill:none;stroke-width:2.5}.sc{stroke:#1b1f24;fill:none;stroke-width:2.5}.k{fill:#1b1f24}
.ta{fill:#0b6fb8}.tb{fill:#cf4a0c}.pale{opacity:.2}.fa{fill:#0b6fb8;fill-opacity:.1;stroke:#0b6fb8}
@media (prefers-color-scheme:dark){.bg{fill:#1b1f25;stroke:#30363e}.box{fill:#23282f;stroke:#414953}text{fill:#e8eaed}
.soft{fill:#a0a8b3}.line,.dash{stroke:#9aa4b1}.thin{stroke:#414953}.a,.ta{fill:#58a9ee}.b,.tb{fill:#f5814a}.c{fill:#9aa4b1}
.sa{stroke:#58a9ee}.sb{stroke:#f5814a}.sc{stroke:#e8eaed}.k{fill:#e8eaed}.fa{fill:#58a9ee;stroke:#58a9ee}}
"""


def svg(width: float, height: float, title: str, *parts: str) -> str:
    """A drawing on a card of its own, readable on light and dark pages."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{title}">'
        f"<title>{title}</title><style>{STYLE}</style>"
        f'<rect class="bg" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="10"/>'
        f"{''.join(parts)}</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "line", head: float = 8) -> str:
    """A line with a filled head of the same colour."""
    angle = math.atan2(y2 - y1, x2 - x1)
    fill = {"line": "c", "sa": "a", "sb": "b", "sc": "k"}[kind]
    wings = [(x2 - head * math.cos(angle + s), y2 - head * math.sin(angle + s)) for s in (0.42, -0.42)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x2, y2), *wings])
    tail = (x2 - head * 0.8 * math.cos(angle), y2 - head * 0.8 * math.sin(angle))
    return (
        f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{tail[0]:.1f}" y2="{tail[1]:.1f}"/>'
        f'<polygon class="{fill}" points="{points}"/>'
    )


def box(x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>'


def the_round() -> str:
    parts = [box(250, 24, 300, 74), text(400, 50, "Server", "mid bold")]
    parts.append(text(400, 78, "x ← x + Σ p_k Δ_k", "mid mono"))
    for k, name in enumerate(("site A", "site B", "site C")):
        left = 34 + 250 * k
        middle = left + 116
        parts += [
            box(left, 196, 232, 150),
            text(middle, 222, f"{name}: private data", "mid bold"),
            text(left + 16, 250, f"1. resample at its rate r_{k + 1}", "small"),
            text(left + 16, 272, "2. group classes by frequency", "small"),
            text(left + 16, 294, "3. local steps of the method", "small"),
            text(left + 16, 328, "labels and samples stay here", "small soft"),
        ]
        spread = 320 + 80 * k
        parts.append(arrow(spread - 10, 100, middle - 12, 192))
        parts.append(arrow(middle + 12, 192, spread + 10, 102, "sa"))
    parts += [
        text(176, 138, "model x,", "end small soft"),
        text(176, 156, "one rate r_k", "end small soft"),
        text(628, 138, "update Δ_k,", "small ta"),
        text(628, 156, "sample count", "small ta"),
    ]
    return svg(800, 366, "One round: the server sends the model and a rate, sites send updates back", *parts)


def grouping(rate: float = 0.6) -> str:
    counts = np.asarray(long_tail_counts(5000, 10, 20.0))
    after = ft.resampled_counts(counts, rate)
    groups = ft.group_classes(after, n_groups=2)
    left, base, tall, slot = 70, 270, 200, 66
    parts = []
    for c in range(10):
        x = left + slot * c
        kind = "ab"[int(groups[c])]
        high, low = tall * after[c] / counts.max(), tall * counts[c] / counts.max()
        parts.append(f'<rect class="{kind} pale" x="{x}" y="{base - high:.1f}" width="48" height="{high:.1f}" rx="2"/>')
        parts.append(f'<rect class="{kind}" x="{x}" y="{base - low:.1f}" width="48" height="{low:.1f}" rx="2"/>')
        parts.append(text(x + 24, base - max(high, low) - 7, f"{after[c]}", "mid small"))
        parts.append(text(x + 24, base + 18, f"{c}", "mid small soft"))
    cut = left + slot * int((groups == 0).sum()) - 9
    parts += [
        f'<line class="thin" x1="60" x2="740" y1="{base}" y2="{base}"/>',
        f'<line class="dash" x1="{cut}" x2="{cut}" y1="34" y2="{base}"/>',
        text(cut - 12, 42, "majority group", "end small ta"),
        text(cut + 12, 42, "minority group", "small tb"),
        text(400, base + 44, "class, most frequent first", "mid small soft"),
        text(740, 64, "solid: samples the client has", "end small soft"),
        text(740, 82, f"pale: what an epoch sees at rate {rate:g}", "end small soft"),
    ]
    return svg(800, 330, f"Ten classes with imbalance 20, resampled at rate {rate:g} and split into two groups", *parts)


def step() -> str:
    grads = np.array([[1.5, 0.25], [-0.06, 0.2]])
    beta, delta = 0.5, 0.1
    momentum = (1 - beta) * grads
    unit = momentum / (np.linalg.norm(momentum, axis=1, keepdims=True) + delta)
    start = torch.zeros(2, 2, dtype=torch.float64)
    direction, _ = cgnm_direction(start, torch.tensor(grads), beta, delta)
    assert np.allclose(direction.numpy(), unit.sum(0))

    def draw(x: float, y: float, vectors: np.ndarray, scale: float) -> list[str]:
        tips = [(x + scale * v[0], y - scale * v[1]) for v in vectors]
        total = vectors.sum(0)
        end = (x + scale * total[0], y - scale * total[1])
        guides = [
            f'<line class="thin" x1="{a:.1f}" y1="{b:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>' for a, b in tips
        ]
        return [*guides, arrow(x, y, *end, "sc"), arrow(x, y, *tips[0], "sa"), arrow(x, y, *tips[1], "sb")]

    parts = [
        text(40, 40, "Sum of gradients", "bold"),
        text(40, 60, "the majority decides", "small soft"),
        *draw(90, 220, grads, 150),
        text(240, 226, "majority g_0", "small ta"),
        text(40, 178, "minority g_1", "small tb"),
        text(440, 40, "Sum of normalized momenta", "bold"),
        text(440, 60, "each group counts about the same", "small soft"),
        *draw(570, 240, unit, 150),
        text(640, 252, "m_0 / (|m_0| + δ)", "small ta"),
        text(546, 158, "m_1 / (|m_1| + δ)", "small tb end"),
        text(700, 140, "step", "small bold"),
        '<line class="thin" x1="400" x2="400" y1="28" y2="272"/>',
    ]
    return svg(800, 300, "The CGNM step: one momentum per group of classes, normalized, then summed", *parts)


def boxes() -> str:
    """FedHOO on two clients and a smooth reward: the boxes it selects, to scale."""
    best = np.array([0.47, 0.71])
    search = FedHOO(2, cold_rounds=0)
    left, top, side = 70, 40, 360
    parts = [f'<rect class="box" x="{left}" y="{top}" width="{side}" height="{side}"/>']

    def place(r: np.ndarray) -> tuple[float, float]:
        return left + side * (r[0] - 0.4) / 0.4, top + side - side * (r[1] - 0.4) / 0.4

    seen: list[str] = []
    winners: list[str] = []
    for t in range(4):
        probes = search.ask()
        width = 2 * (probes[:, 1] - probes[:, 0])
        centre = probes.mean(axis=1)
        x, y = place(np.array([centre[0] - width[0] / 2, centre[1] + width[1] / 2]))
        size = side * width[0] / 0.4
        parts.append(f'<rect class="fa" x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{size:.1f}"/>')
        rewards = []
        for s in range(4):
            r = np.array([probes[0, s & 1], probes[1, s >> 1 & 1]])
            rewards.append(1 - float(((r - best) ** 2).sum()))
            cx, cy = place(r)
            parts.append(f'<circle class="c" cx="{cx:.1f}" cy="{cy:.1f}" r="{max(2.2, 5 - t):.1f}"/>')
        winner = search.tell(np.array(rewards))
        cx, cy = place(search.rates)
        winners.append(f'<circle class="b" cx="{cx:.1f}" cy="{cy:.1f}" r="{max(3.2, 6 - t):.1f}"/>')
        r = search.rates
        seen.append(f"round {t + 1}: s* = {winner & 1}{winner >> 1 & 1}, rates {r[0]:.3f}, {r[1]:.3f}")
    parts += winners
    cx, cy = place(best)
    parts.append(f'<path class="sc" d="M{cx - 5:.1f} {cy - 5:.1f}l10 10m0 -10l-10 10"/>')
    for v in (0.4, 0.6, 0.8):
        x, y = place(np.array([v, v]))
        parts += [
            text(x, top + side + 20, f"{v:g}", "mid small soft"),
            text(left - 10, y + 5, f"{v:g}", "end small soft"),
        ]
    parts += [
        text(left + side / 2, top + side + 42, "rate of client 1", "mid small soft"),
        f'<text class="mid small soft" transform="translate(24 {top + side / 2}) rotate(-90)">rate of client 2</text>',
        text(470, 70, "A box of rates, one axis per client", "bold"),
        text(470, 98, "Each client trains at the quarter points of its side:", "small"),
        text(470, 118, "two local runs give all 2^K combinations,", "small"),
        text(470, 138, "since the aggregate is linear in the updates.", "small"),
        text(470, 172, "The best combination becomes the model, and", "small"),
        text(470, 192, "its quarter of the box is where the search goes on.", "small"),
        '<circle class="c" cx="476" cy="226" r="5"/>' + text(490, 231, "combinations validated", "small"),
        '<circle class="b" cx="476" cy="250" r="6"/>' + text(490, 255, "the best of each round", "small"),
        '<path class="sc" d="M471 269l10 10m0 -10l-10 10"/>' + text(490, 279, "the best rates there are", "small"),
        *(text(470, 318 + 22 * i, line, "mono soft") for i, line in enumerate(seen)),
    ]
    return svg(850, 470, "FedHOO halves a box of rates along every client at once", *parts)


DRAWINGS = {"round": the_round, "grouping": grouping, "cgnm": step, "fedhoo": boxes}


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (Path(__file__).parent / "images" / f"{name}.svg").write_text(draw(), encoding="utf-8")

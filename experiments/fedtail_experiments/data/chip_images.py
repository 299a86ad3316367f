"""Draw chips: one layout per product, one optics per factory, one picture per sample, and seven kinds of defect.

Layouts are drawn once per product; pictures are crops of them under the factory's light, blur and noise, computed
in batches. Only defects are drawn one by one, and they are rare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.core.random import generator

PIXELS = 1 << 20
"""Pixels drawn at once: few enough to stay in the processor's cache."""
JITTER = 1 / 24
"""Largest displacement of a chip in its picture, as a share of the side."""

GAIN = torch.tensor([[1.02, 1.00, 0.96], [0.90, 1.00, 1.06], [1.08, 0.98, 0.86], [0.95, 0.97, 0.95], [1.0, 1.06, 1.1]])
LIGHT = (0.05, 0.18, 0.10, 0.28, 0.12)
"""Strength of the illumination gradient of each factory."""
BLUR = (0.1, 0.3, 0.2, 0.5, 0.35)
DUST = 0.2
"""Share of pictures with a harmless speck."""
NOISE = (2.0, 3.0, 5.0, 4.0, 6.0)

SUBSTRATES = np.array(
    [[52, 84, 70], [60, 66, 104], [96, 70, 92], [84, 80, 58], [70, 72, 76], [46, 70, 92]], dtype=float
)
METALS = np.array([[214, 190, 130], [196, 198, 202], [206, 150, 110]], dtype=float)


@dataclass(frozen=True)
class Product:
    """A layout in units of the side: the canvas is the picture plus the jitter margin."""

    canvas: np.ndarray
    """(3, S', S') uint8."""
    pads: np.ndarray
    """(P, 4) top, left, height, width of the bond pads, in pixels of the canvas."""
    die: tuple[int, int, int, int]
    """Top, left, bottom, right of the die, in pixels of the canvas."""
    metal: np.ndarray
    substrate: np.ndarray


def render(product: np.ndarray, site: np.ndarray, y: np.ndarray, size: int, seed: int) -> Tensor:
    """(N, 3, size, size) uint8 pictures. product, site, y: (N,)."""
    used, product = np.unique(product, return_inverse=True)
    layouts = [draw_product(generator(seed, "chips/layout", int(p)), size) for p in used]
    canvases = torch.from_numpy(np.stack([p.canvas for p in layouts]))
    margin = (canvases.shape[-1] - size) // 2
    out = torch.empty(len(y), 3, size, size, dtype=torch.uint8)
    batch = max(1, PIXELS // size**2)
    for start in range(0, len(y), batch):
        rows = slice(start, min(start + batch, len(y)))
        rng = generator(seed, "chips/pictures", round=start // batch)
        shift = rng.integers(0, 2 * margin + 1, size=(rows.stop - start, 2))
        x = crop(canvases, product[rows], shift, size)
        for i in np.flatnonzero(y[rows]):
            layout = layouts[int(product[start + i])]
            image = x[i].numpy()
            PAINTERS[DEFECTS[int(y[start + i]) - 1]](image, layout, shift[i], rng)
        out[rows] = photograph(x, site[rows], rng).to(torch.uint8)
    return out


def crop(canvases: Tensor, product: np.ndarray, shift: np.ndarray, size: int) -> Tensor:
    """(B, 3, size, size) float32 windows of the products' canvases."""
    rows = torch.arange(size) + torch.from_numpy(shift[:, :1])
    cols = torch.arange(size) + torch.from_numpy(shift[:, 1:])
    picked = canvases[torch.from_numpy(product)[:, None, None], :, rows[:, :, None], cols[:, None, :]]
    return picked.permute(0, 3, 1, 2).to(torch.float32)


def photograph(x: Tensor, site: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Light, dust, blur and noise of the factories' microscopes. x: (B, 3, S, S) in 0..255."""
    b, _, s, _ = x.shape
    k = torch.from_numpy(site)
    axis = torch.linspace(-1, 1, s)
    angle = torch.from_numpy(rng.normal(0.0, 0.25, b) + 1.2 * site).float()
    tilt = torch.cos(angle)[:, None, None] * axis[:, None] + torch.sin(angle)[:, None, None] * axis
    exposure = torch.from_numpy(rng.normal(1.35, 0.06, b)).float()[:, None, None]
    light = exposure * (1 + torch.tensor(LIGHT)[k][:, None, None] * tilt)
    light = light * (1 - 0.08 * (axis[:, None] ** 2 + axis**2))
    x = x.mul_(light[:, None]).mul_(GAIN[k][:, :, None, None])
    # harmless dust specks on some pictures, so that not every dark dot is a defect
    spot = torch.from_numpy(rng.uniform(-1, 1, (b, 2))).float()
    depth = torch.from_numpy(rng.uniform(0.15, 0.4, b)).float()
    for i in np.flatnonzero(rng.random(b) < DUST):
        distance = (axis[:, None] - spot[i, 0]) ** 2 + (axis - spot[i, 1]) ** 2
        x[i] *= 1 - depth[i] * torch.exp(-distance / 0.0012)
    soft = x
    for _ in range(max(1, round(s / 64))):
        wide = F.pad(soft, (1, 1, 1, 1), mode="replicate")
        wide = (wide[..., :-2] + wide[..., 1:-1]).add_(wide[..., 2:])
        soft = (wide[..., :-2, :] + wide[..., 1:-1, :]).add_(wide[..., 2:, :]).div_(9)
    noise = torch.from_numpy(rng.standard_normal((b, 1, s, s), dtype=np.float32))
    x = x.lerp_(soft, torch.tensor(BLUR)[k].view(-1, 1, 1, 1)).add_(
        noise.mul_(torch.tensor(NOISE)[k].view(-1, 1, 1, 1))
    )
    return x.round_().clamp_(0, 255)


def draw_product(rng: np.random.Generator, size: int) -> Product:
    """A random layout: die with a seal ring, blocks of periodic and random structure, bond pads, traces, a mark."""
    side = size + 2 * round(size * JITTER)
    fine = 2 * side  # drawn at twice the resolution, so that edges are smooth
    substrate = SUBSTRATES[rng.integers(len(SUBSTRATES))] + rng.normal(0, 6, 3)
    metal = METALS[rng.integers(len(METALS))] + rng.normal(0, 5, 3)
    image = np.empty((fine, fine, 3))
    image[:] = 26 + rng.normal(0, 4, 3)  # saw street around the die
    edge = round(fine * rng.uniform(0.10, 0.13))
    lo, hi = edge, fine - edge
    image[lo:hi, lo:hi] = substrate
    ring = max(2, round(fine * 0.012))
    for a, b in ((lo + ring, lo + 2 * ring), (hi - 2 * ring, hi - ring)):
        image[a:b, lo + ring : hi - ring] = 0.55 * metal
        image[lo + ring : hi - ring, a:b] = 0.55 * metal
    inner = lo + round(fine * 0.13), hi - round(fine * 0.13)
    _blocks(image, inner, substrate, metal, rng)
    pads = _pads(image, lo + 3 * ring, hi - 3 * ring, inner, metal, rng)
    small = image.reshape(side, 2, side, 2, 3).mean((1, 3)).clip(0, 255)
    die = (round(lo / 2), round(lo / 2), round(hi / 2), round(hi / 2))
    return Product(small.astype(np.uint8).transpose(2, 0, 1).copy(), pads // 2, die, metal, substrate)


def _blocks(
    image: np.ndarray, inner: tuple[int, int], substrate: np.ndarray, metal: np.ndarray, rng: np.random.Generator
) -> None:
    """Split the core into blocks: memory (fine grids), logic (random texture), plain areas."""
    areas = [(inner[0], inner[0], inner[1], inner[1])]
    for _ in range(rng.integers(2, 6)):
        top, left, bottom, right = areas.pop(int(np.argmax([(a[2] - a[0]) * (a[3] - a[1]) for a in areas])))
        cut = rng.uniform(0.3, 0.7)
        if bottom - top > right - left:
            middle = round(top + cut * (bottom - top))
            areas += [(top, left, middle, right), (middle, left, bottom, right)]
        else:
            middle = round(left + cut * (right - left))
            areas += [(top, left, bottom, middle), (top, middle, bottom, right)]
    gap = max(1, image.shape[0] // 90)
    for top, left, bottom, right in areas:
        patch = image[top + gap : bottom - gap, left + gap : right - gap]
        h, w = patch.shape[:2]
        if h < 4 or w < 4:
            continue
        tone = substrate * rng.uniform(0.85, 1.25) + rng.normal(0, 6, 3)
        kind = rng.random()
        if kind < 0.45:  # memory: rows and columns
            period = int(rng.integers(4, 9)) * max(1, image.shape[0] // 144)
            lines = (np.arange(h) % period < period // 2)[:, None] ^ (np.arange(w) % (2 * period) < period)[None]
            patch[:] = tone * np.where(lines, 1.09, 0.93)[:, :, None]
        elif kind < 0.85:  # logic: short random wires
            cell = max(2, image.shape[0] // 72)
            coarse = rng.uniform(0.86, 1.14, (h // cell + 1, w // (3 * cell) + 1))
            patch[:] = tone * np.kron(coarse, np.ones((cell, 3 * cell)))[:h, :w, None]
        else:
            patch[:] = 0.6 * tone + 0.2 * metal


def _pads(
    image: np.ndarray, lo: int, hi: int, inner: tuple[int, int], metal: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Rows of bond pads along the sides, each with a trace into the core. Returns (P, 4) pixels."""
    fine = image.shape[0]
    pad = max(4, round(fine * rng.uniform(0.035, 0.055)))
    wire = max(2, round(fine * 0.010))
    sides = rng.permutation(4)[: rng.integers(2, 5)]
    pads = []
    for which in np.sort(sides):
        count = int(rng.integers(4, 9))
        centres = np.linspace(lo + 1.5 * pad, hi - 1.5 * pad, count) + rng.normal(0, 0.1 * pad, count)
        for c in centres.round().astype(int):
            near, core = (lo, inner[0]) if which in (0, 2) else (hi - pad, inner[1])
            a, b = sorted((near + pad // 2, core + (pad if which in (0, 2) else -pad) // 2))
            box = (near, c - pad // 2) if which < 2 else (c - pad // 2, near)
            along, across = slice(a, b), slice(c - wire // 2, c - wire // 2 + wire)
            if which < 2:
                image[along, across] = 0.75 * metal
            else:
                image[across, along] = 0.75 * metal
            image[box[0] : box[0] + pad, box[1] : box[1] + pad] = metal
            image[box[0] + pad // 3 : box[0] + 2 * pad // 3, box[1] + pad // 3 : box[1] + 2 * pad // 3] = 0.9 * metal
            pads.append((box[0], box[1], pad, pad))
    return np.array(pads)


# -- defects: each paints on (3, S, S) float pixels in place ------------------------------------------


def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    axis = (np.arange(size) + 0.5) / size
    return axis[:, None], axis[None, :]


def _stroke(size: int, points: np.ndarray, width: float) -> np.ndarray:
    """(S, S) coverage in 0..1 of a polyline through ``points`` (M, 2), in units of the side."""
    row, col = _grid(size)
    nearest = np.full((size, size), np.inf)
    for (r0, c0), (r1, c1) in pairwise(points):
        dr, dc = r1 - r0, c1 - c0
        t = np.clip(((row - r0) * dr + (col - c0) * dc) / max(dr * dr + dc * dc, 1e-9), 0, 1)
        nearest = np.minimum(nearest, (row - r0 - t * dr) ** 2 + (col - c0 - t * dc) ** 2)
    soft = 0.7 / size
    return np.clip((width / 2 + soft - np.sqrt(nearest)) / (2 * soft), 0, 1)


def _blob(size: int, centre: np.ndarray, radius: float, rng: np.random.Generator, rough: float = 0.25) -> np.ndarray:
    """(S, S) distance to an irregular outline in radii: below 1 inside."""
    row, col = _grid(size)
    angle = np.arctan2(row - centre[0], col - centre[1])
    outline = np.ones_like(angle)
    for k in (2, 3, 5):
        outline += rough / k * rng.normal() * np.cos(k * angle + rng.uniform(0, 2 * np.pi))
    return np.hypot(row - centre[0], col - centre[1]) / (radius * np.clip(outline, 0.4, 1.8))


def _blend(image: np.ndarray, cover: np.ndarray, colour: np.ndarray | float) -> None:
    image += cover * (np.broadcast_to(np.asarray(colour, dtype=float).reshape(-1, 1, 1), image.shape) - image)


def _on_die(layout: Product, shift: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """A point on the die, in units of the side."""
    low = np.maximum((np.array(layout.die[:2]) - shift) / size + 0.08, 0.08)
    high = np.minimum((np.array(layout.die[2:]) - shift) / size - 0.08, 0.92)
    return rng.uniform(low, high)


def particle(image: np.ndarray, layout: Product, shift: np.ndarray, rng: np.random.Generator) -> None:
    """A dark, irregular grain with a bright rim, larger than dust."""
    size = image.shape[-1]
    d = _blob(size, _on_die(layout, shift, size, rng), rng.uniform(0.035, 0.075), rng)
    _blend(image, 0.45 * np.exp(-(((d - 1.15) / 0.25) ** 2)), 235.0)
    _blend(image, rng.uniform(0.75, 0.95) * np.clip((1.1 - d) / 0.2, 0, 1), rng.uniform(8, 40))


def scratch(image: np.ndarray, layout: Product, shift: np.ndarray, rng: np.random.Generator) -> None:
    """One to three long, nearly parallel, gently curved bright lines."""
    size = image.shape[-1]
    angle = rng.uniform(0, np.pi)
    along, across = np.array([np.sin(angle), np.cos(angle)]), np.array([np.cos(angle), -np.sin(angle)])
    centre, length, bend = _on_die(layout, shift, size, rng), rng.uniform(0.35, 0.8), rng.normal(0, 0.05)
    t = np.linspace(-0.5, 0.5, 9)[:, None]
    bright = rng.random() < 0.8
    for i in range(rng.integers(1, 4)):
        offset = centre + across * 0.035 * i + along * rng.normal(0, 0.05)
        points = offset + along * length * t + across * bend * (4 * t**2 - 0.5)
        _blend(image, rng.uniform(0.6, 0.9) * _stroke(size, points, 0.018), 245.0 if bright else 12.0)


def stain(image: np.ndarray, layout: Product, shift: np.ndarray, rng: np.random.Generator) -> None:
    """A large translucent film with interference colours and a drying rim."""
    size = image.shape[-1]
    d = _blob(size, _on_die(layout, shift, size, rng), rng.uniform(0.14, 0.28), rng, rough=0.3)
    hue = rng.uniform(0, 2 * np.pi)
    colour = 125 + 95 * np.cos(hue + np.array([0, 2.1, 4.2]))
    _blend(image, rng.uniform(0.35, 0.55) * np.clip((1.05 - d) / 0.15, 0, 1), colour)
    _blend(image, 0.4 * np.exp(-(((d - 1.0) / 0.08) ** 2)), 0.4 * colour)


def edge_chip(image: np.ndarray, layout: Product, shift: np.ndarray, rng: np.random.Generator) -> None:
    """A bite out of the die's edge: dark street shows, with a bright fracture line."""
    size = image.shape[-1]
    low, high = (np.array(layout.die[:2]) - shift) / size, (np.array(layout.die[2:]) - shift) / size
    centre = rng.uniform(low + 0.1, high - 0.1)
    side = int(rng.integers(4))
    centre[side % 2] = (low if side < 2 else high)[side % 2]
    d = _blob(size, centre, rng.uniform(0.07, 0.15), rng, rough=0.5)
    _blend(image, 0.7 * np.exp(-(((d - 1.0) / 0.1) ** 2)), 200.0)
    _blend(image, np.clip((1.0 - d) / 0.1, 0, 1), 24.0)


def bridge(image: np.ndarray, layout: Product, shift: np.ndarray, rng: np.random.Generator) -> None:
    """Surplus metal that joins two neighbouring pads."""
    size = image.shape[-1]
    centres = (layout.pads[:, :2] + layout.pads[:, 2:] / 2 - shift) / size
    seen = np.flatnonzero(((centres > 0.06) & (centres < 0.94)).all(1))
    a = int(rng.choice(seen)) if seen.size else int(rng.integers(len(centres)))
    distance = np.hypot(*(centres - centres[a]).T)
    distance[distance < 1.3 * layout.pads[0, 2] / size] = np.inf  # itself, and pads that touch it at a corner
    b = int(distance.argmin())
    middle = (centres[a] + centres[b]) / 2 + rng.normal(0, 0.012, 2)
    points = np.stack([centres[a], middle, centres[b]])
    _blend(image, 0.95 * _stroke(size, points, rng.uniform(0.045, 0.07)), layout.metal * rng.uniform(1.0, 1.15))


def missing_pad(image: np.ndarray, layout: Product, shift: np.ndarray, rng: np.random.Generator) -> None:
    """A bond pad torn off: a dark crater with a torn bright rim where the pad was."""
    size = image.shape[-1]
    centres = (layout.pads[:, :2] + layout.pads[:, 2:] / 2 - shift) / size
    seen = np.flatnonzero(((centres > 0.05) & (centres < 0.95)).all(1))
    which = int(rng.choice(seen)) if seen.size else 0
    d = _blob(size, centres[which], rng.uniform(0.75, 0.95) * layout.pads[which, 2] / size, rng, rough=0.15)
    _blend(image, 0.8 * np.exp(-(((d - 1.1) / 0.15) ** 2)), 0.8 * layout.metal)
    _blend(image, np.clip((1.1 - d) / 0.2, 0, 1), 0.3 * layout.substrate)


def crack(image: np.ndarray, layout: Product, shift: np.ndarray, rng: np.random.Generator) -> None:
    """A dark, jagged, branching line."""
    size = image.shape[-1]
    heading = rng.uniform(0, 2 * np.pi)
    points = [_on_die(layout, shift, size, rng)]
    headings = [heading]
    for _ in range(rng.integers(7, 13)):
        heading += rng.normal(0, 0.55)
        points.append(points[-1] + rng.uniform(0.03, 0.07) * np.array([np.sin(heading), np.cos(heading)]))
        headings.append(heading)
    cover = _stroke(size, np.array(points), 0.020)
    for _ in range(rng.integers(0, 3)):
        i = int(rng.integers(2, len(points)))
        turn = headings[i] + rng.choice([-1, 1]) * rng.uniform(0.6, 1.1)
        steps = np.cumsum(rng.uniform(0.02, 0.05, (4, 1)) * [[np.sin(turn), np.cos(turn)]], axis=0)
        cover = np.maximum(
            cover, _stroke(size, np.vstack([points[i], points[i] + steps + rng.normal(0, 0.008, (4, 2))]), 0.015)
        )
    _blend(image, rng.uniform(0.8, 0.95) * cover, 6.0)


Painter = Callable[[np.ndarray, Product, np.ndarray, np.random.Generator], None]
PAINTERS: dict[str, Painter] = {
    "particle": particle,
    "scratch": scratch,
    "stain": stain,
    "edge_chip": edge_chip,
    "bridge": bridge,
    "missing_pad": missing_pad,
    "crack": crack,
}
DEFECTS = tuple(PAINTERS)
"""Most frequent first, over all factories."""

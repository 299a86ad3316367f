"""A site's own rules: what it lets a server ask of it. They live in the site's configuration and never leave it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from pydantic import Field

from fedtail.errors import FedtailError
from fedtail.federate.protocol.job import Job
from fedtail.models.encoders import is_registered
from fedtail.registry import is_own
from fedtail.settings import Reveal, Section

REVEALS = get_args(Reveal)
"""From the least to the most."""


class PolicyError(FedtailError):
    """The site's policy forbids what the server asked for."""


class Policy(Section):
    """``[policy]`` of a site's configuration. The defaults allow training and reveal no class counts."""

    methods: tuple[str, ...] = ()
    """Allowed methods; empty allows all."""
    code: tuple[str, ...] = ()
    """Models and methods of the user's own (``module:Name``, ``file.py:Name``) that a server may have imported here;
    registered ones need no permission."""
    encoders: tuple[str, ...] = ()
    """Encoders that may encode the images here. Empty allows those that come with an installed package; a file, a
    download (``timm:NAME``) or code (``module:callable``) must be named."""
    reveal: Reveal = "sums"
    """The most that validation may send: ``totals``, ``sums`` (counts per class, masked) or ``classes``."""
    min_sites: int = Field(3, ge=3)
    """Fewest sites whose numbers may be told together: of a masked sum, and of what several sums have in difference."""
    differences: Literal["refuse", "allow"] = "refuse"
    """What to do where the difference of masked sums would tell of fewer sites, because one was missing: refuse the
    later sum, or take part."""
    min_class_count: int = Field(0, ge=0)
    """Refuse to train while a class that is present has fewer training samples."""
    max_rounds_per_day: int = Field(0, ge=0)
    """Training rounds allowed in 24 hours, over all runs; 0 is no limit."""
    min_noise: float = Field(0.0, ge=0)
    """Refuse a run with a smaller local noise multiplier."""
    max_update_mb: float = Field(0.0, ge=0)
    """Refuse a run whose updates are larger; 0 is no limit."""

    def check_job(self, job: Job) -> None:
        """Raise ``PolicyError`` for a run this site does not take part in."""
        if self.methods and job.method not in self.methods:
            raise PolicyError(f"site policy: method {job.method!r} is not allowed (allowed: {', '.join(self.methods)})")
        for kind, name in (("model", job.model), ("method", job.method)):
            if is_own(name) and name not in self.code:
                raise PolicyError(
                    f"site policy: the {kind} {name!r} is code that the server would have imported here; if you trust "
                    "it, add it to policy.code"
                )
        if job.encoding is not None:
            self.check_encoder(job.encoding.name)
        if REVEALS.index(job.reveal) > REVEALS.index(self.reveal):
            allowed = f"set deploy.reveal = {self.reveal!r} on the server"
            raise PolicyError(f"site policy: per-class counts stay here; {allowed}")
        if self.reveal != "classes" and job.build_method().reveals_classes:
            raise PolicyError(
                f"site policy: method {job.method!r} as configured would reveal which classes are here; "
                "choose other options or another method on the server"
            )
        if job.noise < self.min_noise:
            raise PolicyError(f"site policy: local noise {job.noise:g} is below the least allowed {self.min_noise:g}")

    def check_encoder(self, name: str) -> None:
        """Raise ``PolicyError`` for an encoder that may not be opened here."""
        if name in self.encoders or (not self.encoders and is_registered(name)):
            return
        allowed = ", ".join(self.encoders) or "those of installed packages"
        raise PolicyError(
            f"site policy: encoder {name!r} is not allowed (allowed: {allowed}); if you trust it, add it to "
            "policy.encoders"
        )

    def check_data(self, counts: np.ndarray) -> None:
        """Raise if a class is too rare to train on. counts: (C,)."""
        present = counts[counts > 0]
        if self.min_class_count and present.size and int(present.min()) < self.min_class_count:
            raise PolicyError(f"site policy: a class has fewer than {self.min_class_count} training samples")

    def check_size(self, n_values: int) -> None:
        """Raise if an update of ``n_values`` float32 numbers is larger than allowed."""
        megabytes = n_values * 4 / 1e6
        if self.max_update_mb and megabytes > self.max_update_mb:
            raise PolicyError(f"site policy: an update of {megabytes:.1f} MB exceeds {self.max_update_mb:g} MB")


class Ledger:
    """Which rounds were trained when, so that a daily limit survives restarts. In memory without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / "ledger.json" if folder is not None else None
        self.entries: dict[str, float] = {}
        if self.path is not None and self.path.exists():
            self.entries = {str(k): float(v) for k, v in json.loads(self.path.read_text()).items()}

    def enter(self, run: str, round: int, limit: int, now: float | None = None) -> None:
        """Count a round once, however often it is asked for; raise beyond ``limit`` (0: none) in 24 hours."""
        now = time.time() if now is None else now
        key = f"{run}#{round}"
        self.entries = {k: t for k, t in self.entries.items() if t > now - 86400}
        if key in self.entries:
            return
        if limit and len(self.entries) >= limit:
            raise PolicyError(f"site policy: {limit} rounds per day are used up")
        self.entries[key] = now
        if self.path is not None:
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.entries))
            temporary.replace(self.path)

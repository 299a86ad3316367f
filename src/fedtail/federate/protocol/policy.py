"""A site's own rules: what it lets a server ask of it. They live in the site's configuration and never leave it."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np
from pydantic import Field

from fedtail.core.privacy import gaussian_epsilon
from fedtail.core.records import Task
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.job import Job
from fedtail.models.encoders import is_registered
from fedtail.registry import is_own
from fedtail.rounds.batches import batch_of
from fedtail.settings import Reveal, Section

REVEALS = get_args(Reveal)
"""From the least to the most."""


TRUST = ("server", "blind", "private")
"""From the least to the most that a site asks for."""
OWN_CODE = (
    ("model", "model", "name"),
    ("method", "method", "name"),
    ("rate strategy", "rates", "name"),
    ("metric", "run", "metric"),
)
"""What a document may name that a site would have to import, and where."""


class PolicyError(CodedError):
    """The site's policy forbids what the server asked for."""


class Policy(Section):
    """``[policy]`` of a site's configuration. The defaults allow training and reveal no class counts."""

    trust: Literal["server", "blind", "private"] = "blind"
    """The least that a run must offer: ``blind`` refuses a server that wants this site's own updates, ``private`` also
    sums without noise; ``server`` trusts the server with this site's rows."""
    methods: tuple[str, ...] = ()
    """Allowed methods; empty allows all."""
    code: tuple[str, ...] = ()
    """Custom models and methods (``module:Name``, ``file.py:Name``) that the server may ask this site to import;
    registered ones need no permission."""
    encoders: tuple[str, ...] = ()
    """Encoders that may encode images here. Empty allows those that come with an installed package; a file, a download
    (``timm:NAME``) or code (``module:callable``) must be listed."""
    reveal: Reveal = "sums"
    """The most that validation may send: ``totals``, ``sums`` (per-class counts, masked) or ``classes``."""
    min_sites: int = Field(3, ge=3)
    """Minimum number of sites that a masked sum, or the difference of several, may cover."""
    differences: Literal["refuse", "allow"] = "refuse"
    """What to do if the difference of masked sums would cover fewer sites, because one was missing: refuse the later
    sum, or take part."""
    updates: Literal["plain", "masked"] = "plain"
    """``masked`` refuses runs in which the server would see this site's individual updates."""
    min_class_count: int = Field(0, ge=0)
    """Refuse to train while any class present has fewer training samples than this."""
    max_rounds_per_day: int = Field(1000, ge=0)
    """Training messages answered in 24 hours, over all runs; a repeated message counts once. 0 means no limit, here and
    below."""
    max_statistics_per_day: int = Field(100, ge=0)
    """Requests for column or pixel sums answered in 24 hours, over all runs."""
    max_validations_per_day: int = Field(200_000, ge=0)
    """Models validated or tested in 24 hours, over all runs; a search over 12 sites has 4,096 per round."""
    max_seeds_per_day: int = Field(20, ge=0)
    """Different splits into training, validation and test samples in 24 hours, one per seed and client number:
    comparing sums over many splits would reveal single rows."""
    max_probes: int = Field(16, ge=0)
    """Local runs that one message may request."""
    max_lr: float = Field(10.0, ge=0)
    """Maximum learning rate."""
    min_batch: int = Field(8, ge=1)
    """Minimum batch size that a server may request."""
    min_steps: int = Field(1, ge=1)
    """Refuse to train with fewer local steps: a single step is the gradient at a model of the server's choice."""
    max_epochs: int = Field(100, ge=0)
    """Maximum number of passes over the data per round."""
    max_move: float = Field(10.0, ge=0)
    """How far a round's model may be from the last one trained here in the same run, as a multiple of this site's
    longest update; a run's first model must be the one its seed gives."""
    min_row_samples: int = Field(3, ge=1)
    """Withhold the parts of an update that belong to hidden units active on fewer samples than this, alone or by
    difference; 1 withholds nothing, and the federation then matches the simulator bit for bit even with few samples."""
    min_cell: int = Field(5, ge=0)
    """If a model gives all but fewer than this many samples the same answer, its validation result gets noise with this
    standard deviation (a tenth of the samples if that is less): otherwise a model with one answer for everything would
    count a class. 0 adds no noise."""
    min_noise: float = Field(0.0, ge=0)
    """Refuse runs with a smaller local noise multiplier."""
    max_epsilon: float = Field(0.0, ge=0)
    """Refuse to train once the noisy updates of all runs together would exceed this epsilon; also refuses runs without
    local noise."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """The delta for ``max_epsilon``."""
    max_message_mb: float = Field(1024.0, ge=0)
    """Refuse larger messages, before decoding them."""
    max_update_mb: float = Field(0.0, ge=0)
    """Refuse runs with larger updates."""

    def check_document(self, document: dict[str, Any]) -> None:
        """Raise ``PolicyError`` for a document that this site does not sign; before anything of it is built."""
        settings = document["settings"]
        if TRUST.index(self.trust) > TRUST.index(str(document["trust"])):
            raise PolicyError("policy-trust", f"site policy: trust = {self.trust!r} is more than the run offers")
        if len(document["sites"]) < self.min_sites:
            raise PolicyError("policy-sites", f"site policy: fewer sites than policy.min_sites = {self.min_sites}")
        if self.methods and settings["method"].get("name") not in self.methods:
            raise PolicyError("policy-method", f"site policy: the method is not one of {', '.join(self.methods)}")
        for kind, section, key in OWN_CODE:
            name = str(settings[section].get(key, ""))
            if is_own(name) and name not in self.code:
                raise PolicyError("policy-code", f"site policy: the {kind} {name!r} is custom code; see policy.code")

    def check_job(self, job: Job) -> None:
        """Raise ``PolicyError`` for a run this site does not take part in."""
        if self.methods and job.method not in self.methods:
            raise PolicyError(
                "policy-method",
                f"site policy: method {job.method!r} is not allowed (allowed: {', '.join(self.methods)})",
            )
        for kind, name in (("model", job.model), ("method", job.method)):
            if is_own(name) and name not in self.code:
                raise PolicyError(
                    "policy-code",
                    f"site policy: the {kind} {name!r} is custom code that this site would have to import; if you "
                    "trust it, add it to policy.code",
                )
        if job.encoding is not None:
            self.check_encoder(job.encoding.name)
        if REVEALS.index(job.reveal) > REVEALS.index(self.reveal):
            raise PolicyError(
                "policy-reveal",
                f"site policy: per-class counts stay here; set deploy.reveal = {self.reveal!r} on the server",
            )
        if self.reveal != "classes" and job.build_method().reveals_classes:
            raise PolicyError(
                "policy-reveal",
                f"site policy: method {job.method!r} as configured would reveal which classes this site has; "
                "choose other options or another method on the server",
            )
        if self.updates == "masked" and job.updates != "masked":
            raise PolicyError(
                "policy-masks", "site policy: only masked updates may leave this site (deploy.updates = 'masked')"
            )
        if job.noise < self.min_noise or (self.max_epsilon and not (job.noise or job.shares)):
            least = f"{self.min_noise:g}" if self.min_noise else "more than 0, because policy.max_epsilon is set"
            raise PolicyError("policy-noise", f"site policy: local noise {job.noise:g} is below the minimum of {least}")
        if (batch := batch_of(job.local)) < self.min_batch:
            raise PolicyError(
                "policy-training",
                f"site policy: a batch of {batch} samples is below policy.min_batch = {self.min_batch}",
            )
        if self.max_epochs and job.local.epochs > self.max_epochs:
            raise PolicyError(
                "policy-training",
                f"site policy: {job.local.epochs} epochs are above policy.max_epochs = {self.max_epochs}",
            )

    def check_task(self, task: Task) -> None:
        """Raise ``PolicyError`` for a training message that asks for too much."""
        if self.max_probes and task.n_probes > self.max_probes:
            raise PolicyError(
                "policy-training",
                f"site policy: {task.n_probes} local runs in a message are above policy.max_probes = {self.max_probes}",
            )
        lrs = [task.lr, *np.ravel(task.probes.get("lr", ())).tolist()]
        if not all(0 <= lr <= (self.max_lr or math.inf) for lr in lrs):
            raise PolicyError(
                "policy-training",
                f"site policy: learning rate {max(lrs, key=abs):g} is outside 0 .. policy.max_lr = {self.max_lr:g}",
            )

    def check_steps(self, steps: int) -> None:
        """Raise ``PolicyError`` for a local run that was too short."""
        if steps < self.min_steps:
            raise PolicyError(
                "policy-training",
                f"site policy: {steps} steps are below policy.min_steps = {self.min_steps}; lower local.batch_size",
            )

    def check_encoder(self, name: str) -> None:
        """Raise ``PolicyError`` for an encoder that may not be opened here."""
        if name in self.encoders or (not self.encoders and is_registered(name)):
            return
        allowed = ", ".join(self.encoders) or "those of installed packages"
        raise PolicyError(
            "policy-encoder",
            f"site policy: encoder {name!r} is not allowed (allowed: {allowed}); if you trust it, add it to "
            "policy.encoders",
        )

    def check_data(self, counts: np.ndarray) -> None:
        """Raise if a class is too rare to train on. counts: (C,)."""
        present = counts[counts > 0]
        if self.min_class_count and present.size and int(present.min()) < self.min_class_count:
            raise PolicyError(
                "policy-rare", f"site policy: a class has fewer than {self.min_class_count} training samples"
            )

    def check_size(self, n_values: int) -> None:
        """Raise if an update of ``n_values`` float32 numbers is larger than allowed."""
        megabytes = n_values * 4 / 1e6
        if self.max_update_mb and megabytes > self.max_update_mb:
            raise PolicyError(
                "policy-size", f"site policy: an update of {megabytes:.1f} MB exceeds {self.max_update_mb:g} MB"
            )

    def check_message(self, n_bytes: int) -> None:
        """Raise if a message is larger than allowed."""
        if n_bytes > self.message_bytes:
            raise PolicyError(
                "policy-size",
                f"site policy: a message of {n_bytes / 1e6:.1f} MB exceeds max_message_mb = {self.max_message_mb:g}",
            )

    @property
    def message_bytes(self) -> float:
        """Most bytes of a message."""
        return self.max_message_mb * 1e6 if self.max_message_mb else math.inf

    def check_epsilon(self, releases: dict[float, int]) -> None:
        """Raise if noisy updates, noise multiplier -> how many, cost more than is allowed."""
        if self.max_epsilon and (spent := gaussian_epsilon(releases, self.delta)) > self.max_epsilon:
            raise PolicyError(
                "policy-limit",
                f"site policy: with this answer epsilon would be {spent:.3g}, above policy.max_epsilon = "
                f"{self.max_epsilon:g} at delta {self.delta:g}",
            )

"""A site's own rules: what it takes part in. They live in the site's configuration and never leave it.

Read without torch, which what is forbidden needs only where it is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedtail.federate.protocol.faults import CodedError
from fedtail.registry import is_own
from fedtail.settings import Section

if TYPE_CHECKING:
    from fedtail.federate.protocol.job import Job

TRUST = ("server", "blind", "private")
"""From the least to the most that a site asks for."""
APART = (("model", "encoder"), ("decision", "find"), ("rates", "labels"))
"""Where else a document's settings have a text: the encoder is compared by itself, and the others name no code."""


class PolicyError(CodedError):
    """The site's policy forbids what was asked for."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, f"site policy: {text}")


class Policy(Section):
    """``[policy]`` of a site's configuration."""

    trust: Literal["server", "blind", "private"] = "blind"
    """The least that a run must offer: ``blind`` refuses a server that wants this site's own updates, ``private`` also
    sums without noise; ``server`` trusts the server with this site's rows."""
    methods: tuple[str, ...] = ()
    """Allowed methods; empty allows all."""
    code: tuple[str, ...] = ()
    """Custom models, methods, rate strategies and metrics (``module:Name``, ``file.py:Name``) that a run may have this
    site import; registered ones need no permission."""
    encoders: tuple[str, ...] = ()
    """Encoders that may encode images here. Empty allows those that come with an installed package; a file, a download
    (``timm:NAME``) or code (``module:callable``) must be listed."""
    min_sites: int = Field(3, ge=3)
    """Minimum number of sites that a sum covers."""
    max_epsilon: float = Field(0.0, ge=0)
    """Refuse once all runs together would exceed this epsilon, for each row; also refuses runs without noise. 0 means
    no limit, here and below."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """The delta for ``max_epsilon``."""
    max_message_mb: float = Field(1024.0, ge=0)
    """Refuse larger messages, before decoding them."""

    def check_document(self, document: dict[str, Any]) -> None:
        """Raise ``PolicyError`` for a document that this site does not sign; before anything of it is built."""
        self.check_trust(str(document["trust"]))
        if len(document["sites"]) < self.min_sites:
            raise PolicyError("policy-sites", f"fewer sites than policy.min_sites = {self.min_sites}")
        self.check_code(document)

    def check_code(self, document: dict[str, Any]) -> None:
        """Raise ``PolicyError`` for a method or code of a document that this site does not run. Wherever a text is that
        names code, it may be imported: no list of such places stays complete."""
        if (settings := document.get("settings")) is not None:  # a question is about a model that the site has
            keys = ((section, key) for section, part in settings.items() for key in part if (section, key) not in APART)
            names = [(f"{s}.{key}", text) for s, key in keys for text in texts(settings[s][key])]
            self._check_names(names, str(settings["method"].get("name", "")))

    def check_job(self, job: Job) -> None:
        """Raise ``PolicyError`` for a run of a trusted server that this site does not take part in."""
        self._check_names([("model", job.model), ("method", job.method), ("metric", job.metric)], job.method)
        if job.encoding is not None:
            self.check_encoder(job.encoding.name)

    def _check_names(self, names: Iterable[tuple[str, str]], method: str) -> None:
        """names: what it is, and a name, which may be that of code."""
        for kind, name in names:
            if is_own(name) and name not in self.code:
                raise PolicyError(
                    "policy-code",
                    f"the {kind} {name!r} is custom code that this site would have to import; if you trust it, add it "
                    "to policy.code",
                )
        if self.methods and method not in self.methods:
            raise PolicyError("policy-method", f"method {method!r} is not allowed (allowed: {', '.join(self.methods)})")

    def check_trust(self, offered: str) -> None:
        """Raise unless a run asks for no more trust than this site has."""
        wanted = "private" if self.max_epsilon else self.trust
        if offered not in TRUST or TRUST.index(wanted) > TRUST.index(offered):
            raise PolicyError(
                "policy-trust",
                f"the run has deploy.trust = {offered!r}, this site requires {wanted!r}; if you trust the server with "
                f"the rows of this site, set policy.trust = {offered!r}",
            )

    def check_encoder(self, name: str) -> None:
        """Raise ``PolicyError`` for an encoder that may not be opened here."""
        from fedtail.models.encoders.opening import is_registered

        if name in self.encoders or (not self.encoders and is_registered(name)):
            return
        allowed = ", ".join(self.encoders) or "those of installed packages"
        raise PolicyError(
            "policy-encoder",
            f"encoder {name!r} is not allowed (allowed: {allowed}); if you trust it, add it to policy.encoders",
        )

    def check_message(self, n_bytes: int) -> None:
        """Raise if a message is larger than allowed."""
        if self.max_message_mb and n_bytes > self.max_message_mb * 1e6:
            said = f"a message of {n_bytes / 1e6:.1f} MB exceeds max_message_mb = {self.max_message_mb:g}"
            raise PolicyError("policy-size", said)

    def check_epsilon(self, releases: dict[float, int]) -> None:
        """Raise if noisy answers, noise multiplier -> how many, cost more than is allowed."""
        from fedtail.core.privacy import gaussian_epsilon

        if self.max_epsilon and (spent := gaussian_epsilon(releases, self.delta)) > self.max_epsilon:
            raise PolicyError(
                "policy-limit",
                f"with this answer epsilon would be {spent:.3g}, above policy.max_epsilon = {self.max_epsilon:g} at "
                f"delta {self.delta:g}",
            )


def texts(value: Any) -> Iterator[str]:
    """All texts in some JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from texts(part)

"""Flower's control API: register sites, list nodes, start and stop runs.

It has no authentication of its own, so the SuperLink stays on loopback and these calls are made on its machine.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.operate.bundle import write_bundle
from fedtail.federate.operate.certificates import public_key_bytes
from fedtail.federate.operate.service import tls_fault

OVER = ("finished", "unknown")
"""How Flower's word for a run that is over begins; it forgets runs with its database."""


class Control:
    """A connection to the SuperLink of a deployment. Use as a context."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.client = ControlHttpClient.from_server_address(
            server_address=f"{deployment.host}:{deployment.port}",
            insecure=False,
            root_certificates=(deployment.server / "ca.crt").read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="fedtail")],
        )

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def register(self) -> list[str]:
        """Make the sites' public keys known; returns the sites for which that is new."""
        known = {bytes(node.public_key) for node in self._known()}
        new = {site: key for site in self.deployment.sites if (key := self._key(site)) and key not in known}
        for site, key in new.items():
            self._call("RegisterNode", RegisterNodeRequest(public_key=key, name=site))
        return list(new)

    def unregister(self, site: str) -> None:
        """Let nobody in with this site's public key any more."""
        key = self._key(site)
        for node in self._known():
            if bytes(node.public_key) == key:
                self._call("UnregisterNode", UnregisterNodeRequest(node_id=node.node_id))

    def nodes(self) -> dict[str, str]:
        """Return Flower's status of each site, in the order of the deployment: online, offline, not registered ..."""
        found = {bytes(node.public_key): str(node.status) for node in self._known()}
        keys = {site: self._key(site) for site in self.deployment.sites}
        return {s: found.get(key, "not registered") if key else "without a key" for s, key in keys.items()}

    def start_run(self, **overrides: Any) -> int:
        """Send the app bundle, as this version of fedtail has it, and start a run; returns Flower's run id."""
        app = self.deployment.folder / "app"
        write_bundle(app)
        content = build_fab_from_disk(app)
        request = StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})),
            override_config=user_config_to_proto(overrides),
        )
        return int(self._call("StartRun", request).run_id)

    def run_status(self, run_id: int) -> tuple[str, str]:
        """Return Flower's status of a run (``running``, ``finished:completed`` ..., ``unknown``) and its details."""
        found = self._call("ListRuns", ListRunsRequest()).run_dict
        if run_id not in found:
            return "unknown", ""
        status = found[run_id].status
        return f"{status.status}:{status.sub_status}".rstrip(":"), status.details

    def active(self) -> list[int]:
        """Return the runs that have not ended, questions included."""
        return [run for run in self._call("ListRuns", ListRunsRequest()).run_dict if not self.is_over(run)]

    def is_over(self, run_id: int) -> bool:
        """Return whether a run has ended, or is forgotten."""
        return self.run_status(run_id)[0].startswith(OVER)

    def stop_run(self, run_id: int) -> bool:
        """End a run; False if it is over, be it only since a moment ago."""
        if self.is_over(run_id):
            return False
        try:
            self._call("StopRun", StopRunRequest(run_id=run_id))
        except FedtailError:
            if not self.is_over(run_id):
                raise
            return False
        return True

    def _key(self, site: str) -> bytes:
        file = self.deployment.site(site) / "site.pub"
        return public_key_bytes(file) if file.is_file() else b""

    def _known(self) -> list[Any]:
        """Flower's nodes that it lets in."""
        return [n for n in self._call("ListNodes", ListNodesRequest()).nodes_info if n.status != "unregistered"]

    def _call(self, method: str, request: Any) -> Any:
        try:
            return getattr(self.client, method)(request)
        except httpx.HTTPStatusError as error:
            raise FedtailError(f"Flower refused {method}: {error.response.text[:300]}") from None
        except httpx.HTTPError:
            raise no_answer(self.deployment) from None


def no_answer(deployment: Deployment) -> FedtailError:
    """One line for a SuperLink that is down, or that nobody believes."""
    where = f"{deployment.host}:{deployment.port}"
    if "CERTIFICATE_VERIFY" in (fault := tls_fault(where, deployment.server / "ca.crt", 2.0)):
        renew = f"`fedtail deploy renew {deployment.shown}`"
        return FedtailError(f"the SuperLink's certificate is not valid ({fault}); {renew}, and start its unit again")
    return FedtailError(
        f"no SuperLink answers at {where}; start its unit, or for a rehearsal: fedtail deploy up {deployment.shown}"
    )


def is_healthy(deployment: Deployment) -> bool:
    """Return whether the SuperLink answers over TLS with our CA's certificate."""
    return not tls_fault(f"{deployment.host}:{deployment.port}", deployment.server / "ca.crt", 2.0)


def wait_until_healthy(deployment: Deployment, seconds: float, log: Path) -> None:
    """Wait for a SuperLink that was just started."""
    deadline = time.monotonic() + seconds
    while not is_healthy(deployment):
        if time.monotonic() > deadline:
            raise FedtailError(f"the SuperLink did not start within {seconds:g} s; see {log}")
        time.sleep(0.2)

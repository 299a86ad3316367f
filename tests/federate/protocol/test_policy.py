"""A site decides for itself what a server may ask of it."""

from __future__ import annotations

import pytest

from fedtail.errors import FedtailError
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.policy import Policy, PolicyError
from fedtail.federate.site.config import Rules
from fedtail.settings import checked


def job(**more: object) -> Job:
    return Job("r", "mlp", (3,), ("a", "b"), "fedcgnm", 5, **more)  # type: ignore[arg-type]


def test_a_method_that_is_not_on_the_list_is_refused() -> None:
    with pytest.raises(PolicyError, match="method 'fedcgnm' is not allowed"):
        Policy(methods=("fedavg",)).check_job(job())
    Policy(methods=("fedavg", "fedcgnm")).check_job(job())


def test_a_server_cannot_have_code_imported_that_the_site_did_not_name() -> None:
    asked = Job("r", "subprocess:run", (3,), ("a", "b"), "fedcgnm", 5, {"args": "id", "shell": True})
    with pytest.raises(PolicyError, match="custom code that this site would have to import"):
        Policy().check_job(asked)
    Policy(code=["subprocess:run"]).check_job(asked)


def test_an_unknown_key_names_the_nearest_right_one() -> None:
    with pytest.raises(FedtailError, match="did you mean 'methods'"):
        checked(Rules, {"policy": {"method": ["fedavg"]}})

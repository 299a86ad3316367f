"""A site decides for itself what a server may ask of it."""

from __future__ import annotations

import numpy as np
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


def test_class_counts_stay_at_the_site_by_default() -> None:
    with pytest.raises(PolicyError, match="per-class counts stay here"):
        Policy().check_job(job(reveal="classes"))
    Policy(reveal="classes").check_job(job(reveal="classes"))


@pytest.mark.parametrize(("method", "options"), [("logit_adjustment", {"prior": "global"}), ("fednoro", {})])
def test_a_method_that_shows_which_classes_a_site_has_is_refused_by_default(method: str, options: dict) -> None:
    asked = Job("r", "mlp", (3,), ("a", "b"), method, 5, method_options=options)
    with pytest.raises(PolicyError, match="reveal which classes this site has"):
        Policy().check_job(asked)
    Policy(reveal="classes").check_job(asked)
    Policy().check_job(Job("r", "mlp", (3,), ("a", "b"), "logit_adjustment", 5))


def test_too_little_noise_is_refused() -> None:
    with pytest.raises(PolicyError, match="below the minimum of"):
        Policy(min_noise=1.0).check_job(job(noise=0.5))


def test_a_class_that_is_too_rare_is_refused_and_an_absent_one_is_not() -> None:
    Policy(min_class_count=5).check_data(np.array([10, 0, 5]))
    with pytest.raises(PolicyError, match="fewer than 5"):
        Policy(min_class_count=5).check_data(np.array([10, 4]))


def test_an_unknown_key_names_the_nearest_right_one() -> None:
    with pytest.raises(FedtailError, match="did you mean 'methods'"):
        checked(Rules, {"policy": {"method": ["fedavg"]}})

"""Runs on a SuperLink that is up: start one, follow it, end it, and say where it stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtail.core.scores import Scores
from fedtail.errors import FedtailError
from fedtail.federate.counted import What, write_question
from fedtail.federate.deployment import Deployment
from fedtail.federate.operate.control import OVER, Control, is_healthy
from fedtail.federate.operate.create import write_config
from fedtail.federate.status import RUN_LOCK, follow
from fedtail.files import is_locked, read_json, write_atomically
from fedtail.runs.config import load_config
from fedtail.runs.monitor import Seen
from fedtail.settings import Settings

Show = Callable[[dict[str, Any]], None]
"""What is told of every change of a run's status."""
ENDED = ("finished", "failed", "stopped")
RUN, ANSWER = "run.json", "answer.json"
"""In ``server/``: where a run stands, and a question to the sites."""


def start(deployment: Deployment, config: Settings | None = None, *, resume: bool = False) -> int:
    """Start a run over the sites that are online; returns Flower's run id. By default the deployment's own config."""
    with Control(deployment) as control:
        _end_previous(deployment, control, resume)
        path = write_config(deployment, config)
        return control.start_run(
            config=str(path), deployment=str(deployment.folder), sites=len(deployment.sites), resume=resume
        )


def count(
    deployment: Deployment,
    what: What,
    folder: Path,
    reference: Seen | None = None,
    on_change: Show = lambda status: None,
) -> Scores | Seen:
    """Have all sites count what the model in a run folder makes of their rows, without training."""
    config = load_config(deployment.config)
    question = write_question(what, folder, deployment.sites, config.deploy.trust, reference)
    asked, answer = deployment.server / "question.json", deployment.server / ANSWER
    known = None if reference is None else reference.to_json()
    with Control(deployment) as control:
        _end_previous(deployment, control)
        write_atomically(asked, json.dumps({"question": question, "folder": str(folder.resolve()), "reference": known}))
        answer.unlink(missing_ok=True)
        path = write_config(deployment, config, "question.toml")  # the last run's stays, for its --resume
        run_id = control.start_run(config=str(path), deployment=str(deployment.folder), question=str(asked))
    try:
        counted = wait(deployment, run_id, on_change, answer)["counts"]
    except KeyboardInterrupt:
        stop(deployment)  # else it waits on for sites that are away, and nothing else can begin
        raise
    return (Scores if what == "evaluate" else Seen).from_json(counted)


def stop(deployment: Deployment) -> bool:
    """End what is going on, a run or a question to the sites; a run's checkpoint stays. False if there is nothing."""
    if not is_healthy(deployment):
        return False
    with Control(deployment) as control:
        ended = [control.stop_run(run_id) for run_id in control.active()]
    return any(ended)


def wait(
    deployment: Deployment, run_id: int, on_change: Show = lambda status: None, file: Path | None = None
) -> dict[str, Any]:
    """Follow a run to its end; returns its last status. ``FedtailError`` if it failed."""
    return follow(lambda: read_status(deployment, run_id, file), on_change, lambda: fault(deployment, run_id))


def fault(deployment: Deployment, run_id: int) -> str:
    """Return why a run does not go on, in one line; empty if Flower says that it does."""
    with Control(deployment) as control:
        status, details = control.run_status(run_id)
    if status.startswith("finished:stopped"):
        return f"it was stopped; resume a run with `fedtail deploy run {deployment.shown} --resume`"
    if not status.startswith(OVER):
        return ""
    log = f"{deployment.server}/superlink.log, or its unit's journal"
    return f"Flower ended the run ({' '.join([status, details]).strip()}); see {log}"


def where(deployment: Deployment) -> dict[str, Any]:
    """Return the running or last run's status; one that neither goes on nor ended by itself is ``stopped``."""
    now = read_status(deployment)
    if now and now["state"] not in ENDED and not is_locked(deployment.server / RUN_LOCK):
        return {**now, "state": "stopped"}
    return now


def read_status(deployment: Deployment, run_id: int | None = None, path: Path | None = None) -> dict[str, Any]:
    """Return what the running or last run reports; empty if none has started, or if it is not the one asked for."""
    path = path or deployment.server / RUN
    now = read_json(path)
    return now if run_id is None or now.get("run") == str(run_id) else {}


def _end_previous(deployment: Deployment, control: Control, resume: bool = False) -> None:
    """End a run whose server died, for which sites would work on; what is active otherwise is an error."""
    told = [read_status(deployment, path=deployment.server / file) for file in (RUN, ANSWER)]
    over = {status["run"] for status in told if status.get("state") in ENDED}  # Flower hears of it a moment later
    for run_id in control.active():
        if resume:
            control.stop_run(run_id)
        elif str(run_id) not in over:
            why = "a run, or a question to the sites, is already active"
            raise FedtailError(f"{why}; stop it first with `fedtail deploy stop {deployment.shown}`")

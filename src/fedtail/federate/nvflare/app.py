"""fedtail on NVFlare: a controller that runs the round loop, an executor that is the site, the job for them, and its
rehearsal in NVFlare's simulator, with a process for every site on this machine."""

from __future__ import annotations

import json
import math
import queue
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.job_config.api import FedJob

from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment
from fedtail.federate.nvflare import job_code
from fedtail.federate.operate import processes
from fedtail.federate.operate.create import write_config
from fedtail.federate.operate.processes import PROGRAMS, environment
from fedtail.federate.protocol.transport import Errors, Take, is_parts, split_phase, with_phase
from fedtail.federate.protocol.wire import Parts, error_parts
from fedtail.federate.server import federate, roster
from fedtail.federate.site.config import load_site
from fedtail.federate.site.site import Site, code_of, open_site
from fedtail.federate.status import Status, follow
from fedtail.rounds.acceptance import least
from fedtail.runs.config import load_config

ASK_SECONDS = 0.2
"""Between two of a site's questions for work; by itself NVFlare has sites ask every 2 seconds, twice a round."""


class FedtailController(Controller):
    """The server: waits for the sites, then trains. ``status_file`` is where it tells how it goes."""

    def __init__(self, config: str, sites: list[str], status_file: str = "", resume: bool = False) -> None:
        super().__init__()
        self.config, self.sites, self.status_file, self.resume = config, sites, status_file, resume

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare: sites say hello when the run starts."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        config = load_config(self.config)
        try:
            with Status(Path(self.status_file) if self.status_file else None, config) as status:
                names = roster(config, self.sites, resume=self.resume)
                transport = NVFlareTransport(self, fl_ctx, abort_signal, names)
                with_status = partial(federate, on_round=status.round, on_start=status.start, on_wait=status.waiting)
                status.finish(with_status(config, transport, names, resume=self.resume).folder)
        except FedtailError as error:
            self.system_panic(str(error), fl_ctx)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is left open."""


class FedtailExecutor(Executor):
    """A site. NVFlare keeps its process alive over rounds, so the site itself lives here: no worker is needed."""

    def __init__(self, site_file: str) -> None:
        super().__init__()
        self.site_file = site_file
        self._site: Site | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        reply = make_reply(ReturnCode.OK)
        try:
            reply["parts"] = self._open(fl_ctx.get_identity_name()).handle(*split_phase(shareable["parts"]))
        except FedtailError as error:  # of its configuration or data; its words are for this site's operator
            self.log_error(fl_ctx, str(error))
            reply["parts"] = error_parts(code_of(error))
        return reply

    def _open(self, name: str) -> Site:
        if self._site is None:
            config = load_site(self.site_file.format(name=name))
            torch.set_num_threads(config.worker.threads)
            self._site = open_site(config)
        return self._site


def make_job(
    name: str, config: Path, sites: list[str], site_file: str, status_file: Path | None = None, *, resume: bool = False
) -> FedJob:
    """The job: ``site_file`` is where a site finds its configuration; ``{name}`` stands for the site's name."""
    job = FedJob(name=name, min_clients=least(load_config(config).run.quorum, len(sites)))
    # Installed at both ends. Otherwise NVFlare copies the sources of all that fedtail imports into the job, torch too.
    job.set_app_packages([__name__.partition(".")[0]])
    controller = FedtailController(str(config), sites, "" if status_file is None else str(status_file), resume)
    job.to_server(controller)
    job.to_server({"server": {"task_request_interval": ASK_SECONDS}})
    job.add_file_to_server(str(job_code.__file__))
    for site in sites:
        job.to(FedtailExecutor(site_file), site, tasks=[TASK])
        job.add_file_to(str(job_code.__file__), site)
    return job


def rehearse(
    deployment: Deployment,
    *,
    resume: bool = False,
    timeout: float = 3600.0,
    on_change: Callable[[dict[str, Any]], None] = lambda now: None,
) -> dict[str, Any]:
    """Run the deployment's config in NVFlare's simulator; returns the run's last status."""
    home = deployment.folder / "nvflare"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    status, log = home / "run.json", home / "simulator.log"
    sites, site_file = list(deployment.sites), str(deployment.folder / "sites" / "{name}" / "site.toml")
    make_job("fedtail", write_config(deployment), sites, site_file, status, resume=resume).export_job(str(home))
    command = [str(PROGRAMS / "nvflare"), "simulator", "-w", str(home / "workspace")]
    command += ["-c", ",".join(sites), "-t", str(len(sites)), str(home / "fedtail")]

    def fault() -> str:
        if processes.find(deployment.folder, "nvflare"):
            return ""
        lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        errors = [line for line in lines if "ERROR" in line or "Error: " in line]
        return f"NVFlare's simulator ended: {(errors or lines)[-1].strip()[-300:]}; see {log}"

    try:
        on_change({"state": f"starting NVFlare's simulator of {len(sites)} sites"})
        processes.start(deployment.folder, "nvflare", command, log, environment(HOME=str(home)))
        return follow(
            lambda: json.loads(status.read_text()) if status.is_file() else {}, on_change, fault, timeout=timeout
        )
    finally:
        processes.stop(deployment.folder)


TASK = "fedtail"
"""All tasks have this name, which an executor is registered for; what is asked travels inside."""


class NVFlareTransport:
    """``names[k]`` is the NVFlare client behind client k."""

    name = "nvflare"

    def __init__(self, controller: Any, fl_ctx: FLContext, abort: Signal, names: Sequence[str]) -> None:
        self.controller, self.fl_ctx, self.abort, self.names = controller, fl_ctx, abort, list(names)

    def exchange(self, phase: str, payloads: Mapping[int, Parts], timeout: float | None, take: Take) -> Errors:
        arrived: queue.SimpleQueue[tuple[int, Parts]] = queue.SimpleQueue()
        heard: set[int] = set()
        errors: Errors = {}
        clients = {name: k for k, name in enumerate(self.names)}

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            client, result = clients[client_task.client.name], client_task.result
            client_task.result = None  # it may be large, and NVFlare would keep it
            if client in heard or client in errors:
                return  # a duplicate
            if result.get_return_code(ReturnCode.OK) != ReturnCode.OK:
                errors[client] = f"the site's executor failed: {result.get_return_code()}"
            elif not is_parts(result.get("parts")):
                errors[client] = "malformed reply: it has no parts"
            else:
                arrived.put((client, result["parts"]))
                heard.add(client)  # only now: who is heard is in the queue

        online = {client.name for client in self.fl_ctx.get_engine().get_clients()}
        errors |= {k: "the site is offline" for k in payloads if self.names[k] not in online}
        tasks = {}
        for client in sorted(set(payloads) - set(errors)):
            data = Shareable()
            data["parts"] = with_phase(phase, payloads[client])
            whole = math.ceil(timeout or 0)  # NVFlare takes whole seconds, and 0 for no limit at all
            tasks[client] = Task(TASK, data, timeout=whole, result_received_cb=received)
            self.controller.send(tasks[client], self.fl_ctx, targets=[self.names[client]])
        while (pending := [k for k in tasks if k not in heard and k not in errors]) or not arrived.empty():
            if self.abort.triggered:
                raise FedtailError("NVFlare aborted the job")
            while not arrived.empty():
                take(*arrived.get())
            for client in pending:
                status = tasks[client].completion_status
                if status is not None and client not in heard:
                    errors.setdefault(client, f"no reply within {timeout or 0:g} s ({status.value})")
            if pending:
                time.sleep(0.05)
        return errors

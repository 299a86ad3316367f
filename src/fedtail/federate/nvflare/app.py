"""fedtail on NVFlare: a controller that runs the round loop, an executor that is the site, and the job for them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.job_config.api import FedJob

from fedtail.errors import FedtailError
from fedtail.federate.nvflare import job_code
from fedtail.federate.nvflare.transport import TASK, NVFlareTransport
from fedtail.federate.protocol.transport import split_phase
from fedtail.federate.protocol.wire import error_parts
from fedtail.federate.server import federate, roster
from fedtail.federate.site.config import load_site
from fedtail.federate.site.site import Site, code_of
from fedtail.federate.status import Status
from fedtail.rounds.acceptance import least
from fedtail.runs.config import load_config

ASK_SECONDS = 0.5
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
            self._site = config.open_site()
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

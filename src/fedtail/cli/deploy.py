"""``fedtail deploy``: the same algorithms across machines, on Flower."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtail.cli import deploy_life, deploy_members, deploy_view
from fedtail.cli.deploy_view import Folder, load, need_flower
from fedtail.cli.options import Arguments, Json, split_arguments
from fedtail.cli.progress import Stopped, console
from fedtail.errors import FedtailError
from fedtail.runs.config import changed, load_config
from fedtail.settings import Settings

if TYPE_CHECKING:
    from fedtail.federate.deployment import Deployment

app = typer.Typer(help="Run a federation across machines, over TLS, with Flower.", no_args_is_help=True)

PORT = 9092
for command in (*deploy_members.COMMANDS, *deploy_life.COMMANDS):
    app.command()(command)


@app.command()
def init(
    folder: Folder,
    arguments: Arguments = None,
    sites: Annotated[str, typer.Option(help="Comma-separated site names.")] = "",
    local: Annotated[int, typer.Option(help="Instead of names: this many sites, named site-1 to site-N.")] = 0,
    public: Annotated[str, typer.Option(help="host:port that sites connect to (the proxy's).")] = "",
    port: Annotated[int, typer.Option(help="Port of the SuperLink, on the loopback interface.")] = PORT,
    own_data: Annotated[bool, typer.Option("--own-data", help="Sites bring their own tables.")] = False,
    images: Annotated[bool, typer.Option("--images", help="Sites bring their own images.")] = False,
) -> None:
    """Write a deployment folder: CA, keys, site folders, systemd units, proxy configuration, instructions.

    With `--own-data` or `--images`, settings default to what `fedtail run` uses for one's own tables or images; without
    them it is a rehearsal, in which sites act as the clients of the config's data set.
    """
    own = "images" if images else "table" if own_data else ""
    made = make(folder, arguments, sites, local, public, port, own)
    keys = (
        "sites make their own keys"
        if own
        else "keys are for a rehearsal only: sites that do not trust the server make their own"
    )
    typer.echo(f"{len(made.sites)} sites in {made.folder}; {keys}; next: read {made.folder / 'README.md'}")


@app.command()
def up(
    folder: Folder,
    arguments: Arguments = None,
    local: Annotated[int, typer.Option(help="Create the folder first, with this many sites that play clients.")] = 0,
    port: Annotated[int, typer.Option(help="Port of the SuperLink of a folder that is created.")] = PORT,
) -> None:
    """Start a complete federation on this machine as a rehearsal: SuperLink, sites, TLS, authentication."""
    need_flower()
    from fedtail.federate.deployment import load_deployment
    from fedtail.federate.operate.local import up as start

    if not (folder / "deployment.toml").is_file():
        if not local:
            raise FedtailError(
                f"{str(folder)!r} is not a deployment folder; create one with `fedtail deploy init`, or a rehearsal of "
                f"three sites with: fedtail deploy up {folder} --local 3"
            )
        make(folder, arguments, "", local, "", port, "")
    elif arguments:
        raise FedtailError(
            f"{str(folder)!r} already exists; edit {folder}/config.toml or pass {arguments[0]!r} to `fedtail "
            "deploy run`"
        )
    deployment = load_deployment(folder)
    if local and local != len(deployment.sites):
        raise FedtailError(f"{str(folder)!r} has {len(deployment.sites)} sites, not {local}; choose another folder")
    with console.status("starting"):
        start(deployment)
    typer.echo(f"{len(deployment.sites)} sites online; next: fedtail deploy run {folder}")


@app.command()
def serve(folder: Folder) -> None:
    """Run the server until stopped: Flower's SuperLink, on loopback, behind the proxy. Its systemd unit runs this."""
    deployment = load(folder)
    from fedtail.federate.operate.local import serve as become_server

    become_server(deployment)


@app.command()
def register(folder: Folder) -> None:
    """Register the sites' public keys with the running SuperLink."""
    deployment = load(folder)
    from fedtail.federate.operate.control import Control

    with Control(deployment) as control:
        new = [site for site in deployment.sites if control.register(site)]
    typer.echo(f"registered {', '.join(new)}" if new else "all sites are already registered")


@app.command()
def run(
    folder: Folder,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the last run from its checkpoint.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start the run and return immediately.")] = False,
    as_json: Json = False,
) -> None:
    """Train across the sites that are online and write a run folder with a report. Ctrl-C stops the run."""
    deployment = load(folder)
    from fedtail.federate.operate import runs

    last = runs.last_config(deployment) if resume else None
    run_id = runs.start(deployment, load_config(last or deployment.config, overrides or []), resume=resume)
    if detach:
        typer.echo(f"started; follow it with: fedtail deploy status {folder}")
        return
    try:
        done = runs.wait(deployment, run_id, deploy_view.follower())
    except KeyboardInterrupt:
        runs.stop(deployment)
        raise Stopped(f"resume from the last checkpoint with: fedtail deploy run {folder} --resume") from None
    deploy_view.show_result(Path(done["folder"]), as_json)


@app.command()
def stop(folder: Folder) -> None:
    """Stop the current run; `run --resume` continues from its checkpoint."""
    deployment = load(folder)
    from fedtail.federate.operate import runs

    ended = runs.stop(deployment)
    again = f"run stopped; resume with: fedtail deploy run {folder} --resume"
    typer.echo(again if ended else "no run is active")


@app.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """Show sites, the run's progress, recent errors and what to do next."""
    deployment = load(folder)
    from fedtail.federate.operate import doctor, runs
    from fedtail.federate.operate.control import is_healthy

    healthy = is_healthy(deployment)
    sites = doctor.nodes(deployment) if healthy else {}
    about: dict[str, Any] = {
        "superlink": "up" if healthy else "down",
        "sites": sites,
        "run": runs.where(deployment),
    }
    about["advice"] = doctor.advice(deployment, about)
    if as_json:
        typer.echo(json.dumps(about))
    else:
        deploy_view.show_status(deployment, about)


@app.command("doctor")
def check(
    folder: Annotated[Path | None, typer.Argument(help="The deployment folder (on the server).")] = None,
    site: Annotated[Path | None, typer.Option(help="At a site instead: its site.toml.")] = None,
    server: Annotated[str, typer.Option(help="At a site: host:port of the server, to test the connection.")] = "",
    as_json: Json = False,
) -> None:
    """Check certificates, keys, versions and who is online; at a site its data, policy, clock and the way to the
    server. Exit code 1 on errors."""
    need_flower()
    from fedtail.federate.operate.doctor import examine_server, examine_site

    if (folder is None) == (site is None):
        raise FedtailError("give the deployment folder (on the server) or --site site.toml (at a site)")
    findings = examine_site(site, server) if site is not None else examine_server(load(folder or Path()))
    if as_json:
        typer.echo(json.dumps([vars(f) for f in findings]))
    else:
        for finding in findings:
            typer.echo(f"{finding.level:8}{finding.subject}: {finding.message}")
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


@app.command()
def down(folder: Folder) -> None:
    """Stop everything that `up` started, including child processes."""
    deployment = load(folder)
    from fedtail.federate.operate import runs
    from fedtail.federate.operate.local import down as end

    in_a_run = runs.stop(deployment)
    ended = end(deployment)
    again = f"; after `up`, resume the run with: fedtail deploy run {folder} --resume" if in_a_run else ""
    typer.echo(f"stopped {ended} processes{again}" if ended else "nothing was running")


@app.command("nvflare")
def on_nvflare(
    folder: Folder,
    job: Annotated[Path | None, typer.Option(help="Only write the NVFlare job into this folder.")] = None,
    site_file: Annotated[
        str, typer.Option(help="With --job: path of site.toml at the sites.")
    ] = "/opt/fedtail/{name}/site.toml",
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint.")] = False,
    as_json: Json = False,
) -> None:
    """Run on NVFlare instead: a rehearsal with its POC mode, or a job for an existing system."""
    if importlib.util.find_spec("nvflare") is None:
        raise FedtailError("nvflare is not installed; pip install 'fedtail[nvflare]' in a separate environment")
    from fedtail.federate.deployment import load_deployment
    from fedtail.federate.nvflare.app import make_job
    from fedtail.federate.operate.create import write_config
    from fedtail.federate.operate.nvflare_poc import rehearse

    deployment = load_deployment(folder)
    if job is not None:
        made = make_job(deployment.name, write_config(deployment), list(deployment.sites), site_file, resume=resume)
        made.export_job(str(job))
        typer.echo(f"{job / deployment.name}; submit it with: nvflare job submit -j {job / deployment.name}")
        return
    done = rehearse(deployment, resume=resume, on_change=deploy_view.follower())
    deploy_view.show_result(Path(done["folder"]), as_json)


@app.command("app")
def write_app(folder: Annotated[Path, typer.Argument(help="Where to write the Flower app.")]) -> None:
    """Write only the Flower app, for `flwr run` on an existing federation."""
    need_flower()
    from fedtail.federate.operate.bundle import write_bundle

    write_bundle(folder)
    typer.echo(
        f"{folder}: start SuperNodes with --node-config \"site='/path/to/site.toml'\", then: "
        f"flwr run {folder} --run-config 'config=\"/path/to/config.toml\" sites=3'"
    )


def make(
    folder: Path, arguments: list[str] | None, sites: str, local: int, public: str, port: int, own: str
) -> Deployment:
    """A new deployment folder, by names and config from the command line. own: ``table`` or ``images``
    that sites bring, for the same defaults as those of ``fedtail run``; empty for a rehearsal."""
    if importlib.util.find_spec("cryptography") is None:
        raise FedtailError("fedtail deploy needs an engine; pip install 'fedtail[flower]' or 'fedtail[nvflare]'")
    from fedtail.federate.operate.create import create_deployment

    if sites and local:
        raise FedtailError(f"--sites {sites} already names the sites; leave out --local {local}")
    names = tuple(s.strip() for s in sites.split(",") if s.strip()) or tuple(f"site-{k + 1}" for k in range(local))
    path, overrides = split_arguments(arguments)
    flags: dict[str, Any] = {"data.name": own} if own else {"data.clients": len(names) or None}
    config = load_config(path, overrides, flags, suggest=bool(own))
    if own and config.deploy.trust == "server" and not any(each.startswith("deploy.trust=") for each in overrides):
        config = unless_it_must_be_trusted(config, names)
    named = load_config(path, overrides, flags).method.name
    if config.method.name == "trees" != named and config.deploy.trust == "server":  # which trees do not run under
        config = load_config(path, overrides, {**flags, "method.name": "fedcgnm"}, suggest=bool(own))
    return create_deployment(folder, names, config, public=public, port=port, rehearsal=not own, keys=not own)


def unless_it_must_be_trusted(config: Settings, names: Sequence[str]) -> Settings:
    """Return the config under ``deploy.trust = "blind"``, or as it is, with a note, where it needs a trusted server."""
    from fedtail.federate.agreed import write_document

    blind = changed(config, {"deploy.trust": "blind"})
    try:
        write_document(blind, {}, names, "")
    except FedtailError as error:
        console.print(f"note: sites must trust this server (policy.trust = 'server'): {error}", soft_wrap=True)
        return config
    return blind


__all__ = ["app"]

"""``fedtail deploy``: the same algorithms across machines, on Flower or NVFlare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtail.cli import deploy_view as view
from fedtail.cli.evaluate import print_evaluation
from fedtail.cli.monitor import STATE, LookName, Reference, begin, look_at
from fedtail.cli.options import Arguments, Json, RunFolder, split_arguments
from fedtail.cli.progress import Stopped, console
from fedtail.core.scores import Scores
from fedtail.errors import FedtailError
from fedtail.federate.deployment import Deployment, load_deployment
from fedtail.runs.config import load_config
from fedtail.runs.evaluate import evaluation
from fedtail.runs.monitor import Seen, Watch, promised_recall
from fedtail.runs.saved import load_model

app = typer.Typer(help="Run a federation across machines, over TLS, with Flower.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The deployment folder.")]
On = Annotated[Deployment, typer.Argument(metavar="FOLDER", help="The deployment folder.", parser=view.load)]
Site = Annotated[str, typer.Argument(help="The site's name.")]
Port = Annotated[int, typer.Option(help="Port of the SuperLink, on the loopback interface.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the last run from its checkpoint.")]


@app.command()
def init(
    folder: Folder,
    arguments: Arguments = None,
    sites: Annotated[str, typer.Option(help="Comma-separated site names.")] = "",
    local: Annotated[int, typer.Option(help="Instead of names: this many sites, named site-1 to site-N.")] = 0,
    public: Annotated[str, typer.Option(help="host:port that sites connect to (the proxy's).")] = "",
    port: Port = 9092,
    own_data: Annotated[bool, typer.Option("--own-data", help="Sites bring their own tables.")] = False,
    images: Annotated[bool, typer.Option("--images", help="Sites bring their own images.")] = False,
) -> None:
    """Write a deployment folder: CA, keys, site folders, systemd units, proxy configuration, instructions.

    With `--own-data` or `--images`, settings default to what `fedtail run` uses for one's own tables or images; without
    them it is a rehearsal, in which sites act as the clients of the config's data set.
    """
    if own_data and images:
        raise FedtailError("--own-data and --images both say what sites bring; give only one")
    own = "images" if images else "table" if own_data else ""
    made = make(folder, arguments, sites, local, public, port, own)
    rehearsal = "keys are for a rehearsal only: sites that do not trust the server make their own"
    keys = "sites make their own keys" if own else rehearsal
    typer.echo(f"{len(made.sites)} sites in {made.folder}; {keys}; next: read {made.folder / 'README.md'}")


@app.command()
def up(
    folder: Folder,
    arguments: Arguments = None,
    local: Annotated[int, typer.Option(help="Create the folder first, with this many sites that play clients.")] = 0,
    port: Port = 9092,
) -> None:
    """Start a complete federation on this machine as a rehearsal: SuperLink, sites, TLS, authentication."""
    view.need("flwr")
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
def down(deployment: On) -> None:
    """Stop everything that `up` started, including child processes."""
    from fedtail.federate.operate import local, runs

    in_a_run = runs.stop(deployment)
    ended = local.down(deployment)
    again = f"; after `up`, resume a run with: fedtail deploy run {deployment.shown} --resume" if in_a_run else ""
    typer.echo(f"stopped {ended} processes{again}" if ended else "nothing was running")


@app.command()
def serve(deployment: On) -> None:
    """Run the server until stopped: Flower's SuperLink, on loopback, behind the proxy. Its systemd unit runs this."""
    from fedtail.federate.operate import local

    local.serve(deployment)


@app.command()
def register(deployment: On) -> None:
    """Register the sites' public keys with the running SuperLink."""
    from fedtail.federate.operate.control import Control

    with Control(deployment) as control:
        new = control.register()
    typer.echo(f"registered {', '.join(new)}" if new else "all sites are already registered")


@app.command()
def add(
    deployment: On,
    site: Site,
    key: Annotated[Path | None, typer.Option(help="File with the site's public key (`fedtail site keys`).")] = None,
) -> None:
    """Take in a new site, or a new key of a known one. A run in progress keeps to the sites that it began with."""
    from fedtail.federate.operate.control import is_healthy
    from fedtail.federate.operate.membership import add_site

    here = add_site(deployment, site, key).site(site)
    if key is None:
        told = f"created {here}; send it to the site, and add its key: fedtail deploy add {deployment.shown} {site}"
        typer.echo(f"{told} --key FILE")
        return
    later = "" if is_healthy(deployment) else f"; once the SuperLink is up: fedtail deploy register {deployment.shown}"
    typer.echo(f"{site} has the key in {key}; send the new list {here / 'sites.pub'} to all sites{later}")


@app.command()
def remove(deployment: On, site: Site) -> None:
    """Remove a site permanently. A run in progress continues without it."""
    from fedtail.federate.operate import processes
    from fedtail.federate.operate.membership import remove_site

    rest = remove_site(deployment, site)
    processes.stop(rest.folder, f"site:{site}")
    typer.echo(f"{site} removed, {len(rest.sites)} sites left; its folder was moved to {rest.server / 'removed'}")


@app.command()
def renew(deployment: On) -> None:
    """Renew the server's certificate, for the same addresses."""
    from fedtail.federate.operate.certificates import renew_certificate

    ends = renew_certificate(deployment)
    typer.echo(f"server.crt is valid until {ends}; restart the SuperLink and the proxy; sites reconnect by themselves")


@app.command()
def run(
    deployment: On,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    resume: Resume = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start the run and return immediately.")] = False,
    as_json: Json = False,
) -> None:
    """Train across the sites that are online and write a run folder with a report. Ctrl-C stops the run."""
    from fedtail.federate.operate import create, runs

    given = overrides or []
    config = create.last_config(deployment, given) if resume else load_config(deployment.config, given)
    run_id = runs.start(deployment, config, resume=resume)
    if detach:
        follow = f"fedtail deploy status {deployment.shown}"
        typer.echo(json.dumps({"started": str(run_id)}) if as_json else f"started; follow it with: {follow}")
        return
    try:
        done = runs.wait(deployment, run_id, view.follower())
    except KeyboardInterrupt:
        runs.stop(deployment)
        again = f"fedtail deploy run {deployment.shown} --resume"
        raise Stopped(f"resume from the last checkpoint with: {again}") from None
    view.show_result(Path(done["folder"]), as_json)


@app.command()
def stop(deployment: On) -> None:
    """Stop the current run, or question; `run --resume` continues a run from its checkpoint."""
    from fedtail.federate.operate import runs

    again = f"stopped; resume a run with: fedtail deploy run {deployment.shown} --resume"
    typer.echo(again if runs.stop(deployment) else "no run is active")


@app.command()
def status(deployment: On, as_json: Json = False) -> None:
    """Show sites, the run's progress, recent errors and what to do next."""
    from fedtail.federate.operate.doctor import survey

    about = survey(deployment)
    if as_json:
        typer.echo(json.dumps(about))
    else:
        view.show_status(deployment, about)


@app.command()
def doctor(
    folder: Annotated[Path | None, typer.Argument(help="The deployment folder (on the server).")] = None,
    site: Annotated[Path | None, typer.Option(help="At a site instead: its site.toml.")] = None,
    server: Annotated[str, typer.Option(help="At a site: host:port of the server, to test the connection.")] = "",
    as_json: Json = False,
) -> None:
    """Check certificates, keys, versions and who is online; at a site its data, policy and the way to the server.
    Exit code 1 on errors."""
    view.need("flwr")
    from fedtail.federate.operate.doctor import examine_server, examine_site

    if (folder is None) == (site is None):
        raise FedtailError("give the deployment folder (on the server) or --site site.toml (at a site)")
    findings = examine_site(site, server) if site is not None else examine_server(view.load(folder or Path()))
    if as_json:
        typer.echo(json.dumps({"findings": [vars(f) for f in findings]}))
    else:
        for finding in findings:
            typer.echo(f"{finding.level:8}{finding.subject}: {finding.message}")
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


@app.command()
def evaluate(deployment: On, run: RunFolder, as_json: Json = False) -> None:
    """Evaluate a trained model on labelled rows of all sites, without training: every metric with a 95 % interval.

    Sites judge the rows that `new` names under [data] in their site.toml, by a model that they have agreed on; under
    deploy.trust = "blind" only sums of counts over all sites leave.
    """
    from fedtail.federate.operate import runs

    scores = runs.count(deployment, "evaluate", run, on_change=view.follower())
    assert isinstance(scores, Scores)
    found = evaluation(scores, load_model(run).classes)
    print_evaluation(found)
    if as_json:
        typer.echo(json.dumps(found))


@app.command()
def monitor(
    deployment: On,
    run: RunFolder,
    reference: Reference = False,
    name: LookName = "",
    as_json: Json = False,
) -> None:
    """Look whether a trained model still fits new rows of all sites, with or without labels; made for a scheduler.

    Prints one line and draws a timeline, as `fedtail monitor` does on one machine; the exit code is 3 if something has
    changed.
    """
    from fedtail.federate.operate import runs

    path = run / STATE
    if not reference and not path.is_file():
        raise FedtailError(f"there is no {str(path)!r}; begin with --reference, on labelled rows not trained on")
    watch = None if reference else Watch.load(path)
    known = None if watch is None else watch.reference
    seen = runs.count(deployment, "reference" if watch is None else "look", run, known, view.follower())
    assert isinstance(seen, Seen)
    if watch is None:
        model = load_model(run)
        promised = promised_recall(model.decision, model.classes)
        begin(Watch.of(seen, model.classes, model.preprocessing, promised), path)
    else:
        look_at(watch, seen, path, name, as_json)


@app.command()
def nvflare(
    folder: Folder,
    job: Annotated[Path | None, typer.Option(help="Only write the NVFlare job into this folder.")] = None,
    site_file: Annotated[
        str, typer.Option(help="With --job: path of site.toml at the sites.")
    ] = "/opt/fedtail/{name}/site.toml",
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Run on NVFlare instead: a rehearsal in its simulator, or a job for an existing system."""
    view.need("nvflare", "in a separate environment")
    from fedtail.federate.nvflare.app import make_job, rehearse
    from fedtail.federate.operate.create import write_config

    deployment = load_deployment(folder)
    if job is not None:
        made = make_job(deployment.name, write_config(deployment), list(deployment.sites), site_file, resume=resume)
        made.export_job(str(job))
        typer.echo(f"{job / deployment.name}; submit it with: nvflare job submit -j {job / deployment.name}")
        return
    done = rehearse(deployment, resume=resume, on_change=view.follower())
    view.show_result(Path(done["folder"]), as_json)


@app.command("app")
def write_app(folder: Annotated[Path, typer.Argument(help="Where to write the Flower app.")]) -> None:
    """Write only the Flower app, for `flwr run` on an existing federation."""
    view.need("flwr")
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
    view.need("cryptography")
    from fedtail.federate.operate.create import create_deployment, trusting_least

    if sites and local:
        raise FedtailError(f"--sites {sites} already names the sites; leave out --local {local}")
    names = tuple(s.strip() for s in sites.split(",") if s.strip()) or tuple(f"site-{k + 1}" for k in range(local))
    path, overrides = split_arguments(arguments)
    flags: dict[str, Any] = {"data.name": own} if own else {"data.clients": len(names) or None}
    config = load_config(path, overrides, flags, suggest=bool(own))
    if own and config.deploy.trust == "server" and not any(each.startswith("deploy.trust=") for each in overrides):
        config, why = trusting_least(config, names)
        if why:
            console.print(f"note: sites must trust this server (policy.trust = 'server'): {why}", soft_wrap=True)
    return create_deployment(folder, names, config, public=public, port=port, rehearsal=not own)


__all__ = ["app"]

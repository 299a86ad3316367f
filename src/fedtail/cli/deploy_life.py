"""``fedtail deploy evaluate | monitor``: a trained model on rows of all sites, by sums of counts alone."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedtail.cli.deploy_view import Folder, follower, load
from fedtail.cli.evaluate import print_evaluation
from fedtail.cli.flags import Json
from fedtail.cli.monitor import CHANGED, STATE
from fedtail.cli.options import RunFolder
from fedtail.cli.progress import terminal
from fedtail.core.scores import Scores
from fedtail.errors import FedtailError
from fedtail.runs.evaluate import evaluation
from fedtail.runs.monitor import Seen, Watch, promised_recall
from fedtail.runs.saved import load_model


def evaluate(folder: Folder, run: RunFolder, as_json: Json = False) -> None:
    """Evaluate a trained model on labelled rows of all sites, without training: every metric with a 95 % interval.

    Sites judge the rows that `new` names under [data] in their site.toml, by a model that they have agreed on; under
    deploy.trust = "blind" only sums of counts over all sites leave.
    """
    deployment = load(folder)
    from fedtail.federate.operate import runs

    scores = runs.count(deployment, "evaluate", run, on_change=follower())
    assert isinstance(scores, Scores)
    found = evaluation(scores, load_model(run).classes)
    print_evaluation(found)
    if as_json:
        typer.echo(json.dumps(found))


def monitor(
    folder: Folder,
    run: RunFolder,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference", help="Begin: the sites' rows, labelled and not trained on, are what later ones compare to."
        ),
    ] = False,
    name: Annotated[str, typer.Option(help="Name of this look, such as 2026-11; default: its number.")] = "",
    as_json: Json = False,
) -> None:
    """Look whether a trained model still fits new rows of all sites, with or without labels; made for a scheduler.

    Prints one line, as `fedtail monitor` does on one machine; the exit code is 3 if something has changed.
    """
    deployment = load(folder)
    from fedtail.federate.operate import runs

    path = run / STATE
    if not reference and not path.is_file():
        raise FedtailError(f"there is no {str(path)!r}; begin with --reference, on labelled rows not trained on")
    watch = None if reference else Watch.load(path)
    known = None if watch is None else watch.reference
    seen = runs.count(deployment, "reference" if watch is None else "look", run, known, follower())
    assert isinstance(seen, Seen)
    if watch is None:
        model = load_model(run)
        promised = promised_recall(model.decision, model.classes)
        Watch.of(seen, model.classes, model.preprocessing, promised).save(path)
        terminal().print(f"monitoring begins with {seen.n:,} reference rows -> {path}", soft_wrap=True)
        return
    look = watch.look(seen, name)
    watch.save(path)
    terminal().print(look.sentence(), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(look.to_json()))
    if look.changed:
        raise typer.Exit(CHANGED)


COMMANDS = (evaluate, monitor)

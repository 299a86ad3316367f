"""The ClientApp of a plain SuperNode: every message goes to the site's worker as it came, and its answer goes back.

Flower starts it for every message, so it must stay light. It travels in the app bundle, together with the modules it
imports: the standard library and Flower only, no torch, no fedtail.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ..site import worker_client
from .content import ACTION, from_content, to_content

app = ClientApp()


@app.query(ACTION)
def answer(message: Message, context: Context) -> Message:
    site = context.node_config.get("site")
    if not site:
        raise worker_client.WorkerError("start this SuperNode with --node-config 'site=\"/path/to/site.toml\"'")
    reply = worker_client.ask(str(site), from_content(message.content))
    return Message(to_content(reply), reply_to=message)

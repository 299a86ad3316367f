"""The transport over an NVFlare controller: one task per client, replies by callback."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedtail.errors import FedtailError
from fedtail.federate.protocol.transport import Errors, Take, is_parts, with_phase
from fedtail.federate.protocol.wire import Parts

TASK = "fedtail"
"""All tasks have this name, which an executor is registered for; what is asked travels inside."""


class NVFlareTransport:
    """``names[k]`` is the NVFlare client behind client k."""

    name = "nvflare"

    def __init__(self, controller: Any, fl_ctx: FLContext, abort: Signal, names: Sequence[str]) -> None:
        self.controller, self.fl_ctx, self.abort, self.names = controller, fl_ctx, abort, list(names)
        self.n_clients = len(names)

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

    def close(self) -> None:
        """The controller belongs to NVFlare, which ends it."""

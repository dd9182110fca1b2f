"""`ddptrain notify`: tries the notifications of a configuration."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import JsonOption, checked, set_option
from ddptrain.cli.printing import print_result, say
from ddptrain.errors import ExitCode, UsageError

app = typer.Typer(name="notify", help="Notifications of runs and retrainings: try them.", no_args_is_help=True)


@app.callback()
def notify() -> None:
    """Notifications of retrainings: try them."""


@app.command("test", short_help="Send a test message to every target.")
def send_test(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", autocompletion=complete.configurations, help="YAML file with a section notify."
        ),
    ],
    overrides: Annotated[list[str] | None, set_option("notify.heartbeat=null")] = None,
    json: JsonOption = False,
) -> int:
    """Send a test message to every URL of notify.urls, and a /log to the heartbeat.

    Exits with 0 if all of them were delivered, else with 4.
    """
    from ddptrain.config.load import load_config
    from ddptrain.host_identity import this_host
    from ddptrain.notify.heartbeat import Heartbeat
    from ddptrain.notify.sender import Delivery, Message, code, send
    from ddptrain.optional_packages import require

    resolved = checked(partial(load_config, config), overrides or [], {})
    settings = resolved.config.notify
    if not settings.urls and not settings.heartbeat:
        raise UsageError(f"{config} has neither notify.urls nor notify.heartbeat: there is nothing to test")
    if settings.urls:
        require("apprise", "notify", "leave out notify.urls")
    body = f"ddptrain can send messages from {code(this_host().name)}. The configuration is {code(str(resolved.path))}."
    message = Message("Test message of ddptrain", body)
    deliveries = send(message, settings.urls, retries=0, secrets=resolved.secrets)
    if settings.heartbeat:
        heartbeat = Heartbeat(settings.heartbeat, secrets=resolved.secrets)
        heartbeat.log(message.body)
        deliveries.append(Delivery(heartbeat.target, "; ".join(heartbeat.problems)))
    data = [{"target": each.target, "delivered": each.delivered, "problem": each.problem} for each in deliveries]
    print_result(data, (f"{each.target}: {each.problem or 'delivered'}" for each in deliveries), as_json=json)
    failed = sum(not each.delivered for each in deliveries)
    if failed and not json:
        say(f"ddptrain: {failed} of {len(deliveries)} messages were not delivered")
    return ExitCode.CLUSTER if failed else ExitCode.SUCCEEDED

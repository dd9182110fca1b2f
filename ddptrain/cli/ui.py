"""`ddptrain ui`: runs, sweeps and models in a browser."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from ddptrain.cli import options as opt


def ui(
    port: Annotated[
        int, typer.Option(min=0, max=65535, show_default=False, help="Port on 127.0.0.1.  [default: a free one]")
    ] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Show runs, sweeps and models in a browser, until Ctrl-C; a run that is running is updated every two seconds.

    The page is read only, for this machine, and for whoever has its address, which contains a token. To see it from
    another machine, forward the port: ssh -L 8080:127.0.0.1:8080 HOST, and --port 8080.

    Examples:
        ddptrain ui
        ddptrain ui --port 8080 --no-browser
    """
    from ddptrain.reports.ui import serve

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing stays
    serve(opt.PLACES.runs, opt.PLACES.models, port, opens_browser=not no_browser)

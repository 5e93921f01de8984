"""``fastserve serve``: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import ipaddress
import logging
import signal
from typing import Annotated, Any

import typer

from fastserve.cli.console import one_line_errors, print_note
from fastserve.cli.flags import takes
from fastserve.cli.options import LogLevelOption, ModelArgument, set_log_level
from fastserve.cli.session import check_needs, loaded
from fastserve.config import EngineConfig
from fastserve.log import LogLevel

__all__ = ["serve"]

INTERRUPTED = 130

logger = logging.getLogger("fastserve.server")


@takes("engine", EngineConfig, panel="Engine", leave_out={"skip_tokenizer_init"})
def serve(
    model: ModelArgument,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 takes any free one.")
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What requests may call the model; by default MODEL. May be given several times.",
        ),
    ] = None,
    shutdown_timeout_s: Annotated[
        float,
        typer.Option(min=0, metavar="X", help="Seconds that running requests get."),
    ] = 30.0,
    log_level: LogLevelOption = LogLevel.INFO,
    *,
    engine: dict[str, Any],
) -> None:
    """Serve MODEL over HTTP, as OpenAI's API.

    POST /v1/completions and /v1/chat/completions (streaming and not), GET /v1/models and /health.
    Ctrl-C stops at once; SIGTERM finishes what runs.
    """
    set_log_level(log_level)
    with one_line_errors():
        check_needs("fastserve serve", model, "server")
        from fastserve.server import bind, create_app, run

        place = bind(host, port)
        if not _is_loopback(host):
            logger.warning("%s: whoever can reach this address can use the server; no key", host)
        with place, loaded(model, engine) as running:
            app = create_app(running, served_model_name=served_model_name or [model])
            where = f"http://{_in_url(host)}:{place.getsockname()[1]}/v1"
            ended_by = run(
                app,
                running,
                place,
                shutdown_timeout_s=shutdown_timeout_s,
                on_ready=lambda: print_note(f"serving {model} at {where}; Ctrl-C stops it"),
            )
        if ended_by == signal.SIGINT:
            raise typer.Exit(INTERRUPTED)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host

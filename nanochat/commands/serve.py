"""Serve the engine to other programs through the OpenAI API, until Ctrl+C. Needs the extra serve."""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from types import ModuleType

from nanochat.commands.options import add_engine_options, engine_config
from nanochat.errors import NanochatError, WrongUsage, install_hint
from nanochat.server.limits import MAX_REQUESTS
from nanochat.stray_output import diverted, log_file

KEY_VARIABLE = "NANOCHAT_API_KEY"
"""Names the key to the server where the command line, which other users of the machine can read, doesn't."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to listen, who may ask, and the engine's options."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to listen at; left out: this machine only",
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="8000 if left out; 0: any free one"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"what requests must bring; better given in ${KEY_VARIABLE}"
    )
    parser.add_argument(
        "--max-requests",
        type=int,
        default=MAX_REQUESTS,
        metavar="N",
        help="most answers under way; more are told to wait",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status, once the server has ended.

    Raises:
        NanochatError: with a sentence that says what to do.
    """
    settings, config = engine_config(args)
    if not 1 <= args.max_requests <= 100_000:
        raise WrongUsage(f"--max-requests must lie between 1 and 100000, not {args.max_requests}.")
    api_key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
    server = _server_module()
    server.check_address(args.host, args.port, api_key)
    sockets = server.bind(args.host, args.port)

    from nanochat.engine.engine import Engine
    from nanochat.server.service import Service

    log = log_file()
    print("Loading the model; the address stands here once it can be asked.", file=sys.stderr, flush=True)
    with diverted(log):  # tokenizers print what a model's files say
        engine = Engine(config)
    with engine:
        service = Service(
            engine,
            settings=settings,
            system=getattr(args, "system", settings.system),
            max_requests=args.max_requests,
        )
        api = server.ApiServer(
            service,
            max_requests=args.max_requests,
            api_key=api_key,
            any_host=api_key is not None,
        )
        server.listen(sockets)
        place = _place(args.host, *sockets[0].getsockname()[:2])
        print(f"Serving {engine.model_name} at {place} (Ctrl+C ends it; errors go to {log}).", flush=True)
        with diverted(log):
            server.serve(api, sockets)
    print("The server has ended.")
    return 0


def _place(host: str, address: str, port: int) -> str:
    """Where a server can be asked that listens at a host's address."""
    everywhere = ""
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:  # nobody can ask there
        host = "::1" if ":" in address else "127.0.0.1"
        everywhere = f" and port {port} of this machine's other addresses"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1{everywhere}"


def _server_module() -> ModuleType:
    try:
        import nanochat.server.run
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise NanochatError("Serving the API needs the extra serve; " + install_hint("serve")) from None
    return nanochat.server.run

"""A page to chat with models, and the completions API: `python scripts/serve.py RUN_OR_FOLDER ...`; see --help."""

import argparse
import ipaddress
import os
import secrets
import socket
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import end_at_interrupt, explain_wrong_interpreter

explain_wrong_interpreter()
end_at_interrupt()

from parallel.errors import UserError  # noqa: E402
from recipes.files.exit_codes import exit_code  # noqa: E402
from recipes.files.screen import say  # noqa: E402
from recipes.plugins.loading import OPTION, WHERE, load_plugins  # noqa: E402


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 after Ctrl-C, 2 for what the user can fix, 71 for a fault that may pass."""
    parser = argparse.ArgumentParser(
        description="A page to chat with models or continue texts, and /v1/completions and /v1/chat/completions.",
        allow_abbrev=False,
    )
    parser.add_argument("models", nargs="+", help="Hugging Face folders, checkpoints, runs/NAME for its newest one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; beyond this machine with a token")
    parser.add_argument("--port", type=int, default=8000, help="0 = a free one (%(default)s)")
    parser.add_argument("--token", action="store_true", help="ask for $SERVE_TOKEN, or for a new token that is printed")
    parser.add_argument("--waiting", type=int, default=32, help="requests that may wait for another (%(default)s)")
    parser.add_argument("--chat-template", default="", help="a Jinja file instead of the models' own templates")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--device", help='such as "cpu" or "cuda:1"; default: a GPU if there is one')
    parser.add_argument(OPTION, dest="plugins", **WHERE)
    try:
        return _serve(parser.parse_args(arguments))
    except UserError as error:
        say(error, to=2)
        return exit_code(error)


def _serve(options: argparse.Namespace) -> int:
    if find_spec("aiohttp") is None:
        raise UserError("scripts/serve.py needs the package aiohttp: .venv/bin/pip install -e '.[serve]'")
    if options.waiting < 0:
        raise UserError(f"--waiting {options.waiting}: must be 0 or more")
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {options.host} --port {options.port}: {error}; write another one, or 0") from None
    address, port = listener.getsockname()[:2]
    needs_token = options.token or not ipaddress.ip_address(address).is_loopback
    token = (os.environ.get("SERVE_TOKEN") or secrets.token_urlsafe(16)) if needs_token else ""

    from recipes.weights.locate import find_weights

    load_plugins(options.plugins)
    every = [find_weights(path) for path in options.models]  # all are found before torch is imported

    from recipes.evaluation.generate import choose_device, open_for_prompts, open_model
    from recipes.evaluation.serve import Server
    from recipes.training.same_run import data_of_run

    device, dtype = choose_device(options.device, options.dtype)
    models, open_as = {}, partial(open_model, dtype=dtype, device=device)
    for weights in every:
        model = open_for_prompts(weights, data_of_run(weights), template=options.chat_template, open_as=open_as)
        models[str(weights.path)] = model
        say(f"{weights.path}{'' if model.template else f' cannot chat: {model.problem}'}")
    shown = socket.gethostname() if address in ("0.0.0.0", "::") else f"[{address}]" if ":" in address else address
    say(f"http://{shown}:{port}/{token and '#token='}{token}")
    Server(models, token=token, waiting=options.waiting).run(listener)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Continue a text: `python scripts/generate.py FOLDER_OR_CHECKPOINT "prompt"`. --help lists the options."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import end_at_interrupt, explain_wrong_interpreter

explain_wrong_interpreter()
end_at_interrupt()

from parallel.errors import UserError  # noqa: E402
from recipes.files.exit_codes import ended_by, exit_code  # noqa: E402
from recipes.files.screen import DIM, say  # noqa: E402
from recipes.plugins.loading import OPTION, WHERE, load_plugins  # noqa: E402

if TYPE_CHECKING:
    from recipes.evaluation.opened import OpenedModel, Sampling


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 2 for what the user can fix, 71 for a fault that may pass, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    if options.greedy:
        options.temperature = 0.0
    try:
        return _generate(options)
    except UserError as error:
        say(error, to=2)
        return exit_code(error)
    except BrokenPipeError:  # `... | head`: whoever read the text has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would complain when it ends
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Continue a text, or answer it, with a model on one device, and report the speed.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a Hugging Face folder, a checkpoint, or runs/NAME for its newest checkpoint")
    parser.add_argument("prompt", nargs="?", help="the text to continue; none with --chat = a conversation until /exit")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate at most (%(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        help="randomness, 0 = --greedy (0.8; 0 with --beams and for encoder-decoder models)",
    )
    parser.add_argument("--top-k", type=int, default=0, help="sample from this many likeliest; 0 = all (%(default)s)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest with this probability (%(default)s)"
    )
    parser.add_argument("--greedy", action="store_true", help="always take the most likely token")
    parser.add_argument("--beams", type=int, default=1, help="texts to follow at once, by transformers (%(default)s)")
    parser.add_argument("--outputs", type=int, default=1, help="texts to print, by transformers (%(default)s)")
    parser.add_argument(
        "--prefix", help="text before the prompt, such as 'summarize: '; default: data.prompt_prefix of the run"
    )
    parser.add_argument("--chat", action="store_true", help="the prompt is a message, in the model's chat template")
    parser.add_argument("--chat-template", help="the prompt is a message, in this Jinja template: a file, chatml, ...")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")
    parser.add_argument(
        "--answer-only", action="store_true", help="print the continuation and a newline, without the prompt"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--device", help='such as "cpu" or "cuda:1"; default: a GPU if there is one')
    parser.add_argument(OPTION, dest="plugins", **WHERE)
    return parser


def _leave(number: int, frame: object) -> None:
    """End the line of text and exit. Torch's C++ would turn an exception into another error."""
    os.write(1, b"\n")
    os._exit(ended_by(number))


def _sampling(options: argparse.Namespace, *, in_chat: bool) -> "Sampling":
    """How to choose tokens. Raises UserError for options that do not go together, before a large model is read."""
    from recipes.evaluation.opened import Sampling  # torch, from here on

    given = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")}
    sampling = Sampling(**given | {"temperature": options.temperature or 0.0})
    sampling.require_possible()
    if options.prompt is None and not in_chat:
        raise UserError("write the text to continue, or --chat for a conversation")
    if in_chat and options.prefix is not None:
        raise UserError("--prefix has no place in a chat; write it into the prompt")
    try:
        (options.prompt or "").encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not UTF-8 text") from None
    return sampling


def _generate(options: argparse.Namespace) -> int:
    from recipes.weights.locate import find_weights

    load_plugins(options.plugins)
    weights, in_chat = find_weights(options.model), bool(options.chat or options.chat_template)
    sampling = _sampling(options, in_chat=in_chat)

    from recipes.evaluation.conversation import converse, read_message
    from recipes.evaluation.generate import (
        check_search,
        choose_device,
        continue_text,
        open_exported,
        open_for_prompts,
        open_model,
    )
    from recipes.training.same_run import data_of_run

    search = {"beams": options.beams, "outputs": options.outputs}
    check_search(**search, temperature=options.temperature)
    signal.signal(signal.SIGINT, _leave)
    device, dtype = choose_device(options.device, options.dtype)
    open_as = partial(open_exported if max(search.values()) > 1 else open_model, dtype=dtype, device=device)
    template = (options.chat_template or "") if in_chat else None
    ready = open_for_prompts(weights, data_of_run(weights), template=template, open_as=open_as)
    if in_chat and ready.template is None:
        raise UserError(f"--chat: {ready.problem}; write --chat-template FILE.jinja")
    opened = ready.chat if in_chat else ready.text
    sampling = replace(sampling, repetition_penalty=ready.penalty)
    if options.temperature is None:
        certain = options.beams > 1 or (opened.encoder_decoder and options.outputs == 1)
        sampling = replace(sampling, temperature=0.0 if certain else 0.8)

    def show(piece: str, *, style: str = "") -> None:
        say(piece, end="", whole=True, style=style)  # the same in a pipe: what reads it may be a terminal, too

    def show_prompt(prompt: str) -> None:
        if not options.answer_only:
            show(prompt, style=DIM)

    def answer(prompt: str, log: Callable[[str], object], log_prompt: Callable[[str], object]) -> None:
        _check_length(opened, prompt, options.max_tokens, positions=getattr(weights.model, "positions", 0))
        tokens, seconds = continue_text(opened, prompt, sampling, log=log, log_prompt=log_prompt, **search)
        say()
        say(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s", to=2)

    if ready.template is None:
        before, after = ready.around
        answer(f"{before if options.prefix is None else options.prefix}{options.prompt}{after}", show, show_prompt)
    elif options.prompt is not None:
        answer(ready.template.prompt([{"role": "user", "content": options.prompt}]), show, show_prompt)
    else:
        converse(ready.template, lambda prompt, log: answer(prompt, log, lambda _: None), read=read_message, show=show)
    return 0


def _check_length(opened: "OpenedModel", prompt: str, max_tokens: int, *, positions: int) -> None:
    """Say so if the text may become longer than those that the model was trained on.

    positions: those that it has; 0 = any. Raises UserError if there are too few.
    """
    length, longest = len(opened.prompt_ids(prompt)), opened.facts.context_length
    if not opened.encoder_decoder:
        length += max_tokens
    if positions and (needed := max(length, max_tokens)) > positions:
        raise UserError(f"up to {needed} tokens, but the model has {positions} positions; write a smaller --max-tokens")
    if length > longest:
        say(f"up to {length} tokens, but the model was trained for at most {longest}", to=2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

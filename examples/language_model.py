"""Train a small GPT, byte by byte, on the source of Python's standard library, and see perplexity against bytes sent.

    python examples/language_model.py --workers 2                         # AdamW at each worker, pushes every 10 steps
    python examples/language_model.py --workers 2 --method server         # AdamW on the server, gradients every step
    python examples/language_model.py --evaluate runs/language-model/model.safetensors
    python examples/language_model.py --plot runs/outer runs/server       # several runs in one picture

Text of your own: --text FOLDER reads its *.txt, *.md and *.py files.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from support import checkpoints, curves, launch, methods
from support.evaluation import ServersModel, load_saved
from support.gpt import GPT
from support.reporter import Reporter
from support.text import Windows, read_text
from torch import nn
from torch.utils.data import DataLoader

import psclient

BUDGETS = {"outer": None, "server": 0.03}
"""Ten local steps are a tenth of the bytes already: of their sum a tenth would leave little of what was learned."""
RATES = {"outer": 3e-3, "server": 1e-3}


def make_optimizer(
    options: argparse.Namespace, model: nn.Module, place: launch.Place, length: methods.Length
) -> tuple[psclient.Outer | psclient.ServerOptimizer, methods.Clock]:
    """Return AdamW in one of its two places, and what moves the learning rate."""
    budget = BUDGETS[options.method] if options.budget is None else options.budget
    joined = {"model": model, "server": place.server, "worker": place.worker}
    joined |= {"budget": budget} if options.density is None else {"density": options.density}
    rate = RATES[options.method] if options.lr is None else options.lr
    adamw = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": options.weight_decay}
    if options.method == "server":  # every step pushes a gradient, and the server steps
        on_server = {"scheduler": length.schedule("cosine", 1)} | joined
        return psclient.ServerOptimizer(model.parameters(), "AdamW", adamw, **on_server), methods.STILL
    inner = torch.optim.AdamW(model.parameters(), **adamw)  # each worker steps, and pushes how far it has come
    step = methods.outer_step(options.momentum)
    outer = psclient.Outer(inner, step, sync_every=options.period, decay=options.decay, **joined)
    return outer, psclient.VersionClock(methods.build(length.schedule("cosine", options.period), inner), outer)


def train(options: argparse.Namespace, place: launch.Place) -> None:
    torch.manual_seed(options.seed)
    training, held_out = read_text(options.text, options.text_bytes)
    windows = Windows(training, options.context)
    model = GPT(options.layers, options.heads, options.width, options.context).to(place.device)
    length = methods.Length(options.epochs, math.ceil(len(windows) / options.batch_size), options.warmup_epochs)
    optimizer, clock = make_optimizer(options, model, place, length)
    checkpoints.load(place, optimizer, clock, model)
    sampler = psclient.ElasticSampler(windows, optimizer, seed=options.seed, lease_samples=8 * options.batch_size)
    loader = DataLoader(windows, options.batch_size, sampler=sampler)
    servers_model = ServersModel(model, optimizer, place)

    with Reporter(place, optimizer, length.versions(options.period if options.method == "outer" else 1)) as reporter:
        if place.is_first and not place.resume:
            reporter.evaluation(-1, perplexity=perplexity(servers_model.fetch(), held_out, options))
        for epoch in sampler.epochs(options.epochs):
            for number, (inputs, targets) in enumerate(loader, 1):
                inputs, targets = inputs.to(place.device), targets.to(place.device)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()
                optimizer.step()
                clock.step()
                reporter.step(epoch, loss, len(inputs))
                if optimizer.finished:  # the server ends the run
                    break
                if place.is_first and number % options.evaluate_every == 0:
                    reporter.evaluation(epoch, perplexity=perplexity(servers_model.fetch(), held_out, options))
            checkpoints.save(place, optimizer, clock, model, epoch + 1)
        servers_model.leave()
        if place.is_first:
            reporter.evaluation(options.epochs - 1, perplexity=perplexity(servers_model.fetch(), held_out, options))
            servers_model.save(place.out / "model.safetensors")
    if place.is_first:
        curves.draw([place.out], place.out / "perplexity.png", "perplexity")
        reporter.say(f"wrote {place.out / 'model.safetensors'} and {place.out / 'perplexity.png'}")


@torch.inference_mode()
def perplexity(model: nn.Module, text: torch.Tensor, options: argparse.Namespace) -> float:
    """Return ``exp(loss)`` per byte on text of files that are not trained on: 256 is chance, 1 is certainty."""
    windows = Windows(text, options.context)
    chosen = range(0, len(windows), max(1, len(windows) // options.test_windows))
    device = next(model.parameters()).device
    losses = []
    for batch in DataLoader(torch.utils.data.Subset(windows, list(chosen)), options.batch_size):
        inputs, targets = (part.to(device) for part in batch)
        losses.append(nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item() * len(inputs))
    return torch.tensor(sum(losses) / len(chosen)).exp().item()  # infinite where math.exp would raise


def evaluate(options: argparse.Namespace) -> int:
    """Test a saved model, and let it write."""
    model = GPT(options.layers, options.heads, options.width, options.context)
    load_saved(model, options.evaluate).eval()
    held_out = read_text(options.text, options.text_bytes)[1]
    print(f"perplexity of {options.evaluate} per byte: {perplexity(model, held_out, options):.2f}")
    print(model.write(b"def ", 200, seed=options.seed).decode(errors="replace"))
    return 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, metavar="FOLDER", help="default: Python's standard library")
    add(
        "--text-bytes",
        type=launch.at_least(1),
        default=4_000_000,
        metavar="N",
        help="read at most (default: %(default)s)",
    )
    add("--method", choices=("outer", "server"), default="outer", help="where AdamW steps (default: %(default)s)")
    add(
        "--period",
        type=launch.at_least(1),
        default=10,
        metavar="N",
        help="local steps of outer between pushes (default: 10)",
    )
    add("--momentum", type=float, default=0.0, metavar="X", help="of outer's pushes (default: %(default)s)")
    add("--decay", type=float, default=0.5, metavar="X", help="of what outer has not sent (default: %(default)s)")
    add("--budget", type=float, metavar="X", help="share of the dense bytes each way (default: 0.03 of server)")
    add("--density", type=float, metavar="X", help="share that is pushed, in place of --budget (default: 1 of outer)")
    add("--lr", type=float, metavar="X", help="default: 0.003 of outer, 0.001 of server")
    add("--weight-decay", type=float, default=0.01, metavar="X", help="default: %(default)s")
    add("--batch-size", type=launch.at_least(1), default=16, metavar="N", help="default: %(default)s")
    add("--epochs", type=launch.at_least(0), default=1, metavar="N", help="default: %(default)s")
    add("--warmup-epochs", type=float, default=0.05, metavar="X", help="default: %(default)s")
    add("--context", type=launch.at_least(1), default=128, metavar="N", help="bytes (default: %(default)s)")
    add("--layers", type=launch.at_least(1), default=4, metavar="N", help="default: %(default)s")
    add("--heads", type=launch.at_least(1), default=4, metavar="N", help="default: %(default)s")
    add("--width", type=launch.at_least(1), default=128, metavar="N", help="default: %(default)s")
    add("--evaluate-every", type=launch.at_least(1), default=200, metavar="N", help="steps (default: %(default)s)")
    add(
        "--test-windows",
        type=launch.at_least(1),
        default=128,
        metavar="N",
        help="of --context bytes (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--evaluate", type=Path, metavar="FILE", help="only test a saved model, and let it write")
    add("--plot", type=Path, nargs="+", metavar="RUN", help="only draw the perplexity of several runs")
    launch.add_arguments(parser, out="runs/language-model")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Do what the options ask for; text that is missing is told of before anything starts."""
    if options.plot:
        options.out.mkdir(parents=True, exist_ok=True)
        path = curves.draw(options.plot, options.out / "perplexity.png", "perplexity")
        print(f"wrote {path}")
        return 0
    for part in read_text(options.text, options.text_bytes):
        Windows(part, options.context)
    return evaluate(options) if options.evaluate else launch.run(train, options)


if __name__ == "__main__":
    given = parse()
    sys.exit(launch.guarded(lambda: main(given)))

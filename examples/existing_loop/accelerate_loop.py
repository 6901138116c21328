"""The same training with Hugging Face accelerate: mixed precision, gradient accumulation, clipping, saved states.

accelerate does not notice that the optimizer talks to a server. Start one of these on each machine, with the same
``--server``; without it a server of its own is started.
"""

import argparse
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from before import evaluate, make_loaders, make_model
from torch import nn

import psclient


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--precision", choices=("no", "bf16", "fp16"), default="bf16", help="default: %(default)s")
    parser.add_argument("--accumulate", type=int, default=2, metavar="N", help="batches a step (default: %(default)s)")
    parser.add_argument("--server", metavar="HOST:PORT", help="default: PSCLIENT_SERVER, else a server of its own")
    parser.add_argument("--state", type=Path, metavar="DIR", help="save here after each epoch (default: nowhere)")
    parser.add_argument("--resume", action="store_true", help="go on from --state")
    options = parser.parse_args()
    if options.resume and options.state is None:
        parser.error("--resume needs --state: the folder to go on from")
    return options


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=options.precision, gradient_accumulation_steps=options.accumulate)
    train_loader, test_loader = make_loaders(batch_size=16)
    model = make_model().to(accelerator.device)  # before the optimizer is made, not in prepare()
    server = psclient.DGS(
        model.parameters(), lr=0.03, momentum=0.7, weight_decay=5e-4, model=model, server=options.server
    )
    steps = math.ceil(len(train_loader) / options.accumulate)  # an epoch: its last batch always ends a step
    scheduler = torch.optim.lr_scheduler.StepLR(server, step_size=steps, gamma=0.8)
    model, optimizer, train_loader, scheduler = accelerator.prepare(model, server, train_loader, scheduler)
    first_epoch = 0
    if options.resume:
        accelerator.load_state(options.state)
        server.pull()  # the saved model was written over the server's
        first_epoch = scheduler.scheduler.last_epoch // steps

    for epoch in range(first_epoch, options.epochs):
        if server.finished:
            break
        model.train()
        for x, y in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if server.finished:
                break
        accuracy = evaluate(model, test_loader, accelerator.device)
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy:.2%}", flush=True)
        if options.state:
            accelerator.save_state(options.state)
    totals = server.totals
    accelerator.print(f"version {server.version}, {totals.samples} samples, {totals.push_bytes:,} bytes pushed")
    server.close()


if __name__ == "__main__":
    main()

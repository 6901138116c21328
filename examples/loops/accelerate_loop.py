"""Handwritten digits with Hugging Face accelerate: mixed precision, accumulation, clipping, saved states."""

import math

import common
import torch
from accelerate import Accelerator
from before import evaluate, make_loaders, make_model
from torch import nn

import psclient

ACCUMULATE = 2


def make_optimizer(model, options):
    sgd = {"lr": 0.03, "momentum": 0.7, "weight_decay": 5e-4}
    if not options.server:
        return torch.optim.SGD(model.parameters(), **sgd)
    return psclient.DGS(
        model.parameters(),
        **sgd,
        model=model,
        server=options.server,
        on_load="server",  # load_state() comes later: a run that is further keeps the server's model
    )


def main() -> None:
    options = common.parser(__doc__, epochs=5).parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE)
    train_loader, test_loader = make_loaders(batch_size=16)
    model = make_model().to(accelerator.device)  # before the optimizer is made, not in prepare()
    inner = make_optimizer(model, options)
    steps = math.ceil(len(train_loader) / ACCUMULATE)  # an epoch: its last batch always ends a step
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=steps, gamma=0.8)
    model, optimizer, train_loader, scheduler = accelerator.prepare(model, inner, train_loader, scheduler)
    first_epoch = 0
    torch.manual_seed(1 + options.seed)
    if options.resume:
        accelerator.load_state(options.out / "state")
        first_epoch = scheduler.scheduler.last_epoch // steps

    def ended() -> bool:
        return bool(options.server and inner.finished)

    for epoch in range(first_epoch, options.epochs):
        if ended():
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
            if ended():
                break
        if options.server:
            inner.pull()  # what is tested and saved is the server's model
        accelerator.save_state(options.out / "state")
        accuracy = evaluate(model, test_loader, accelerator.device)
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy:.2%}", flush=True)

    if options.server:
        inner.wait_for_all()  # until the other workers are through
        inner.pull()  # the server's model, the same on all workers
    accelerator.print(f"in the end: test accuracy {evaluate(model, test_loader, accelerator.device):.2%}", flush=True)
    common.save(accelerator.unwrap_model(model).state_dict(), options.out / "model.pt")


if __name__ == "__main__":
    main()

"""A GPT in the manner of nanoGPT: a rate set by hand, accumulation, autocast, clipping, torch.compile, DDP, ckpt.pt.

One epoch is 50 iterations; after each the model is tested and ``ckpt.pt`` is written. Under ``torchrun`` the processes
of a machine are one worker.
"""

import contextlib
import math
import os

import common
import torch
import torch.distributed as dist
from support.gpt import GPT
from support.text import read_text
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import psclient

CONTEXT, BATCH, ACCUMULATE, EPOCH = 64, 8, 2, 50
RATE, LEAST_RATE, WARMUP, DECAY = 3e-3, 3e-4, 20, 1000


def rate(iteration: int) -> float:
    """Return the rate: a linear warm-up, then a cosine."""
    if iteration < WARMUP:
        return RATE * (iteration + 1) / WARMUP
    share = min(1.0, (iteration - WARMUP) / (DECAY - WARMUP))
    return LEAST_RATE + 0.5 * (RATE - LEAST_RATE) * (1 + math.cos(math.pi * share))


def batch(text: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw windows of bytes, and the bytes that follow each."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,))
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long().to(device)
    return windows[:, :-1], windows[:, 1:]


def make_optimizer(model, wrapped, options):
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = {"lr": RATE, "betas": (0.9, 0.95)}
    if not options.server:
        return torch.optim.AdamW(groups, **adamw)
    served = {"optimizer": "AdamW", "options": adamw, "model": wrapped, "server": options.server}
    if dist.is_initialized():
        return psclient.NodeOptimizer(psclient.ServerOptimizer, groups, **served)
    return psclient.ServerOptimizer(groups, **served)


def main() -> None:
    parser = common.parser(__doc__, epochs=10)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    train, test = read_text(None, 400_000)

    torch.manual_seed(0)
    model = GPT(layers=2, heads=2, width=64, context=CONTEXT).to(device)
    iteration, saved = 0, None
    if options.resume:
        saved = torch.load(options.out / "ckpt.pt", map_location=device)
        model.load_state_dict(saved["model"])
        iteration = saved["iteration"]
    compiled = torch.compile(model) if options.compile else model
    if dist.is_initialized():
        compiled = DistributedDataParallel(compiled, process_group=psclient.node_group() if options.server else None)
    optimizer = make_optimizer(model, compiled, options)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    scaler = torch.amp.GradScaler(device.type, enabled=options.dtype == "float16")
    precision = torch.autocast(device.type, getattr(torch, options.dtype), enabled=options.dtype != "float32")

    @torch.inference_mode()
    def evaluate() -> float:
        model.eval()
        state = torch.get_rng_state()
        torch.manual_seed(0)  # the same windows each time
        losses = [
            cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in (batch(test, device) for _ in range(8))
        ]
        torch.set_rng_state(state)
        model.train()
        return torch.stack(losses).mean().item()

    torch.manual_seed(1 + options.seed + 1000 * rank + iteration)
    while iteration < options.epochs * EPOCH and not (options.server and optimizer.finished):
        for group in optimizer.param_groups:
            group["lr"] = rate(iteration)
        for micro_step in range(ACCUMULATE):
            last = micro_step == ACCUMULATE - 1
            with contextlib.nullcontext() if last or not dist.is_initialized() else compiled.no_sync():
                x, y = batch(train, device)
                with precision:
                    loss = cross_entropy(compiled(x).flatten(0, 1), y.flatten()) / ACCUMULATE
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        iteration += 1
        if iteration % EPOCH == 0:
            if options.server:
                optimizer.pull()  # what is tested and saved is the server's model
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
            if rank == 0:
                common.save(state, options.out / "ckpt.pt")
                print(f"epoch {iteration // EPOCH}: test loss {evaluate():.3f}", flush=True)

    if options.server:
        optimizer.wait_for_all()  # until the other workers are through
        optimizer.pull()  # the server's model, the same on all workers
    if rank == 0:
        print(f"in the end: test loss {evaluate():.3f}", flush=True)
        common.save(model.state_dict(), options.out / "model.pt")
    if dist.is_initialized():
        if options.server:
            optimizer.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

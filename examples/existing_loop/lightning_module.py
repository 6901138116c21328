"""The same training with Lightning: automatic optimization, clipping, checkpoints, and an end that the server decides.

Start one of these on each machine, with the same ``--server``; without it a server of its own is started.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

# Lightning imports torchvision where it is installed. This line, and the next, are for a CPU build of torch beside a
# CUDA build of torchvision; builds that belong together do not need them.
if importlib.util.find_spec("torchvision"):
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import support.vision  # noqa: F401

import lightning
import torch
from before import make_loaders, make_model
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import psclient


class Digits(lightning.LightningModule):
    """The model and its training; only :meth:`configure_optimizers` and the two hooks after it know of psclient."""

    def __init__(self, server: str | None = None, worker: str | None = None) -> None:
        super().__init__()
        self.net = make_model()
        self.server, self.worker = server, worker

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        x, y = batch
        accuracy = (self(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self) -> tuple[list[psclient.DGS], list[torch.optim.lr_scheduler.ExponentialLR]]:
        optimizer = psclient.DGS(
            self.parameters(),
            lr=0.03,
            momentum=0.7,
            weight_decay=5e-4,
            model=self.net,  # called once for each batch, so that its samples are counted; names as without Lightning
            server=self.server,
            worker=self.worker,
        )
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)]

    def on_train_batch_end(self, *_: object) -> None:
        if self.optimizers().finished:
            self.trainer.should_stop = True

    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self.optimizers().close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--precision", default="32-true", help="32-true or bf16-mixed (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches a step (default: %(default)s)")
    parser.add_argument("--server", metavar="HOST:PORT", help="default: PSCLIENT_SERVER, else a server of its own")
    parser.add_argument("--worker", metavar="NAME", help="to find its residuals again after a restart")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/lightning"), help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    return parser.parse_args()


def main() -> None:
    options = parse()
    lightning.seed_everything(0, verbose=False)
    train_loader, test_loader = make_loaders(batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        precision=options.precision,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=5.0,
        devices=1,
        default_root_dir=options.out,
        callbacks=[ModelCheckpoint(options.out, filename="last", enable_version_counter=False)],
        logger=False,
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
    )
    model = Digits(options.server, options.worker)
    trainer.fit(model, train_loader, test_loader, ckpt_path=options.out / "last.ckpt" if options.resume else None)
    optimizer = model.optimizers()
    print(f"test accuracy {trainer.callback_metrics['accuracy']:.2%}, version {optimizer.version}, ", end="")
    print(f"{optimizer.totals.samples} samples, {optimizer.totals.push_bytes:,} bytes pushed")


if __name__ == "__main__":
    main()

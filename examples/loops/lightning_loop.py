"""Handwritten digits with Lightning, with automatic or manual optimization."""

import sys

import common
import lightning
import torch
from before import make_loaders, make_model
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import psclient


class Digits(lightning.LightningModule):
    """A model and its training; ``configure_optimizers`` and ``on_train_batch_end`` know of psclient."""

    def __init__(self, server: str | None, manual: bool) -> None:
        super().__init__()
        self.net = make_model()
        self.server = server
        self.automatic_optimization = not manual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=5.0, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss

    def on_train_epoch_end(self) -> None:
        if not self.automatic_optimization:
            self.lr_schedulers().step()

    def on_validation_start(self) -> None:
        if self.server:
            self.optimizers().pull()  # what is tested and saved is the server's model

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        sgd = {"lr": 0.03, "momentum": 0.7, "weight_decay": 5e-4}
        if self.server:
            optimizer = psclient.DGS(self.parameters(), **sgd, model=self.net, server=self.server)
        else:
            optimizer = torch.optim.SGD(self.parameters(), **sgd)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)]

    def on_train_batch_end(self, *_: object) -> None:
        if self.server and self.optimizers().finished:
            self.trainer.should_stop = True


def main() -> None:
    parser = common.parser(__doc__, epochs=5)
    parser.add_argument("--manual", action="store_true", help="the module steps the optimizer itself")
    options = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    train_loader, test_loader = make_loaders(batch_size=32)
    model = Digits(options.server, options.manual)
    torch.manual_seed(1 + options.seed)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        precision="bf16-mixed",
        gradient_clip_val=None if options.manual else 5.0,
        devices=1,
        default_root_dir=options.out,
        callbacks=[ModelCheckpoint(options.out, filename="last", enable_version_counter=False)],
        logger=False,
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
    )
    trainer.fit(model, train_loader, test_loader, ckpt_path=options.out / "last.ckpt" if options.resume else None)
    if options.server:
        model.optimizers().wait_for_all()  # until the other workers are through
        model.optimizers().pull()  # the server's model, the same on all workers
    accuracy = trainer.validate(model, test_loader, verbose=False)[0]["accuracy"]
    print(f"in the end: test accuracy {accuracy:.2%}", flush=True)
    common.save(model.net.state_dict(), options.out / "model.pt")


if __name__ == "__main__":
    main()

"""A vision transformer of timm on handwritten digits: layer decay, timm's scheduler, an average of the weights."""

import common
import timm
import timm.optim
import torch
from before import evaluate, make_loaders
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn

import psclient

SIZES = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 64, "depth": 3, "num_heads": 2}


def make_optimizer(model, options):
    groups = timm.optim.param_groups_layer_decay(model, weight_decay=5e-4, layer_decay=0.75)
    if not options.server:
        return torch.optim.SGD(groups, lr=0.2, momentum=0.7)
    return psclient.DGS(groups, lr=0.2, momentum=0.7, density=0.05, model=model, server=options.server)


def main() -> None:
    options = common.parser(__doc__, epochs=10).parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, test_loader = make_loaders(batch_size=32)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **SIZES).to(device)
    saved = torch.load(options.out / "timm.pt", map_location=device) if options.resume else None
    if saved:
        model.load_state_dict(saved["model"])
    optimizer = make_optimizer(model, options)
    scheduler = CosineLRScheduler(optimizer, t_initial=20, warmup_t=2, warmup_lr_init=0.01, lr_min=0.005)
    average = ModelEmaV3(model, decay=0.98)
    first_epoch = 0
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        average.load_state_dict(saved["average"])
        first_epoch = saved["epoch"]
        scheduler.step(first_epoch)
    torch.manual_seed(1 + options.seed)

    def ended() -> bool:
        return bool(options.server and optimizer.finished)

    for epoch in range(first_epoch, options.epochs):
        if ended():
            break
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            average.update(model)
            if ended():
                break
        scheduler.step(epoch + 1)
        if options.server:
            optimizer.pull()  # what is tested and saved is the server's model
        states = {"model": model, "optimizer": optimizer, "average": average}
        states = {name: part.state_dict() for name, part in states.items()}
        common.save(states | {"epoch": epoch + 1}, options.out / "timm.pt")
        accuracies = [evaluate(each, test_loader, device) for each in (model, average.module)]
        print("epoch {}: test accuracy {:.2%}, of the average {:.2%}".format(epoch + 1, *accuracies), flush=True)

    if options.server:
        optimizer.wait_for_all()  # until the other workers are through
        optimizer.pull()  # the server's model, the same on all workers
    print(f"in the end: test accuracy {evaluate(model, test_loader, device):.2%}", flush=True)
    common.save(model.state_dict(), options.out / "model.pt")


if __name__ == "__main__":
    main()

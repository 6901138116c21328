"""A GAN on handwritten digits: one optimizer over both models, which take turns."""

import common
import torch
from before import make_loaders
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as score

import psclient

NOISE = 16


def make_optimizer(model, options):
    groups = [
        {"params": list(model["generator"].parameters()), "lr": 0.05},
        {"params": list(model["discriminator"].parameters()), "lr": 0.02},
    ]
    if not options.server:
        return torch.optim.SGD(groups, momentum=0.5)
    return psclient.DGS(groups, lr=0.05, momentum=0.5, density=0.05, model=model, server=options.server)


@torch.inference_mode()
def distance(model, images: torch.Tensor) -> float:
    """Return how far the mean of generated images is from that of real ones: root mean square of the pixels."""
    made = model["generator"](torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(0)))
    return (made.mean(0) - images.mean(0)).square().mean().sqrt().item()


def main() -> None:
    options = common.parser(__doc__, epochs=20).parse_args()
    torch.manual_seed(0)
    train_loader, test_loader = make_loaders(batch_size=32)
    test_images = next(iter(test_loader))[0].flatten(1)
    model = nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()),
            "discriminator": nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)),
        }
    )
    saved = torch.load(options.out / "gan.pt") if options.resume else None
    if saved:
        model.load_state_dict(saved["model"])
    optimizer = make_optimizer(model, options)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    generator, discriminator = model["generator"], model["discriminator"]
    torch.manual_seed(1 + options.seed)

    def ended() -> bool:
        return bool(options.server and optimizer.finished)

    for epoch in range(saved["epoch"] if saved else 0, options.epochs):
        if ended():
            break
        for x, _ in train_loader:
            real, fake = x.flatten(1), generator(torch.randn(len(x), NOISE))
            ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)

            optimizer.zero_grad()
            loss = score(discriminator(real), ones) + score(discriminator(fake.detach()), zeros)
            loss.backward()
            optimizer.step()  # the generator has no gradients, and nothing of it is pushed
            if ended():
                break
            optimizer.zero_grad()
            fake = generator(torch.randn(len(x), NOISE))  # anew: the step has changed the generator too
            score(discriminator(fake), ones).backward()
            discriminator.zero_grad()
            optimizer.step()
            if ended():
                break
        if options.server:
            optimizer.pull()  # what is tested and saved is the server's model
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        common.save(state, options.out / "gan.pt")
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, distance {distance(model, test_images):.3f}", flush=True)

    if options.server:
        optimizer.wait_for_all()  # until the other workers are through
        optimizer.pull()  # the server's model, the same on all workers
    print(f"in the end: distance {distance(model, test_images):.3f}", flush=True)
    common.save(model.state_dict(), options.out / "model.pt")


if __name__ == "__main__":
    main()

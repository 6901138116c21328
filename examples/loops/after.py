"""Handwritten digits: a small CNN, SGD with momentum, a falling rate, a checkpoint after every epoch."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psclient


def make_model():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 4 * 4, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )


def make_loaders(batch_size):
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(images).float().view(-1, 1, 8, 8)[order] / 16
    y = torch.from_numpy(labels)[order]
    train = DataLoader(TensorDataset(x[360:], y[360:]), batch_size, shuffle=True, drop_last=True)
    return train, DataLoader(TensorDataset(x[:360], y[:360]), 360)


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    correct = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    return correct / len(loader.dataset)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--server", help="HOST:PORT, or local to start one; default: PSCLIENT_SERVER")
    return parser.parse_args()


def main():
    options = parse()
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, test_loader = make_loaders(options.batch_size)
    model = make_model().to(device)
    saved = torch.load(options.checkpoint, map_location=device) if options.resume else None
    if saved:
        model.load_state_dict(saved["model"])
    optimizer = psclient.DGS(
        model.parameters(), lr=options.lr, momentum=0.7, weight_decay=5e-4, model=model, server=options.server
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])

    for epoch in range(saved["epoch"] if saved else 0, options.epochs):
        if optimizer.finished:
            break
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            if optimizer.finished:
                break
        scheduler.step()
        optimizer.pull()
        accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy:.2%}", flush=True)
        states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        states = {name: part.state_dict() for name, part in states.items()}
        torch.save(states | {"epoch": epoch + 1}, options.checkpoint)
    optimizer.close()


if __name__ == "__main__":
    main()

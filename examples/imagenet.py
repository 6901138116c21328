"""Train ResNet-50, or any classifier of torchvision, on ImageNet through a parameter server.

    python examples/imagenet.py DATA --workers 4                       # a server and four workers here
    python examples/imagenet.py DATA --server HOST:50051               # join a server: one worker of many
    torchrun --nproc-per-node 8 examples/imagenet.py DATA --server HOST:50051
    python examples/imagenet.py DATA --evaluate runs/imagenet/model.safetensors
    python examples/imagenet.py DATA --profile                         # what bounds the images per second

DATA holds folders, DATA/train/CLASS/*.JPEG and DATA/val/CLASS/*.JPEG, or TFRecord files, DATA/train-00000-of-01024 and
so on and DATA/validation-00000-of-00128 and so on. Runs go to --out. docs/guide/imagenet.md says more.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from support import checkpoints, launch, methods, profile
from support.evaluation import ServersModel, accuracies, load_saved
from support.images import check_layout, open_images
from support.loaders import choose, make_loader
from support.reporter import Reporter
from support.samplers import make_sampler
from support.vision import torchvision
from torch import nn

SMALLEST = 64
"""Pixels: a ResNet halves the sides five times, and batch norm needs more than one value a channel."""


def make_model(name: str, classes: int) -> nn.Module:
    """Return a classifier by torchvision's name, with random weights."""
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    return model


def train(options: argparse.Namespace, place: launch.Place) -> None:
    torch.manual_seed(options.seed)
    train_set, test_set = (open_images(options.data, part, options.classes) for part in ("train", "val"))
    model = make_model(options.model, len(train_set.classes)).to(place.device)
    length = methods.Length.of(options, math.ceil(len(train_set) / options.batch_size))

    # The parameter server: an optimizer that pushes and pulls, and a sampler that shares the data out.
    optimizer, clock = methods.make_optimizer(options, model, place, length)
    start = checkpoints.load(place, optimizer, clock, model)
    sampler = make_sampler(options.method, train_set, optimizer, place, options.seed, start)

    loading = loading_options(options, place.device)
    train_loader = make_loader(
        images=train_set, sampler=sampler, training=True, seed=options.seed + place.index, **loading
    )
    test_loader = make_loader(images=test_set, sampler=range(len(test_set)), training=False, **loading)
    scaler = torch.amp.GradScaler(place.device.type, enabled=options.precision == "fp16")
    autocast = {"device_type": place.device.type, "enabled": options.precision != "fp32"}
    autocast["dtype"] = torch.float16 if options.precision == "fp16" else torch.bfloat16
    servers_model = ServersModel(model, optimizer, place)

    with Reporter(place, optimizer, options.epochs * length.steps_per_epoch) as reporter:
        reporter.say(f"{len(train_set)} + {len(test_set)} images, {len(train_set.classes)} classes, {loading['name']}")
        for epoch in sampler.epochs(options.epochs):
            model.train()
            for inputs, labels in train_loader:
                inputs, labels = inputs.to(place.device, non_blocking=True), labels.to(place.device, non_blocking=True)
                optimizer.zero_grad()
                with torch.autocast(**autocast):
                    loss = nn.functional.cross_entropy(model(inputs), labels, label_smoothing=options.label_smoothing)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                clock.step()
                reporter.step(epoch, loss, len(labels))
                if methods.is_finished(optimizer):  # the server ends the run
                    break
            checkpoints.save(place, optimizer, clock, model, epoch + 1)
            if place.is_first and (epoch + 1) % options.evaluate_every == 0 and epoch + 1 < options.epochs:
                top1, top5 = accuracies(servers_model.fetch(), test_loader, 1, 5)
                reporter.evaluation(epoch, accuracy=top1, top5=top5)
        servers_model.leave()
        if place.is_first:
            top1, top5 = accuracies(servers_model.fetch(), test_loader, 1, 5)
            reporter.evaluation(options.epochs - 1, accuracy=top1, top5=top5)
            servers_model.save(place.out / "model.safetensors")
            reporter.say(f"wrote {place.out / 'model.safetensors'}")


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot work: raises ``ValueError``, ``FileNotFoundError`` or an error of psclient's."""
    if options.image_size < SMALLEST:
        raise ValueError(f"--image-size is {options.image_size}; it must be at least {SMALLEST}")
    check_layout(options.data, ["val"] if options.evaluate else ["train", "val"])
    choose(options.loader)
    torchvision.models.get_model_builder(options.model)


def loading_options(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return what the loaders have in common."""
    name, size = choose(options.loader), options.image_size
    return {"name": name, "batch_size": options.batch_size, "size": size, "workers": options.loaders, "device": device}


def evaluate(options: argparse.Namespace) -> int:
    """Test a saved model: a plain torchvision model, and no server."""
    images, device = open_images(options.data, "val", options.classes), launch.find_device(options.device)
    model = load_saved(make_model(options.model, len(images.classes)), options.evaluate).to(device).eval()
    loader = make_loader(images=images, sampler=range(len(images)), training=False, **loading_options(options, device))
    top1, top5 = accuracies(model, loader, 1, 5)
    print(f"accuracy of {options.evaluate}: {top1:.2%}, among the best five {top5:.2%}")
    return 0


def measure(options: argparse.Namespace) -> int:
    """Measure each part of a step by itself."""
    images, device = open_images(options.data, "train", options.classes), launch.find_device(options.device)
    return profile.run(options, images, make_model(options.model, len(images.classes)).to(device), device)


def main(options: argparse.Namespace) -> int:
    check(options)
    if options.profile:
        return measure(options)
    return evaluate(options) if options.evaluate else launch.run(train, options)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA", help="the dataset's folder")
    parser.add_argument("--model", default="resnet50", metavar="NAME", help="of torchvision (default: %(default)s)")
    parser.add_argument("--image-size", type=int, default=224, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--classes", type=launch.at_least(1), default=1000, metavar="N", help="of TFRecord files (default: 1000)"
    )
    parser.add_argument("--loader", choices=("dali", "torchvision"), help="default: dali where it can be imported")
    parser.add_argument(
        "--loaders", type=launch.at_least(0), default=2, metavar="N", help="threads or processes that load (default: 2)"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: %(default)s")
    parser.add_argument("--label-smoothing", type=float, default=0.0, metavar="X", help="default: %(default)s")
    parser.add_argument("--evaluate-every", type=launch.at_least(1), default=1, metavar="N", help="epochs (default: 1)")
    parser.add_argument("--evaluate", type=Path, metavar="FILE", help="only test a saved model")
    parser.add_argument("--profile", action="store_true", help="only measure what bounds the images per second")
    methods.add_arguments(parser, lr=0.1, batch_size=64, epochs=90)
    parser.set_defaults(weight_decay=1e-4)
    launch.add_arguments(parser, out="runs/imagenet")
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    sys.exit(launch.guarded(lambda: main(given)))

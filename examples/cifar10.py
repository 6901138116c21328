"""Train ResNet-18, or any classifier of torchvision, on CIFAR-10 or CIFAR-100 through a parameter server.

    python examples/cifar10.py DATA --download --workers 2            # a server and two workers here
    python examples/cifar10.py DATA --server HOST:50051               # join a server: one worker of many
    torchrun --nproc-per-node 4 examples/cifar10.py DATA --server HOST:50051
    python examples/cifar10.py DATA --evaluate runs/cifar10/model.safetensors

DATA is where torchvision keeps the dataset: DATA/cifar-10-batches-py/data_batch_1 and so on. Runs go to --out.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from support import checkpoints, datafiles, launch, methods
from support.evaluation import ServersModel, accuracy, load_saved
from support.reporter import Reporter
from support.samplers import make_sampler
from support.vision import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2


class CIFAR10(torchvision.datasets.CIFAR10):
    """The published dataset, or with --md5s others in its format."""


class CIFAR100(torchvision.datasets.CIFAR100):
    """The same of a hundred classes."""


DATASETS = {"cifar10": CIFAR10, "cifar100": CIFAR100}
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def load_data(options: argparse.Namespace, *, train: bool) -> torchvision.datasets.CIFAR10:
    """Return the training or the test images, augmented or not; raises where files are missing or damaged."""
    kind: Any = DATASETS[options.dataset]
    if options.md5s is not None:  # other images in the same format
        datafiles.expect_md5s(kind, datafiles.read_md5s(options.md5s))
    if options.download:
        try:
            kind(options.data, download=True)
        except (OSError, RuntimeError) as error:
            raise datafiles.MissingDataError(f"{kind.url} cannot be fetched into {options.data}: {error}") from error
    steps: list[nn.Module] = [v2.ToImage()]
    if train:
        steps += [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, DEVIATION)]
    try:
        return kind(options.data, train=train, transform=v2.Compose(steps))
    except RuntimeError:  # a file is missing, or has another checksum; torchvision does not say which
        listed = dict([*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])])
        where = (
            f"This is {kind.__name__}, python version, {kind.url}, unpacked into {options.data}; --download fetches it"
        )
        datafiles.require_files(options.data / kind.base_folder, listed, where)
        raise


def make_model(name: str, classes: int) -> nn.Module:
    """Return a classifier by torchvision's name, with a stem for small images.

    A ResNet gets that of He et al. (section 4.2); of other networks the first convolution looks at every pixel, so that
    32 pixels do not end as one before the last layer.
    """
    model: Any = torchvision.models.get_model(name, weights=None, num_classes=classes)
    if isinstance(model, torchvision.models.ResNet):
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        next(module for module in model.modules() if isinstance(module, nn.Conv2d)).stride = (1, 1)
    return model


def train(options: argparse.Namespace, place: launch.Place) -> None:
    torch.manual_seed(options.seed)
    train_set, test_set = load_data(options, train=True), load_data(options, train=False)
    model = make_model(options.model, len(train_set.classes)).to(place.device)
    length = methods.Length.of(options, math.ceil(len(train_set) / options.batch_size))

    # The parameter server: an optimizer that pushes and pulls, and a sampler that shares the data out.
    optimizer, clock = methods.make_optimizer(options, model, place, length)
    start = checkpoints.load(place, optimizer, clock, model)
    sampler = make_sampler(options.method, train_set, optimizer, place, options.seed, start)

    loading: dict[str, Any] = {"batch_size": options.batch_size, "num_workers": options.loaders}
    loading |= {"pin_memory": place.device.type == "cuda", "persistent_workers": options.loaders > 0}
    loading["multiprocessing_context"] = "spawn" if options.loaders else None  # no fork beside the threads of gRPC
    train_loader = DataLoader(train_set, sampler=sampler, **loading)
    test_loader = DataLoader(test_set, **loading)
    scaler = torch.amp.GradScaler(place.device.type, enabled=options.precision == "fp16")
    autocast = {"device_type": place.device.type, "enabled": options.precision != "fp32"}
    autocast["dtype"] = torch.float16 if options.precision == "fp16" else torch.bfloat16
    servers_model = ServersModel(model, optimizer, place)

    with Reporter(place, optimizer, options.epochs * length.steps_per_epoch) as reporter:
        for epoch in sampler.epochs(options.epochs):
            model.train()
            for inputs, labels in train_loader:
                inputs, labels = inputs.to(place.device, non_blocking=True), labels.to(place.device, non_blocking=True)
                optimizer.zero_grad()
                with torch.autocast(**autocast):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                clock.step()
                reporter.step(epoch, loss, len(labels))
                if methods.is_finished(optimizer):  # the server ends the run
                    break
            checkpoints.save(place, optimizer, clock, model, epoch + 1)
            if place.is_first and (epoch + 1) % options.evaluate_every == 0 and epoch + 1 < options.epochs:
                reporter.evaluation(epoch, accuracy=accuracy(servers_model.fetch(), test_loader))
        servers_model.leave()
        if place.is_first:
            reporter.evaluation(options.epochs - 1, accuracy=accuracy(servers_model.fetch(), test_loader))
            servers_model.save(place.out / "model.safetensors")
            reporter.say(f"wrote {place.out / 'model.safetensors'}")


def main(options: argparse.Namespace) -> int:
    """Do what the options ask for; data that are missing or damaged are told of before anything starts."""
    torchvision.models.get_model_builder(options.model)
    load_data(options, train=False)
    options.download = False  # it is done, once for all workers
    return evaluate(options) if options.evaluate else launch.run(train, options)


def evaluate(options: argparse.Namespace) -> int:
    """Test a saved model: a plain torchvision model, and no server."""
    test_set = load_data(options, train=False)
    model = load_saved(make_model(options.model, len(test_set.classes)), options.evaluate).eval()
    print(f"accuracy of {options.evaluate}: {accuracy(model, DataLoader(test_set, options.batch_size)):.2%}")
    return 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA", help="the dataset's folder")
    parser.add_argument("--dataset", choices=[*DATASETS], default="cifar10", help="default: %(default)s")
    parser.add_argument("--download", action="store_true", help="fetch the dataset if it is not there")
    parser.add_argument("--md5s", type=Path, metavar="FILE", help="md5sum's of other files in the same format")
    parser.add_argument("--model", default="resnet18", metavar="NAME", help="of torchvision (default: %(default)s)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: %(default)s")
    parser.add_argument(
        "--loaders", type=launch.at_least(0), default=2, metavar="N", help="processes that load (default: 2)"
    )
    parser.add_argument("--evaluate-every", type=launch.at_least(1), default=1, metavar="N", help="epochs (default: 1)")
    parser.add_argument("--evaluate", type=Path, metavar="FILE", help="only test a saved model")
    methods.add_arguments(parser, lr=0.1, batch_size=64, epochs=90)
    launch.add_arguments(parser, out="runs/cifar10")
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    sys.exit(launch.guarded(lambda: main(given)))

"""A step finishes the samples that its loader gave out, or says that it cannot tell: never other ones in silence."""

import os
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import psclient
from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK
from tests.tiers import long_but

COUNT = 36  # of which the last batch has 4


@pytest.fixture(scope="module")
def server():
    with LocalServer(down_mode="exact") as running:
        yield running


class Images(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.full((3, 4, 4), float(index)), index


def listed(pairs):
    """As detection models have it: images of any size, in a list."""
    return [image for image, _ in pairs], [index for _, index in pairs]


class Model(nn.Module):
    """Takes a list of images, or a tensor in which the batch is the second dimension, or the first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 2)

    def forward(self, images):
        if isinstance(images, list):
            return torch.stack([self.layer(image.reshape(-1)) for image in images])
        return self.layer(images)


INPUTS = {
    "a list of images": lambda images: images,
    "(T, B, F)": lambda images: torch.stack(images).reshape(len(images), 48).repeat(5, 1, 1),
    "(B, F)": lambda images: torch.stack(images).reshape(len(images), 48),
}


class Loop:
    """A worker with a sampler and a loader."""

    def __init__(self, server, *, overlap=False, **loader):
        self.model = Model()
        settings = QUICK.model_copy(update={"bucket_bytes": 1})
        self.optimizer = psclient.ASGD(
            self.model.parameters(), lr=1e-6, model=self.model, server=server, overlap=overlap, settings=settings
        )
        name = os.environ["PYTEST_CURRENT_TEST"]
        self.sampler = psclient.ElasticSampler(Images(), self.optimizer, name=name, lease_samples=16)
        loader = {"batch_size": 8, "collate_fn": listed} | loader
        self.loader = DataLoader(Images(), sampler=self.sampler, **loader)
        self.trained = Counter()

    def backward(self, images, indices, form="(B, F)"):
        self.model(INPUTS[form](images)).sum().backward()
        self.trained.update(indices)

    def step(self, **samples):
        self.optimizer.step(**samples)
        self.optimizer.zero_grad()

    def held(self):
        """How many samples the server has in this worker's hands."""
        self.optimizer.flush()
        return sum(each.count for each in self.sampler._request_lease(self.sampler.epoch, 0, {}).granted)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.optimizer.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", ["a list of images", "(T, B, F)"])
def test_a_model_whose_first_dimension_is_no_batch_asks_for_the_number(server, form, workers):
    with Loop(server, num_workers=workers) as loop:
        for images, indices in loop.loader:
            loop.backward(images, indices, form)
            with pytest.raises(ConfigurationError, match=r"counts [35] samples, .* batches of \[[84]\] .*samples=len"):
                loop.optimizer.step()
            loop.step(samples=len(indices))
        assert loop.trained == Counter(range(COUNT))
        assert loop.held() == 0


def test_a_model_that_is_called_twice_a_batch_asks_for_the_number(server):
    with Loop(server) as loop:
        images, indices = next(iter(loop.loader))
        loop.backward(images, indices)
        loop.backward(images, indices)
        with pytest.raises(ConfigurationError, match="counts 16 samples"):
            loop.optimizer.step()


def test_with_overlap_the_message_names_the_model(server):
    with Loop(server, overlap=True) as loop:
        images, indices = next(iter(loop.loader))
        loop.backward(images, indices, "(T, B, F)")
        with pytest.raises(ConfigurationError, match=r"counts 5 samples.*let model= be a module that is called once"):
            loop.optimizer.step()


def plain(loop):
    for images, indices in loop.loader:
        loop.backward(images, indices)
        loop.step()


def accumulating(loop):
    for number, (images, indices) in enumerate(loop.loader):
        loop.backward(images, indices)
        if number % 2:
            loop.step()
    loop.step()


def looking_ahead(loop):
    """As loops that want to know which batch is the last: one more is given out than is trained."""
    for (images, indices), following in pairs(loop.loader):
        loop.backward(images, indices)
        loop.step()
        del following


def pairs(loader):
    batches = iter(loader)
    now = next(batches)
    for following in batches:
        yield now, following
        now = following
    yield now, None


def with_other_data(loop):
    plain(loop)
    loop.backward([torch.ones(3, 4, 4)] * 5, [])
    loop.step()


ONE_BY_ONE = {"batch_size": None, "collate_fn": lambda one: listed([one])}


@pytest.mark.parametrize("loader", [{}, {"num_workers": 2}, ONE_BY_ONE], ids=["batches", "prefetched", "one by one"])
@pytest.mark.parametrize(
    "train", long_but([plain, accumulating], [plain, accumulating, looking_ahead, with_other_data])
)
def test_usual_loops_are_counted_as_before(server, train, loader):
    with Loop(server, **loader) as loop:
        for epoch in range(2):
            train(loop)
            assert loop.trained == Counter(dict.fromkeys(range(COUNT), epoch + 1))
        assert loop.held() == 0


def test_a_batch_that_is_skipped_without_a_forward_holds_up_nothing(server):
    with Loop(server) as loop:
        for number, (images, indices) in enumerate(loop.loader):
            if number != 1:
                loop.backward(images, indices)
                loop.step()
        assert loop.trained.total() == COUNT - 8

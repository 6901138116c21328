"""Both loaders of images give the same, each sample once an epoch, and name what they cannot read."""

import errno
import io
from collections import Counter
from itertools import islice

import pytest
import torch
from PIL import Image
from support import tfrecord
from support.datafiles import DamagedDataError, MissingDataError
from support.images import FolderImages, check_layout, decode, open_images
from support.loaders import make_loader
from support.smalldata import write_imagenet
from torch import nn

import psclient
from tests.tiers import long_but

CPU = torch.device("cpu")
CLASSES, PER_CLASS = 3, 8  # a quarter of these are for validation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("imagenet"), per_class=PER_CLASS, classes=CLASSES, size=128)


@pytest.fixture(scope="module")
def records(folder, tmp_path_factory):
    """The validation images, in two files."""
    images, data = FolderImages(folder / "val"), tmp_path_factory.mktemp("records")
    samples = [images.read(index) for index in range(len(images))]
    for number in range(2):
        part = [(image, label + 1) for image, label in samples[number::2]]
        tfrecord.write_records(data / f"validation-{number:05d}-of-00002", part)
    return data


def loader_of(name, images, sampler, *, training=False, size=64, device=CPU, batch_size=4, workers=0):
    common = {"training": training, "size": size, "device": device, "batch_size": batch_size, "workers": workers}
    return make_loader(name, images, sampler, **common)


def all_of(loader):
    inputs, labels = zip(*loader, strict=True)
    return torch.cat(inputs), torch.cat(labels)


@pytest.fixture(params=["dali", "torchvision"])
def kind(request):
    if request.param == "dali":
        pytest.importorskip("nvidia.dali")
    return request.param


class Numbered:
    """Images whose labels are their numbers."""

    def __init__(self, images):
        self.inner, self.classes = images, images.classes

    def __len__(self):
        return len(self.inner)

    def name(self, index):
        return self.inner.name(index)

    def read(self, index):
        return self.inner.read(index)[0], index


@pytest.mark.long
@pytest.mark.parametrize("layout", long_but(["folder"], ["folder", "records"]))
def test_the_loaders_agree_on_labels_and_validation_pixels(folder, records, layout):
    pytest.importorskip("nvidia.dali")
    images = open_images(folder if layout == "folder" else records, "val", CLASSES)
    (dali, labels), (pillow, expected) = (
        all_of(loader_of(name, images, range(len(images)), size=112)) for name in ("dali", "torchvision")
    )
    assert torch.equal(labels, expected)
    assert Counter(labels.tolist()) == dict.fromkeys(range(CLASSES), PER_CLASS // 4)
    assert dali.shape == (CLASSES * PER_CLASS // 4, 3, 112, 112)
    assert (dali - pillow).abs().max() < 1.1 / 255 / 0.224  # one level of the 256, normalised


def test_training_images_are_cut_out_at_random(folder, kind):
    images = open_images(folder, "train", 0)
    first, second = (all_of(loader_of(kind, images, [0, 0, 0], training=True))[0] for _ in range(2))
    assert first.shape == (3, 3, 64, 64)
    assert not torch.equal(first[0], first[1])
    assert -2.2 < first.min() < first.max() < 2.7
    assert torch.isfinite(second).all()


def test_batches_come_in_the_order_drawn_and_a_left_pass_is_forgotten(folder, kind):
    images = Numbered(open_images(folder, "train", 0))
    order = [5, 3, 17, 2, 11, 0, 8, 1, 9, 16, 4]
    loader = loader_of(kind, images, order, training=True, workers=2 if kind == "dali" else 0)
    assert [batch.tolist() for _, batch in islice(loader, 1)] == [order[:4]]
    for _ in range(2):
        assert [batch.tolist() for _, batch in loader] == [order[:4], order[4:8], order[8:]]


def test_an_empty_pass_is_no_error(folder, kind):
    loader = loader_of(kind, open_images(folder, "train", 0), [])
    assert [list(loader), list(loader)] == [[], []]


def test_elastic_data_train_each_sample_once_an_epoch(folder, kind):
    """Two workers take turns; one leaves its first pass half-way, while batches are read and decoded ahead."""
    images = Numbered(open_images(folder, "train", 0))
    trained = Counter()
    with psclient.LocalServer() as server:

        def worker(name):
            model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, len(images)))
            optimizer = psclient.ASGD(model.parameters(), lr=0.01, model=model, server=server.server, worker=name)
            sampler = psclient.ElasticSampler(images, optimizer, lease_samples=6)
            loader = loader_of(kind, images, sampler, training=True, size=64, batch_size=2)
            return model, optimizer, sampler, loader

        def steps(model, optimizer, loader):
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                trained.update(labels.tolist())
                yield

        leaver, stayer = worker("leaver"), worker("stayer")
        leaving, staying = steps(leaver[0], leaver[1], leaver[3]), steps(stayer[0], stayer[1], stayer[3])
        for _ in range(2):
            next(leaving), next(staying)
        assert sum(trained.values()) == 8
        leaver[1].close()  # what it has drawn and not trained is for others
        for _ in staying:
            pass
        for _ in stayer[2].epochs(3):
            for _ in steps(stayer[0], stayer[1], stayer[3]):
                pass
        stayer[1].close()
    assert trained == dict.fromkeys(range(len(images)), 3)


@pytest.mark.parametrize("damage", long_but(["truncated"], ["text", "truncated", "empty"]))
def test_an_image_that_cannot_be_decoded_is_named(tmp_path, kind, damage):
    images = FolderImages(write_imagenet(tmp_path, per_class=4, classes=2, size=64) / "train")
    path = tmp_path / "train" / images.classes[1] / images._names[4]
    path.write_bytes({"text": b"no image", "truncated": path.read_bytes()[:500], "empty": b""}[damage])
    with pytest.raises(DamagedDataError, match=path.name):
        all_of(loader_of(kind, images, range(len(images)), batch_size=2))


def test_a_process_of_the_loader_names_the_image_in_one_line(tmp_path):
    images = FolderImages(write_imagenet(tmp_path, per_class=4, classes=1, size=64) / "train")
    path = tmp_path / "train" / images.classes[0] / images._names[0]
    path.write_bytes(b"no image")
    with pytest.raises(DamagedDataError, match=path.name) as caught:
        all_of(loader_of("torchvision", images, range(3), workers=1))
    assert "\n" not in str(caught.value)


def test_a_record_is_found_by_its_offset_and_the_index_is_kept(folder, records):
    images, in_folder = open_images(records, "val", CLASSES), FolderImages(folder / "val")
    expected = sorted(in_folder.read(index) for index in range(len(in_folder)))
    assert sorted(images.read(index) for index in range(len(images))) == expected
    index = records / "validation-00000-of-00002.idx"
    assert index.read_text().startswith("0 ")
    written = index.stat().st_mtime_ns
    assert len(open_images(records, "val", CLASSES)) == len(in_folder)
    assert index.stat().st_mtime_ns == written


def test_a_disk_that_is_only_read_has_no_index(records, tmp_path, monkeypatch):
    path = tmp_path / "validation-00000-of-00001"
    path.write_bytes((records / "validation-00000-of-00002").read_bytes())

    def refuse(self, text):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(type(path), "write_text", refuse)
    assert len(open_images(tmp_path, "val", CLASSES)) > 0
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_an_image_that_is_too_large_to_be_decoded_is_named(monkeypatch):
    data = io.BytesIO()
    Image.new("RGB", (40, 40)).save(data, "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DamagedDataError, match=r"x\.png cannot be decoded"):
        decode(data.getvalue(), "x.png")


def test_damaged_records_are_named(records, tmp_path):
    path = tmp_path / "validation-00000-of-00001"
    whole = (records / "validation-00000-of-00002").read_bytes()
    for content, said in ((whole[:-20], "ends within"), (b"no record" * 9, "no TFRecord file"), (b"", "holds none")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            open_images(tmp_path, "val", CLASSES)
    path.write_bytes(whole)
    for index in ("0 17\n", f"0 0\n0 {len(whole)}\n", f"0 -5\n-5 {len(whole) + 5}\n"):
        (tmp_path / f"{path.name}.idx").write_text(index)
        with pytest.raises(ValueError, match="does not fit"):
            open_images(tmp_path, "val", CLASSES)
    (tmp_path / f"{path.name}.idx").unlink()
    images = open_images(tmp_path, "val", 1)
    with pytest.raises(DamagedDataError, match="--classes"):
        [images.read(index) for index in range(len(images))]
    tfrecord.write_records(path, [])
    path.write_bytes(tfrecord_of_something_else())
    (tmp_path / f"{path.name}.idx").unlink()
    with pytest.raises(DamagedDataError, match="needs image/encoded"):
        open_images(tmp_path, "val", 1).read(0)


def tfrecord_of_something_else():
    """Return a record without an image."""
    data = b""
    length = len(data).to_bytes(8, "little")
    return length + tfrecord._checksum(length) + data + tfrecord._checksum(data)


def test_missing_and_different_data_are_asked_for(tmp_path):
    with pytest.raises(MissingDataError, match=r"train-00000-of-01024"):
        check_layout(tmp_path / "nothing")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(MissingDataError, match=f"{tmp_path / 'val'} is missing"):
        check_layout(tmp_path)
    (tmp_path / "val").mkdir()
    with pytest.raises(MissingDataError, match="sort them into"):
        check_layout(tmp_path)
    (tmp_path / "val" / "dog").mkdir()
    with pytest.raises(ValueError, match=r"lacks classes that .* has: cat"):
        check_layout(tmp_path)
    (tmp_path / "val" / "cat").mkdir()
    with pytest.raises(ValueError, match=r"lacks classes that .* has: dog"):
        check_layout(tmp_path)
    with pytest.raises(MissingDataError, match="cat holds no image"):
        open_images(tmp_path, "train", 0)


def test_a_missing_file_of_records_is_named(records, tmp_path):
    (tmp_path / "validation-00000-of-00003").touch()
    (tmp_path / "validation-00002-of-00003").touch()
    with pytest.raises(MissingDataError, match="validation-00001-of-00003"):
        check_layout(tmp_path, ["val"])
    with pytest.raises(MissingDataError, match="train-"):
        check_layout(records)


@pytest.mark.cuda
@pytest.mark.parametrize("training", [False, True])
def test_a_gpu_decodes_what_the_cpu_does(folder, training):
    pytest.importorskip("nvidia.dali")
    images, device = open_images(folder, "val", 0), torch.device("cuda:0")
    loader = loader_of("dali", images, range(len(images)), training=training, device=device, size=112)
    found, labels = all_of(loader)
    assert found.device == labels.device == device
    if not training:
        expected, _ = all_of(loader_of("dali", images, range(len(images)), size=112))
        assert (found.cpu() - expected).abs().mean() < 0.02  # nvJPEG rounds in its own way

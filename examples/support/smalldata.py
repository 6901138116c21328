"""Small data in the real formats, made of scikit-learn's handwritten digits: for trying the scripts, not for results.

``python examples/support/smalldata.py FOLDER`` writes FOLDER/cifar10 and FOLDER/cifar100 as the datasets are published
(python version), each with its md5sums.txt, and FOLDER/imagenet as folders of JPEG files.
"""

import argparse
import hashlib
import pickle
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

TEST_IMAGES = 297


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--imagenet-per-class", type=int, default=24, metavar="N", help="images (default: %(default)s)")
    options = parser.parse_args()
    folder = options.folder
    for name, path in (
        ("CIFAR-10", write_cifar10(folder / "cifar10")),
        ("CIFAR-100", write_cifar100(folder / "cifar100")),
        ("ImageNet", write_imagenet(folder / "imagenet", options.imagenet_per_class)),
    ):
        print(f"{name}: {path}")


def digits(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return 1,797 digits as coloured images, (n, size, size, 3) of bytes, and their labels."""
    images, labels = load_digits(return_X_y=True)
    tints = np.random.default_rng(0).integers(128, 256, (len(images), 3))
    found = np.empty((len(images), size, size, 3), np.uint8)
    for number, image in enumerate(images):
        grey = Image.fromarray((image.reshape(8, 8) * 15.9).astype(np.uint8)).resize(
            (size, size), Image.Resampling.BILINEAR
        )
        found[number] = np.asarray(grey, np.float32)[:, :, None] * (tints[number] / 255.0)
    order = np.random.default_rng(1).permutation(len(images))
    return found[order], labels[order]


def write_cifar10(folder: Path) -> Path:
    """Write the ten digits as CIFAR-10's five batches and test batch; return the folder."""
    images, labels = digits(32)
    names = [str(digit) for digit in range(10)]
    files: dict[str, dict[str, object]] = {"batches.meta": {"label_names": names}}
    for number, part in enumerate(np.array_split(np.arange(len(images) - TEST_IMAGES), 5), 1):
        files[f"data_batch_{number}"] = {"data": _planes(images[part]), "labels": labels[part].tolist()}
    files["test_batch"] = {"data": _planes(images[-TEST_IMAGES:]), "labels": labels[-TEST_IMAGES:].tolist()}
    return _pickled(folder, "cifar-10-batches-py", files)


def write_cifar100(folder: Path) -> Path:
    """Write them as CIFAR-100: a fine class is a digit and where it is moved to; return the folder."""
    images, labels = digits(32)
    places = np.arange(len(images)) % 10
    moved = np.stack([np.roll(image, 3 * int(place), axis=1) for image, place in zip(images, places, strict=True)])
    fine = labels * 10 + places
    files: dict[str, dict[str, object]] = {
        "meta": {"fine_label_names": [f"{name // 10} at {name % 10}" for name in range(100)]}
    }
    for name, part in (("train", slice(None, -TEST_IMAGES)), ("test", slice(-TEST_IMAGES, None))):
        files[name] = {"data": _planes(moved[part]), "fine_labels": fine[part].tolist()}
    return _pickled(folder, "cifar-100-python", files)


def write_imagenet(folder: Path, per_class: int = 24, classes: int = 10, size: int = 256) -> Path:
    """Write JPEG files as ImageNet is unpacked: ``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG``; return the folder."""
    images, labels = digits(size)
    for label in range(classes):
        for number, image in enumerate(images[labels == label][:per_class]):
            part = folder / ("val" if number % 4 == 3 else "train") / f"n{label:08d}"
            part.mkdir(parents=True, exist_ok=True)
            shape = (size + 16 * (number % 5), size)  # not all are square
            Image.fromarray(image).resize(shape).save(part / f"n{label:08d}_{number}.JPEG", quality=90)
    return folder


def _planes(images: np.ndarray) -> np.ndarray:
    """Return rows of red, green and blue planes, as CIFAR has them."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def _pickled(folder: Path, name: str, files: dict[str, dict[str, object]]) -> Path:
    inner = folder / name
    inner.mkdir(parents=True, exist_ok=True)
    sums = []
    for file, content in files.items():
        data = pickle.dumps(content)
        (inner / file).write_bytes(data)
        sums.append(f"{hashlib.md5(data).hexdigest()}  {file}\n")
    (folder / "md5sums.txt").write_text("".join(sums))
    return folder


if __name__ == "__main__":
    main()

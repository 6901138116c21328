"""ImageNet as TFRecord files, read at any place: an index of offsets, and as much of ``tf.train.Example`` as is needed.

``python examples/support/tfrecord.py FOLDERS DEST`` writes FOLDERS/train/CLASS/* and FOLDERS/val/CLASS/* as the files
that this reads: DEST/train-00000-of-00008 and so on. The fields are those of TensorFlow's ImageNet: ``image/encoded``,
and ``image/class/label`` from 1. The index is what DALI's ``tfrecord2idx`` writes: ``OFFSET SIZE`` a line.
"""

import argparse
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

HEADER, FOOTER = 12, 4
"""Bytes around a record: its length with a checksum, and the checksum of what it holds."""

_FIELDS = {  # message: name, number, type, repeated; a map is a list of entries on the wire
    "BytesList": [("value", 1, "TYPE_BYTES", True)],
    "Int64List": [("value", 1, "TYPE_INT64", True)],
    "Feature": [("bytes_list", 1, "BytesList", False), ("int64_list", 3, "Int64List", False)],
    "Entry": [("key", 1, "TYPE_STRING", False), ("value", 2, "Feature", False)],
    "Features": [("feature", 1, "Entry", True)],
    "Example": [("features", 1, "Features", False)],
}


class RecordError(ValueError):
    """A file or a record is not what it should be; the message names the file and the place."""


def read_index(path: Path) -> np.ndarray:
    """Return offset and size of each record of a file, from PATH.idx, which is written if it is not there.

    Raises:
        RecordError: the file is damaged, or the index is another file's.
    """
    index = path.with_name(path.name + ".idx")
    if not index.exists():
        found = _scan(path)
        temporary = index.with_name(f"{index.name}.{os.getpid()}.partial")
        try:
            temporary.write_text("".join(f"{offset} {size}\n" for offset, size in found))
            temporary.replace(index)
        except OSError:  # a folder, or a disk, that is only read: the next process scans again
            pass
        return found
    try:
        found = np.loadtxt(index, np.int64, ndmin=2).reshape(-1, 2)
    except ValueError as error:
        raise RecordError(f"{index} is no index of records: {error}; delete it, and it is made again") from error
    ends = found.sum(axis=1)
    fits = len(found) and found[0, 0] == 0 and ends[-1] == path.stat().st_size and (found[1:, 0] == ends[:-1]).all()
    if not fits or (found[:, 1] < HEADER + FOOTER).any():
        raise RecordError(f"{index} does not fit {path.name}; delete it, and it is made again")
    return found


def read_record(path: Path, offset: int, size: int) -> tuple[bytes, int]:
    """Return a record's encoded image and its label as it stands there.

    Raises:
        RecordError: the record is damaged, or has no image or no label.
    """
    with path.open("rb") as stream:
        stream.seek(offset)
        framed = stream.read(size)
    if len(framed) != size or struct.unpack_from("<Q", framed)[0] != size - HEADER - FOOTER:
        raise RecordError(f"{path} has no record of {size} bytes at byte {offset}")
    try:
        example = Example.FromString(framed[HEADER:-FOOTER])
    except DecodeError as error:
        raise RecordError(f"{path}: the record at byte {offset} is no tf.train.Example") from error
    fields = {entry.key: entry.value for entry in example.features.feature}
    try:
        return fields["image/encoded"].bytes_list.value[0], fields["image/class/label"].int64_list.value[0]
    except (KeyError, IndexError):
        known = ", ".join(sorted(fields)) or "none"
        raise RecordError(
            f"{path}: the record at byte {offset} needs image/encoded and image/class/label; its fields: {known}"
        ) from None


def write_records(path: Path, samples: list[tuple[bytes, int]]) -> None:
    """Write encoded images with their labels, from 1 as in TensorFlow's ImageNet, as one file."""
    with path.open("wb") as stream:
        for image, label in samples:
            example = Example()
            example.features.feature.add(key="image/encoded").value.bytes_list.value.append(image)
            example.features.feature.add(key="image/class/label").value.int64_list.value.append(label)
            data = example.SerializeToString()
            length = struct.pack("<Q", len(data))
            stream.write(length + _checksum(length) + data + _checksum(data))


def _scan(path: Path) -> np.ndarray:
    """Find the records of a file; only their headers are read."""
    found, offset, end = [], 0, path.stat().st_size
    with path.open("rb") as stream:
        while offset < end:
            stream.seek(offset)
            header = stream.read(HEADER)
            if len(header) < HEADER or header[8:] != _checksum(header[:8]):
                raise RecordError(f"{path} is damaged, or no TFRecord file: no record begins at byte {offset}")
            size = struct.unpack_from("<Q", header)[0] + HEADER + FOOTER
            found.append((offset, size))
            offset += size
    if offset != end or not found:
        raise RecordError(f"{path} ends within a record, or holds none: fetch it again")
    return np.array(found, np.int64)


def _table() -> list[int]:
    """Return CRC-32C of each byte."""
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ 0x82F63B78 * (byte & 1)
        found.append(byte)
    return found


def _checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _make_example() -> Any:
    """Return the message class of ``tf.train.Example``, from a pool of its own, beside TensorFlow's if it is there."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="records", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            if kind in _FIELDS:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".records.{kind}"
            else:
                added.type = kinds.Type.Value(kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("records.Example"))


_CRC = _table()
Example = _make_example()


def main() -> None:
    """Convert folders to TFRecord files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, metavar="FOLDERS")
    parser.add_argument("destination", type=Path, metavar="DEST")
    parser.add_argument("--files", type=int, default=8, metavar="N", help="for each part (default: 8)")
    options = parser.parse_args()
    options.destination.mkdir(parents=True, exist_ok=True)
    for part, written in (("train", "train"), ("val", "validation")):
        classes = sorted(path for path in (options.folders / part).iterdir() if path.is_dir())
        samples = [(path, label) for label, folder in enumerate(classes, 1) for path in sorted(folder.iterdir())]
        np.random.default_rng(0).shuffle(samples)
        for number in range(options.files):
            path = options.destination / f"{written}-{number:05d}-of-{options.files:05d}"
            write_records(path, [(image.read_bytes(), label) for image, label in samples[number :: options.files]])
        print(f"{options.destination}: {len(samples)} images of {len(classes)} classes, {written}")


if __name__ == "__main__":
    main()

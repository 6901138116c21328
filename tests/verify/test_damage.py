"""Where bits are flipped: every place of a journal and of a snapshot, one bit each."""

import random
import struct

from verify.failpoint.damage import draw

MARK = b"\x91mark\xf3\x07!"


def segment(header: bytes = b"") -> bytes:
    body = b"forty bytes, in which there is no mark.."
    frame = struct.pack("<8sQII", MARK, len(body), 1, 0)
    return b"SPSJRNL1" + MARK + header + 4 * (frame + body)


def kept(tmp_path, header: bytes = b""):
    """Three snapshots, and two segments behind the newest of them."""
    for name in ("journal", "snapshots"):
        (tmp_path / name).mkdir(parents=True)
    for number in range(1, 5):
        (tmp_path / "journal" / f"{number:012d}.journal").write_bytes(segment(header))
    for number in range(1, 4):
        snapshot = tmp_path / "snapshots" / f"{number:012d}-v{10 * number}"
        snapshot.mkdir()
        (snapshot / "manifest.json").write_text(f'{{"format": 1,\n "version": {number}0}}')
        (snapshot / "state.safetensors").write_bytes(bytes(100))
    (tmp_path / "lock").write_bytes(bytes(100))
    return tmp_path


def test_one_bit_is_flipped_and_no_other(tmp_path):
    folder = kept(tmp_path)
    for flip in draw(folder, random.Random(1)):
        before = (folder / flip.file).read_bytes()
        flip.do(folder)
        after = (folder / flip.file).read_bytes()
        different = [byte for byte, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        assert different == [flip.byte]
        assert before[flip.byte] ^ after[flip.byte] == 1 << flip.bit


def test_places_are_where_they_say(tmp_path):
    for seed in range(20):
        flips = {flip.place: flip for flip in draw(kept(tmp_path / str(seed)), random.Random(seed))}
        assert flips["newest segment, header, bytes 8-15"].byte in range(8, 16)
        assert (flips["newest segment, a record's head"].byte - 16) % 64 < 24
        assert (flips["newest segment, a record's body"].byte - 16) % 64 >= 24
        assert flips["newest segment, last record"].byte >= 16 + 3 * 64
        assert flips["newest segment, last record"].file.stem.endswith("4")
        assert flips["older segment that is needed, last record"].file.stem.endswith("3")
        assert flips["segment before the snapshot, a record's body"].file.stem[-1] in "12"
        assert flips["newest snapshot, tensors"].file.parent.name.endswith("3-v30")
        assert flips["older snapshot, tensors"].file.parent.name[-5] in "12"


def test_a_longer_header_is_flipped_too(tmp_path):
    flips = {flip.place: flip for flip in draw(kept(tmp_path, b"more"), random.Random(0))}
    assert flips["newest segment, header, what follows"].byte in range(16, 20)


def test_the_number_of_a_format_is_spared(tmp_path):
    """With another number a file is that of another release, which every start refuses."""
    folder = kept(tmp_path)
    (folder / "lock").write_bytes(b"SPSLOCK3" + bytes(1))
    for seed in range(300):
        for flip in draw(folder, random.Random(seed)):
            at = {"lock": 7, "manifest.json": 11}.get(flip.file.name, 7 if flip.file.suffix == ".journal" else -1)
            assert flip.byte != at

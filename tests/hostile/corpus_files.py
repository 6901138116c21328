"""The files of corpus/: a chunk of the proto as text, with what must be said of it in the comments above.

    # expect: BAD_CHUNK
    # says: 17 zeros
    start: 7
    ...

``expect`` is the reason of the refusal, ``says`` a part of its text: a file that is refused for something else than the
lie in its name shows nothing.
"""

import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from pscore.wire.codecs.names import INDEX_CODECS, VALUE_CODECS
from pscore.wire.codecs.values import decode_values
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

CORPUS = Path(__file__).parent / "corpus"
FOLDERS = ("dense", *INDEX_CODECS, *VALUE_CODECS)
"""One for each codec."""

FOUND = "found-"
"""How the names of those files begin that a fuzzer wrote; the others are made by make_corpus.py."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """A chunk that must be refused.

    Attributes:
        name: ``codec/what-is-wrong``.
        chunk: the lie.
        reason: of the refusal.
        says: a part of the refusal's text.
    """

    name: str
    chunk: pb.Chunk
    reason: ErrorCode
    says: str

    def __str__(self) -> str:
        """Return the name, for the tests' ids."""
        return self.name

    @property
    def text(self) -> str:
        """The file."""
        body = text_format.MessageToString(self.chunk)
        return f"# expect: {self.reason.name}\n# says: {self.says}\n{body}"

    @property
    def path(self) -> Path:
        """Where the file is."""
        return CORPUS / f"{self.name}.textproto"


def read(path: Path) -> Hostile:
    """Read one file."""
    text = path.read_text()
    told = dict(re.findall(r"^# (\w+): (.*)$", text, re.MULTILINE))
    name = path.relative_to(CORPUS).with_suffix("").as_posix()
    return Hostile(name, text_format.Parse(text, pb.Chunk()), ErrorCode[told["expect"]], told["says"])


def corpus() -> list[Hostile]:
    """Return every file, by name."""
    return [read(path) for path in sorted(CORPUS.glob("*/*.textproto"))]


def found(chunk: pb.Chunk, refusal: Rejected) -> Hostile:
    """Return the file for what a fuzzer found, in the folder of the codec that refuses it."""
    folder = pb.IndexCodec.Name(chunk.index_codec)
    try:
        decode_values(chunk.value_codec, chunk.values, chunk.count)
    except Rejected:
        folder = pb.ValueCodec.Name(chunk.value_codec)
    name = f"{folder.partition('CODEC_')[2].lower()}/{FOUND}{zlib.crc32(chunk.SerializeToString()):08x}"
    return Hostile(name, chunk, refusal.reason, refusal.detail.partition(":")[0])

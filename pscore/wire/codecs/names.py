"""The codecs' names in settings and reports, and which codecs this version reads."""

from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.codecs.values import VALUE_FORMATS
from pscore.wire.v1 import parameter_server_pb2 as pb

INDEX_CODECS: dict[str, int] = {form.name: number for number, form in INDEX_FORMATS.items()}
VALUE_CODECS: dict[str, int] = {form.name: number for number, form in VALUE_FORMATS.items()}

READABLE_INDEX_CODECS: tuple["pb.IndexCodec.ValueType", ...] = (pb.INDEX_CODEC_DENSE, *INDEX_FORMATS)  # type: ignore[arg-type]
READABLE_VALUE_CODECS: tuple["pb.ValueCodec.ValueType", ...] = tuple(VALUE_FORMATS)  # type: ignore[arg-type]

PLAIN_INDEX_CODECS: frozenset[int] = frozenset({pb.INDEX_CODEC_DENSE, pb.INDEX_CODEC_RAW32})
PLAIN_VALUE_CODECS: frozenset[int] = frozenset({pb.VALUE_CODEC_FP32, pb.VALUE_CODEC_FP16, pb.VALUE_CODEC_BF16})
"""The codecs of a worker that lists none when the worker joins."""

"""Value codecs by their number in the proto; a test asserts that none is missing."""

import torch

from pscore.wire.codecs.limits import check_count
from pscore.wire.codecs.values.bounded import INT4, INT8
from pscore.wire.codecs.values.floats import BF16, FP16, FP32, widen_bf16
from pscore.wire.codecs.values.format import ValueFormat, Values
from pscore.wire.codecs.values.sign_mean import SIGN_MEAN
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

VALUE_FORMATS: dict[int, ValueFormat] = {
    pb.VALUE_CODEC_FP32: FP32,
    pb.VALUE_CODEC_FP16: FP16,
    pb.VALUE_CODEC_BF16: BF16,
    pb.VALUE_CODEC_INT8: INT8,
    pb.VALUE_CODEC_INT4: INT4,
    pb.VALUE_CODEC_SIGN_MEAN: SIGN_MEAN,
}

CODEC_OF_DTYPE: dict[torch.dtype, int] = {
    torch.float32: pb.VALUE_CODEC_FP32,
    torch.float16: pb.VALUE_CODEC_FP16,
    torch.bfloat16: pb.VALUE_CODEC_BF16,
}
"""The codec that writes each dtype exactly."""


def host_values(values: torch.Tensor) -> Values:
    """Return fp32, fp16 or bf16 values as fp32 on the host, exactly; fp32 ones there already share their memory.

    In numpy: for many values torch would start a pool of threads for each thread that calls it.
    """
    tensor = values.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return widen_bf16(tensor.contiguous().view(torch.uint16).numpy())
    return tensor.numpy().astype("float32", copy=False)


def decode_values(codec: int, data: bytes, count: int) -> Values:
    """Read ``count`` finite values as fp32; raises :class:`Rejected`."""
    value_format = VALUE_FORMATS.get(codec)
    if value_format is None:
        raise Rejected(ErrorCode.UNKNOWN_CODEC, f"value codec {codec} is not known")
    check_count(count)
    return value_format.decode(data, count)

"""NVIDIA DALI decodes the images that a sampler draws: on the GPU where training is there, else on the CPU.

DALI's own readers choose samples themselves. Here the sampler chooses, so that elastic data hold: DALI asks for the
next batch in the main thread (``fn.external_source``), the sampler draws it there, threads read the files, and DALI
decodes. Batches come out in the order in which they were drawn; what is only read or decoded ahead is not trained, and
the sampler has it back when a pass is left.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types

from .datafiles import DamagedDataError
from .images import Images, decode
from .loaders import AREA, DEVIATION, MEAN, RATIO, Batch, shorter_side

READ_AHEAD = 2
"""Batches whose files are read while DALI decodes the ones before them."""
DECODE_AHEAD = 2
"""Batches that DALI decodes while one is trained."""


class DaliLoader:
    """Yields batches as :func:`support.loaders.make_loader` says, whose arguments these are.

    A pass that is left half-way is forgotten when the next begins.
    """

    def __init__(
        self,
        images: Images,
        sampler: Iterable[int],
        training: bool,
        batch_size: int,
        size: int,
        workers: int,
        device: torch.device,
        seed: int,
    ) -> None:
        """Describe the pipeline; it is built, and takes memory, with the first pass."""
        self._images, self._sampler, self._batch_size, self._device = images, sampler, batch_size, device
        self._threads = ThreadPoolExecutor(max(1, workers), thread_name_prefix="read-images")
        self._drawn: Iterator[int] = iter(())
        self._reading: deque[tuple[list[int], list[Future[tuple[bytes, int]]]]] = deque()
        self._decoding: deque[tuple[list[int], torch.Tensor]] = deque()
        gpu = device.type == "cuda"
        self._pipeline = _pipeline(
            self._next_batch,
            training,
            size,
            "mixed" if gpu else "cpu",
            batch_size=batch_size,
            num_threads=max(1, workers),
            device_id=(device.index or 0) if gpu else None,
            seed=seed,
            prefetch_queue_depth=DECODE_AHEAD,
        )

    def __iter__(self) -> Iterator[Batch]:
        """Make a pass.

        Raises:
            DamagedDataError: an image cannot be decoded; the message names it.
        """
        self._forget()
        self._drawn = iter(self._sampler)
        while (found := self._decoded()) is not None:
            _, labels = self._decoding.popleft()
            yield torch.from_dlpack(found.as_tensor()), labels.to(self._device, non_blocking=True)
        self._pipeline.reset()

    def _decoded(self) -> Any:
        """Return DALI's next batch, or ``None`` at the end of a pass."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        try:
            return self._pipeline.run(stream)[0]
        except StopIteration:
            return None
        except RuntimeError as error:
            self._name_the_damaged(error)
            raise

    def _next_batch(self) -> list[np.ndarray]:
        """Hand DALI the encoded images of a batch; it calls this in the thread that runs the pipeline."""
        while len(self._reading) <= READ_AHEAD and (indices := list(islice(self._drawn, self._batch_size))):
            self._reading.append((indices, [self._threads.submit(self._images.read, index) for index in indices]))
        if not self._reading:
            raise StopIteration
        indices, futures = self._reading.popleft()
        samples = [future.result() for future in futures]
        self._decoding.append((indices, torch.tensor([label for _, label in samples])))
        return [np.frombuffer(data, np.uint8) for data, _ in samples]

    def _forget(self) -> None:
        """Drop what a pass that was left has under way."""
        self._drawn = iter(())
        self._reading.clear()
        while self._decoding and self._decoded() is not None:
            self._decoding.popleft()
        self._decoding.clear()
        self._pipeline.reset()

    def _name_the_damaged(self, failure: RuntimeError) -> None:
        """Find which image DALI has failed on; it says only that there is one."""
        for indices, _ in self._decoding:
            for index in indices:
                try:
                    decode(self._images.read(index)[0], self._images.name(index))
                except DamagedDataError as error:
                    raise error from failure


@pipeline_def
def _pipeline(source: Any, training: bool, size: int, decoder: str) -> Any:
    """Decode, scale, cut, flip and normalise, as torchvision's transforms do but for rounding."""
    encoded = fn.external_source(source=source, dtype=types.UINT8, ndim=1)
    decoding = {"device": decoder, "output_type": types.RGB, "jpeg_fancy_upsampling": True}
    scaling = {"interp_type": types.INTERP_LINEAR, "antialias": True}
    finish: dict[str, Any] = {"dtype": types.FLOAT, "output_layout": "CHW", "crop": (size, size)}
    finish |= {"mean": [255 * value for value in MEAN], "std": [255 * value for value in DEVIATION]}
    if training:
        cut = fn.decoders.image_random_crop(encoded, random_area=AREA, random_aspect_ratio=RATIO, **decoding)
        return fn.crop_mirror_normalize(
            fn.resize(cut, size=(size, size), **scaling), mirror=fn.random.coin_flip(), **finish
        )
    whole = fn.decoders.image(encoded, **decoding)
    return fn.crop_mirror_normalize(fn.resize(whole, resize_shorter=shorter_side(size), **scaling), **finish)

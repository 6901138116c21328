"""Models as safetensors files: whole, or one part a shard.

A whole file has the tensors of ``model.state_dict()``. A part has the flat pieces of the tensors that its shard owns
(names ``tensor@start``), and the layout in its metadata; :func:`read_parts` joins all parts into a whole.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pscore.files import put_in_place
from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.names import model_file_fault

_CHECKSUM = "crc32"  # in the metadata

StateDict = dict[str, torch.Tensor]


class ModelFileError(Exception):
    """A model file cannot be read or does not fit; the message names the file."""


def assemble(layout: ModelLayout, flat: torch.Tensor, buffers: Iterable[torch.Tensor] = ()) -> StateDict:
    """Cut a flat tensor ``[n]``, fp32 or words, into the model's tensors, in their own dtypes, and add the buffers."""
    state = {
        spec.name: in_own_dtype(layout, spec, flat[layout.offsets[i] : layout.offsets[i + 1]]).reshape(spec.shape)
        for i, spec in enumerate(layout.parameters)
    }
    state.update(zip((spec.name for spec in layout.buffers), buffers, strict=False))
    return state


def in_own_dtype(layout: ModelLayout, spec: TensorSpec, values: torch.Tensor) -> torch.Tensor:
    """Return values of a parameter, fp32 or whole elements in words, flat in its own dtype."""
    if not layout.word_bytes:
        return values.to(spec.dtype)
    return values.clone().view(spec.dtype)  # at a place in memory that suits the dtype


def flatten(layout: ModelLayout, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Lay a state dict's parameters flat, as fp32 or words ``[n]``, also from aliases of tied weights.

    Raises :class:`ModelFileError` if a tensor is missing or has another shape.
    """
    pieces = []
    for spec in layout.parameters:
        tensor = next((state[name] for name in (spec.name, *spec.aliases) if name in state), None)
        if tensor is None:
            raise ModelFileError(f"parameter {spec.describe()} is missing")
        if tuple(tensor.shape) != spec.shape:
            raise ModelFileError(f"parameter {spec.describe()} has shape {list(tensor.shape)} in the file")
        if not layout.word_bytes:
            pieces.append(tensor.reshape(-1).float())
            continue
        if tensor.dtype != spec.dtype:
            raise ModelFileError(f"tensor {spec.describe()} has dtype {tensor.dtype} in the file")
        pieces.append(tensor.contiguous().reshape(-1).view(layout.value_dtype))
    return torch.cat(pieces)


def check_path(path: str | Path) -> None:
    """Raise :class:`ModelFileError` if no model can be written: a URL, the name of a pickle, no or only a folder."""
    if fault := model_file_fault(path):
        raise ModelFileError(fault)
    if Path(path).is_dir():
        raise ModelFileError(f"{path} is a folder; name a file in it")
    if not Path(path).parent.is_dir():
        raise ModelFileError(f"there is no folder {Path(path).parent}; make it first")


def save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous tensors on the host as a safetensors file; raises ``OSError``, not the library's own error."""
    try:
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file under a temporary name, then rename it, so that no reader sees half a file.

    The file survives a power cut once this returns, and holds a checksum of its values.

    Raises:
        ModelFileError: see :func:`check_path`.
        OSError: the file cannot be written; an earlier one stays.
    """
    check_path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode  # as the umask has it; safetensors would leave 0600
        on_host = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        save(temporary, on_host, {**metadata, _CHECKSUM: _checksum(on_host.items())})
        temporary.chmod(mode)
        put_in_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def part_path(path: Path, shard_index: int, num_shards: int) -> Path:
    """Return the path of a shard's part: ``model.safetensors`` → ``model-00001-of-00002.safetensors``."""
    if num_shards == 1:
        return path
    return path.with_name(f"{path.stem}-{shard_index + 1:05d}-of-{num_shards:05d}{path.suffix}")


def write_part(
    path: Path, layout: ModelLayout, span: Span, flat: torch.Tensor, buffers: StateDict, metadata: Mapping[str, str]
) -> None:
    """Write the piece ``flat`` (fp32 or words, ``[span.length]``) of the layout, and the shard's buffers."""
    pieces = {}
    for i, common in layout.overlapping(span):
        spec, piece = layout.parameters[i], flat[common.start - span.start : common.end - span.start]
        pieces[f"{spec.name}@{common.start - layout.offsets[i]}"] = in_own_dtype(layout, spec, piece)
    shapes = {spec.name: list(spec.shape) for spec in layout.parameters}
    write(path, {**pieces, **buffers}, {**metadata, "shapes": json.dumps(shapes)})


def read(path: Path) -> StateDict:
    """Read a whole model file; raises :class:`ModelFileError` if it is missing, damaged, or a shard's part."""
    state, metadata = _read(path)
    if "shapes" in metadata:
        raise ModelFileError(f"{path} is one shard's part; join all parts with `psclient merge`")
    return state


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a model file or a part; raises :class:`ModelFileError` if it cannot be read."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def verify(path: Path) -> dict[str, str]:
    """Check every value of a file or part that :func:`write` has written; return the metadata.

    Raises :class:`ModelFileError` if the file cannot be read, or is not as it was written.
    """
    with _opened(path) as file:
        metadata = dict(file.metadata() or {})
        _require_checksum(path, metadata.get(_CHECKSUM, ""), ((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
    return metadata


def _checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Sum over the checksums of all tensors, each with its name, so that their order does not matter."""
    total = 0
    for name, tensor in tensors:
        total += crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc32(name.encode()))
    return f"{total:x}"


def _require_checksum(path: Path, kept: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    if _checksum(tensors) != kept:
        raise ModelFileError(f"{path} is damaged: the checksum of its values does not hold; take another copy")


def read_parts(paths: Iterable[Path]) -> StateDict:
    """Join the parts of all shards; raises :class:`ModelFileError` if one is missing, damaged, or of another run."""
    runs: set[str] = set()
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    whole: StateDict = {}
    shapes: dict[str, list[int]] = {}
    for path in paths:
        state, metadata = _read(path)
        if "shapes" not in metadata:
            raise ModelFileError(f"{path} is not a part of a sharded model")
        shapes = json.loads(metadata["shapes"])
        runs.add(metadata.get("run_id", ""))
        if len(runs) > 1:
            raise ModelFileError(f"{path} belongs to another run than the parts before it ({', '.join(sorted(runs))})")
        for name, tensor in state.items():
            base, separator, start = name.rpartition("@")
            if separator and base in shapes:
                pieces.setdefault(base, {})[int(start)] = tensor
            else:
                whole[name] = tensor
    for name, shape in shapes.items():
        found = pieces.get(name, {})
        flat = (
            torch.cat([found[start] for start in sorted(found)])
            if found
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        if flat.numel() != torch.Size(shape).numel():
            raise ModelFileError(f"parameter {name!r}: {flat.numel()} of {torch.Size(shape).numel()} elements found")
        whole[name] = flat.reshape(shape)
    return whole


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"cannot read {path}: {error}") from error


def _read(path: Path) -> tuple[StateDict, dict[str, str]]:
    """Read tensors and metadata; a file without a checksum is of another library."""
    with _opened(path) as file:
        state, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    if _CHECKSUM in metadata:
        _require_checksum(path, metadata[_CHECKSUM], state.items())
    return state, metadata

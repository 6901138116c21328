"""Looking at running servers and ending a run, from a terminal."""

import json
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from rich import box
from rich.console import Console
from rich.table import Table

from pscore.channels import ChannelError, Security, open_channel
from pscore.v1 import parameter_server_pb2 as pb
from pscore.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

_OPEN = Security()


class OperateError(Exception):
    """A server could not be asked; the message has its address and why."""


def status(addresses: Sequence[str], timeout_seconds: float, security: Security, *, as_json: bool) -> None:
    """Print version, parameters, device, workers, staleness and bytes of each server."""
    answers = [call(address, "GetStatus", pb.GetStatusRequest(), timeout_seconds, security) for address in addresses]
    if as_json:
        print(json.dumps([_plain(a, answer) for a, answer in zip(addresses, answers, strict=True)], indent=2))
        return
    console = Console()
    for address, answer in zip(addresses, answers, strict=True):
        console.print(_shard_summary(address, answer))
        console.print(_worker_table(answer) if answer.workers else "no live workers", highlight=False)


def finish(addresses: Sequence[str], timeout_seconds: float, security: Security, *, as_json: bool) -> None:
    """End the run at each server and print the last version and where the final model is."""
    answers = [call(address, "FinishRun", pb.FinishRunRequest(), timeout_seconds, security) for address in addresses]
    if as_json:
        print(json.dumps([_plain(a, answer) for a, answer in zip(addresses, answers, strict=True)], indent=2))
        return
    for address, answer in zip(addresses, answers, strict=True):
        model = answer.final_model or "not written (start the server with --final-model)"
        print(f"{address}: finished at version {answer.version}; final model: {model}")


def snapshot(addresses: Sequence[str], timeout_seconds: float, security: Security, *, as_json: bool) -> None:
    """Take one checkpoint over all shards and print its id; give shard 0 first."""
    answers: list[pb.TakeSnapshotResponse] = []
    for address in addresses:
        request = pb.TakeSnapshotRequest(checkpoint=answers[0].checkpoint if answers else "")
        answers.append(call(address, "TakeSnapshot", request, timeout_seconds, security))
    if as_json:
        print(json.dumps([_plain(a, answer) for a, answer in zip(addresses, answers, strict=True)], indent=2))
        return
    for address, answer in zip(addresses, answers, strict=True):
        print(f"{address}: checkpoint {answer.checkpoint}, version {answer.version}: {answer.path}")


def restore(
    addresses: Sequence[str],
    timeout_seconds: float,
    security: Security,
    *,
    as_json: bool,
    version: int | None,
    checkpoint: str,
) -> None:
    """Take every shard back to a version or a checkpoint; workers follow by themselves."""
    request = pb.RestoreModelRequest(checkpoint=checkpoint)
    if version is not None:
        request = pb.RestoreModelRequest(version=version)
    answers = [call(address, "RestoreModel", request, timeout_seconds, security) for address in addresses]
    if as_json:
        print(json.dumps([_plain(a, answer) for a, answer in zip(addresses, answers, strict=True)], indent=2))
        return
    for address, answer in zip(addresses, answers, strict=True):
        print(f"{address}: back at version {answer.version}; workers pull it with their next step")


def call(address: str, rpc: str, request: Any, timeout_seconds: float, security: Security = _OPEN) -> Any:
    """Make one call; raises :class:`OperateError`."""
    try:
        channel = open_channel(address, security)
    except ChannelError as error:
        raise OperateError(f"{address}: {error}") from error
    with channel:
        try:
            return getattr(ParameterServerServiceStub(channel), rpc)(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise OperateError(f"{address}: {error.code().name}: {error.details()}") from error


def _plain(address: str, message: Any) -> dict[str, Any]:
    plain = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {"address": address, **_numbers(plain, message)}


def _numbers(plain: dict[str, Any], message: Any) -> dict[str, Any]:
    """Undo what the JSON mapping does: strings for 64-bit integers, long enum names, default values last."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = plain.get(field.name)
        if field.message_type is not None:
            children = getattr(message, field.name)
            if isinstance(value, list):
                value = [_numbers(p, m) for p, m in zip(value, children, strict=True)]
            elif value is not None:
                value = _numbers(value, children)
        elif field.enum_type is not None:
            prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
            value = str(value).removeprefix(prefix).lower()
        elif isinstance(value, str) and field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            value = int(value)
        result[field.name] = value
    return result


def _shard_summary(address: str, answer: pb.GetStatusResponse) -> Table:
    state = pb.RunState.Name(answer.run_state).removeprefix("RUN_STATE_").lower()
    down_mode = pb.DownMode.Name(answer.settings.down_mode).removeprefix("DOWN_MODE_").lower()
    table = Table.grid(padding=(0, 2))
    for name, value in (
        (address, f"run {answer.run_id or '–'}, {state}, {answer.method or 'no method yet'}"),
        ("shard", f"{answer.shard_index} of {answer.num_shards}, on {answer.device}, up {answer.uptime_seconds:.0f} s"),
        ("parameters", f"{answer.length:,} of {answer.parameters:,}"),
        ("version", f"{answer.version:,} after {answer.samples:,} samples, {answer.queued} waiting"),
        ("kept", _kept(answer)),
        ("bytes", f"{human_bytes(answer.push_bytes)} pushed, {human_bytes(answer.pull_bytes)} pulled ({down_mode}), "
                  f"{human_bytes(answer.buffer_bytes)} of buffers"),
    ):  # fmt: skip
        table.add_row(f"[bold]{name}[/bold]", value)
    return table


def _kept(answer: pb.GetStatusResponse) -> str:
    if answer.durability in ("", "none"):
        return "nothing (no --data-dir)"
    age = f"{answer.snapshot_age_seconds:.0f} s ago" if answer.snapshot_age_seconds else "none yet"
    journal = f", {human_bytes(answer.journal_bytes)} in the journal" if answer.durability == "journal" else ""
    name = f", checkpoint {answer.snapshot_checkpoint}" if answer.snapshot_checkpoint else ""
    return f"snapshot of version {answer.snapshot_version:,} {age}{name}{journal}"


def _worker_table(answer: pb.GetStatusResponse) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("worker", no_wrap=True)
    for name in ("step", "stale", "pushed", "pulled", "reply", "density", "lease"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in answer.workers:
        mode = pb.ReplyMode.Name(worker.reply_mode).removeprefix("REPLY_MODE_").lower()
        table.add_row(
            worker.worker_id,
            str(worker.last_step),
            str(worker.staleness),
            human_bytes(worker.push_bytes),
            human_bytes(worker.pull_bytes),
            "–" if mode == "unspecified" else mode,
            f"{worker.reply_density:.2%}",
            f"{worker.lease_remaining_seconds:.0f} s",
        )
    return table


def human_bytes(count: float) -> str:
    """Write a number of bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

"""Operators' commands. Each reads the fleet's status first, acts, prints, and returns its exit status."""

import json
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from google.protobuf.message import Message
from rich.text import Text

from pscore.units import human_bytes
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl import render
from psservice.ctl.client import OperateError, Outcome, ShardClients, exit_status
from psservice.ctl.fleet import Fleet, disagreement, read_fleet


class MixedShardsError(Exception):
    """The addresses are not those of all shards of one run, each once; nothing was done."""


def status(clients: ShardClients, options: Namespace) -> int:
    """Print version, parameters, device, workers, staleness and bytes of each shard."""
    return _show(clients, options, lambda fleet: _plain(fleet.shards), render.print_statuses)


def workers(clients: ShardClients, options: Namespace) -> int:
    """Print the workers of all shards as one table."""
    return _show(clients, options, render.workers_plain, render.print_workers)


def _show(
    clients: ShardClients, options: Namespace, plain: Callable[[Fleet], object], show: Callable[[Fleet], None]
) -> int:
    fleet = read_fleet(clients)
    if options.json:
        print(json.dumps(plain(fleet), indent=2))
    elif fleet.reached:
        show(fleet)
    render.say_errors(fleet.shards)
    return exit_status(fleet.shards)


def finish(clients: ShardClients, options: Namespace) -> int:
    """End the run at each shard that answers; print the last version and the path of the final model."""
    fleet = one_run(clients)
    every = ",".join(fleet.reached)

    def words(answer: pb.FinishRunResponse) -> str:
        model = answer.final_model or f"not written without --final-model; `psclient save {every} --out FILE` does it"
        return f"finished at version {answer.version}; final model: {model}"

    return report(ask_all(clients, fleet, "FinishRun", pb.FinishRunRequest()), words, options)


def snapshot(clients: ShardClients, options: Namespace) -> int:
    """Take one checkpoint over all shards, with a name or an id; if one shard does not answer, none is taken."""
    fleet = one_run(clients)
    if fleet.unreached:
        return _nothing_done(fleet, fleet.unreached, "no snapshot was taken", options)

    def words(answer: pb.TakeSnapshotResponse) -> str:
        return f"checkpoint {answer.checkpoint or '(of this shard alone)'}, version {answer.version}: {answer.path}"

    return report(take_snapshots(clients, [*fleet.reached], options.name or ""), words, options)


def restore(clients: ShardClients, options: Namespace) -> int:
    """Take every shard back to a version or a checkpoint; if one of them cannot go back there, none does."""
    fleet = one_run(clients)
    if fleet.unreached:
        return _nothing_done(fleet, fleet.unreached, "no shard was taken back", options)
    request = pb.RestoreModelRequest(checkpoint=options.checkpoint or "")
    if options.version is not None:
        request = pb.RestoreModelRequest(version=options.version)
    prepared = _prepare_restore(clients, [*fleet.reached], request)
    unable = [each for each in prepared if each.error is not None]
    step = pb.RESTORE_STEP_ABANDON if unable else pb.RESTORE_STEP_COMMIT
    following = {
        each.address: pb.RestoreModelRequest(step=step, ticket=each.answer.ticket)
        for each in prepared
        if each.error is None
    }
    done = clients.each("RestoreModel", following)
    if unable:
        return _nothing_done(fleet, unable, "no shard was taken back", options)
    return report(
        done, lambda answer: f"back at version {answer.version}; workers pull it with their next step", options
    )


def _prepare_restore(clients: ShardClients, addresses: Sequence[str], request: pb.RestoreModelRequest) -> list[Outcome]:
    """Have shards, shard 0 first, prepare a restore; those of a feed go back to the publication that shard 0 had."""
    request.step = pb.RESTORE_STEP_PREPARE
    first, *others = addresses
    prepared = [clients.one(first, "RestoreModel", request)]
    answer = prepared[0].answer
    if answer is not None and answer.publication:
        step, version = pb.RESTORE_STEP_PREPARE, answer.version
        request = pb.RestoreModelRequest(step=step, version=version, publication=answer.publication)
    return prepared + (clients.all("RestoreModel", request, others) if answer is not None else [])


def evict(clients: ShardClients, options: Namespace) -> int:
    """End a worker's lease at every shard; it is enough that one shard knows the worker."""
    worker, seconds = options.worker, options.ban_seconds
    request = pb.EvictWorkerRequest(worker_id=worker, ban_seconds=seconds)
    ban = f", kept out for {seconds:g} s" if seconds else ""

    def words(answer: pb.EvictWorkerResponse) -> str:
        if answer.had_lease:
            return f"{worker!r} evicted after step {answer.last_step}{ban or ', may join again at once'}"
        return f"{worker!r} had no lease{ban or ', and is kept out no longer'}"

    outcomes = ask_all(clients, one_run(clients), "EvictWorker", request)
    return report(outcomes, words, options, {ErrorCode.NO_SUCH_WORKER: f"{worker!r} had no lease here"})


def checkpoints(clients: ShardClients, options: Namespace) -> int:
    """Print the checkpoints of all shards, oldest first, or delete a named one."""
    if options.delete:
        return _delete(clients, options)
    fleet = read_fleet(clients)
    indices = {address: status.shard_index for address, status in fleet.reached.items()}
    outcomes = ask_all(clients, fleet, "ListCheckpoints", pb.ListCheckpointsRequest())
    by_name: dict[str, dict[int, pb.CheckpointStatus]] = defaultdict(dict)
    for each in outcomes:
        for checkpoint in each.answer.checkpoints if each.error is None else ():
            index = indices[each.address]
            name = checkpoint.checkpoint or f"\0{index}-{checkpoint.version}-{checkpoint.created_unix_seconds}"
            by_name[name][index] = checkpoint
    rows = sorted(map(_checkpoint_plain, by_name.values()), key=itemgetter("created_unix_seconds"))
    if options.json:
        failed = _plain([each for each in outcomes if each.error is not None])
        print(json.dumps({"checkpoints": rows, "failed": failed}, indent=2))
    elif rows:
        columns = (
            render.Column("checkpoint", lambda row: render.cell(row["checkpoint"] or _of_one(row)), True),
            render.Column("version", lambda row: render.range_of([*row["versions"].values()])),
            render.Column("taken", lambda row: f"{max(0.0, time.time() - row['created_unix_seconds']):,.0f} s ago"),
            render.Column("size", lambda row: human_bytes(row["bytes"])),
            render.Column("kept", lambda row: "until deleted" if row["named"] else "until newer ones come", True),
            render.Column("", lambda row: _missing(row, indices.values()), True),
        )
        table = render.table_of(columns, rows)
        table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
        render.new_console().print(table)
    elif exit_status(outcomes) == 0:
        render.say("no snapshots yet")
    render.say_errors(outcomes)
    return exit_status(outcomes)


def _delete(clients: ShardClients, options: Namespace) -> int:
    """Delete a named checkpoint at every shard; it is enough that one shard has it."""
    name = options.delete
    outcomes = ask_all(clients, one_run(clients), "DeleteCheckpoint", pb.DeleteCheckpointRequest(checkpoint=name))
    return report(
        outcomes,
        lambda answer: f"checkpoint {name}, version {answer.version}, deleted",
        options,
        {ErrorCode.NO_SUCH_CHECKPOINT: f"checkpoint {name} is not here"},
    )


def take_snapshots(clients: ShardClients, addresses: Sequence[str], name: str = "") -> list[Outcome]:
    """Take a snapshot at each of these shards, in the order of indices: without a name, shard 0 draws an id for all."""
    outcomes: list[Outcome] = []
    for address in addresses:
        first = outcomes[0] if outcomes else None
        if first is not None and first.error is not None:
            why = OperateError(f"{address}: not asked, since {first.error}", refused=first.error.refused)
            outcomes.append(Outcome(address, error=why))
            continue
        request = pb.TakeSnapshotRequest(checkpoint=first.answer.checkpoint if first else name)
        outcomes.append(clients.one(address, "TakeSnapshot", request))
    return outcomes


def one_run(clients: ShardClients) -> Fleet:
    """Read the fleet's status before a command acts; raises :class:`MixedShardsError`."""
    fleet = read_fleet(clients)
    if wrong := disagreement(fleet.reached):
        raise MixedShardsError(f"{wrong}; nothing was done. Give the addresses of one run's shards, each once")
    total = max((status.num_shards for status in fleet.reached.values()), default=0)
    if len(clients.addresses) < total:
        raise MixedShardsError(
            f"{len(clients.addresses)} of the run's {total} shards were named; nothing was done. Give all addresses"
        )
    return fleet


def ask_all(clients: ShardClients, fleet: Fleet, rpc: str, request: Message) -> list[Outcome]:
    """Call every shard that gave its status; the outcome of the others is their error."""
    asked = {each.address: each for each in clients.all(rpc, request, [*fleet.reached])}
    return [asked.get(shard.address, shard) for shard in fleet.shards]


def _nothing_done(fleet: Fleet, unable: Sequence[Outcome], what: str, options: Namespace) -> int:
    """Report the shards that cannot do it, without which nothing is done."""
    if options.json:
        print(json.dumps(_plain(unable), indent=2))
    render.say_errors(unable)
    render.say(f"{what}: it takes all {len(fleet.shards)} shards", failed=True)
    return exit_status(unable)


def report(
    outcomes: Sequence[Outcome],
    words: Callable[[Any], str],
    options: Namespace,
    unknown: dict[ErrorCode, str] | None = None,
) -> int:
    """Print the outcomes of a call to each shard, answers in these words; return the exit status.

    ``unknown`` has words for a name that a shard does not know; that is a failure only if no shard knows the name.
    """
    unknown = unknown or {}
    strange = [each for each in outcomes if each.error is not None and each.error.reason in unknown]
    counted = [each for each in outcomes if each not in strange] or outcomes
    if options.json:
        print(json.dumps(_plain(outcomes), indent=2))
    else:
        for each in counted:
            if each.error is None:
                render.say(f"{each.address}: {words(each.answer)}")
    render.say_errors(counted)
    if not options.json and counted is not outcomes:
        for each in strange:
            render.say(f"{each.address}: {' '.join(unknown.values())}")
    return exit_status(counted)


def _plain(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [render.outcome_plain(each) for each in outcomes]


def _checkpoint_plain(by_shard: dict[int, pb.CheckpointStatus]) -> dict[str, Any]:
    first = next(iter(by_shard.values()))
    return {
        "checkpoint": first.checkpoint,
        "named": first.named,
        "versions": {str(index): by_shard[index].version for index in sorted(by_shard)},
        "created_unix_seconds": max(each.created_unix_seconds for each in by_shard.values()),
        "bytes": sum(each.bytes for each in by_shard.values()),
    }


def _of_one(row: dict[str, Any]) -> str:
    (index,) = row["versions"]
    return f"(of shard {index} alone)"


def _missing(row: dict[str, Any], indices: Iterable[int]) -> Text:
    missing = [index for index in sorted({*indices}) if str(index) not in row["versions"]]
    return render.missing_cell(missing if row["checkpoint"] else ())

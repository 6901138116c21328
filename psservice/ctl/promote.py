"""``psservice promote``: have standbys serve in the place of the server that they stand by for."""

import time
from argparse import Namespace
from collections.abc import Sequence

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl import render
from psservice.ctl.client import EXIT_PARTIAL, EXIT_REFUSED, Outcome, ShardClients, exit_status

_POLL_SECONDS = 0.2


def promote(clients: ShardClients, options: Namespace) -> int:
    """Promote every standby that is named, and wait until each serves, for as long as a call may take.

    A standby of one of several shards of a command brings the others with it, which then refuse as servers.
    """
    known = clients.all("GetStatus", pb.GetStatusRequest(brief=True))
    standbys = [each.address for each in known if each.error is None and each.answer.HasField("standby")]
    unready = [each for each in known if each.address not in standbys]
    if unready or not standbys:
        for each in unready:
            render.say(f"{each.error or each.address + ': it is no standby: it serves already'}", failed=True)
        render.say("no standby was promoted: each that is named must be one, and answer", failed=True)
        return exit_status(unready) if any(each.error for each in unready) else EXIT_REFUSED
    first, *others = standbys
    asked = [clients.one(first, "Promote", pb.PromoteRequest(force=options.force))]
    if asked[0].error is None:
        asked += [_promoted(clients, address, options.force) for address in others]
    refused = [each for each in asked if each.error is not None]
    if refused:
        render.say_errors(refused)
        return exit_status(asked)
    serving = _await(clients, standbys)
    if options.output != "table":
        render.print_plain([render.outcome_plain(each) for each in serving], options.output)
    late = [each for each in serving if each.error is not None or each.answer.HasField("standby")]
    for each in serving:
        if each not in late and options.output == "table":
            render.say(f"{each.address}: serves shard {each.answer.shard_index} at version {each.answer.version}")
    for each in late:
        render.say(f"{each.address}: does not serve yet: see its log, and psservice status", failed=True)
    return EXIT_PARTIAL if late else exit_status(serving)


def _promoted(clients: ShardClients, address: str, force: bool) -> Outcome:
    """Promote a further standby; one that the first has brought with it is on its way already."""
    outcome = clients.one(address, "Promote", pb.PromoteRequest(force=force))
    is_on_its_way = outcome.error is not None and not outcome.error.refused
    return Outcome(address) if is_on_its_way else outcome


def _await(clients: ShardClients, addresses: Sequence[str]) -> list[Outcome]:
    """Wait until these servers serve; return their last statuses."""
    end = time.monotonic() + clients.timeout_seconds
    while True:
        found = clients.all("GetStatus", pb.GetStatusRequest(brief=True), addresses, most_seconds=5.0)
        if all(each.error is None and not each.answer.HasField("standby") for each in found):
            return found
        if time.monotonic() >= end:
            return found
        time.sleep(_POLL_SECONDS)

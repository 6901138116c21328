"""One shard's values in a cut, fetched over a connection that may break."""

from psclient.errors import ServerFaultError
from psclient.rpc.channel import Connection, RetryPolicy
from psclient.rpc.stream import Bandwidth, Stream
from pscore.reader.cut import Cut
from pscore.reader.transfer import CutTransfer, FetchedShard, digest_of_buffers
from pscore.wire.errors import Rejected


class ShardReader:
    """Fetches one shard's part of cuts, by a transfer, over a connection."""

    def __init__(self, connection: Connection, transfer: CutTransfer) -> None:
        self.connection, self.index, self.span = connection, transfer.index, transfer.span
        self.downlink = Bandwidth()
        self._transfer = transfer

    def fetch(self, cut: Cut, held: Cut | None, buffers: bytes, policy: RetryPolicy) -> FetchedShard | Rejected:
        """Return what leads from the held cut, and packed buffers, to another one; a refusal, such as ``NO_SUCH_CUT``.

        Raises as :meth:`~psclient.rpc.channel.Connection.call` does.
        """

        def attempt(seconds: float) -> FetchedShard:
            asked = self._transfer.asked(cut, held, buffers, self.downlink.bytes_per_second)
            stream = Stream(self.connection.cuts, [asked.request.SerializeToString()])
            try:
                with self.connection.tracked(stream):
                    return asked.read(iter(lambda: stream.receive(seconds, policy.limit), None), policy.progressed)
            finally:
                stream.close()

        answer = self.connection.call(policy, attempt)
        if isinstance(answer, FetchedShard):
            self._transfer.end()
            self.downlink.update(answer.received_bytes, answer.seconds)
            whole = answer.buffers or buffers
            if self.index == 0 and cut.buffers_digest and digest_of_buffers(whole) != cut.buffers_digest:
                raise ServerFaultError(f"{self.connection.address} sent buffers of another digest than the cut's")
        return answer

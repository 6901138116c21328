"""The calls that a standby answers: its status, and the one that has it serve. All else is refused, ``STANDBY``."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pscore.wire.errors import ErrorCode, Rejected, to_status
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.rpc.audit import AuditTrail
from psservice.rpc.auth import Authenticator, Credentials
from psservice.rpc.caller import Caller, Role
from psservice.rpc.calls import RULES, SERVICE, Call

_REQUEST_SECONDS = 10.0
_AGAIN_SECONDS = 1.0  # after which a caller may ask again: it may serve by then


class StandbyService:
    """The calls of a standby, on an event loop; ``status`` and ``promote`` only read and note, and wait for nothing.

    ``promote`` raises :class:`Rejected` if the standby must not serve; its argument is whether it is forced.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        status: Callable[[], pb.GetStatusResponse],
        promote: Callable[[bool], pb.PromoteResponse],
        primary: str,
    ) -> None:
        self._authenticator, self._status, self._promote, self._primary = authenticator, status, promote, primary
        self._audit = AuditTrail(authenticator)
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            rpc: grpc.stream_stream_rpc_method_handler(partial(self._serve, rpc)) for rpc in RULES
        }
        self.handler: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(SERVICE.full_name, methods)

    async def _serve(self, rpc: str, _: Any, context: Any) -> None:
        credentials: Credentials | None = None
        try:
            credentials = self._authenticator.credentials_of(context)
            role = RULES[rpc].role if rpc == "Promote" else Role.READER
            caller = await self._authenticator.admit(credentials, rpc, role)
            if rpc == "GetStatus":
                answer: pb.GetStatusResponse | pb.PromoteResponse = self._status()
            elif rpc == "Promote":
                answer = await self._promote_for(caller, context)
            else:
                raise Rejected(
                    ErrorCode.STANDBY, f"this server stands by for {self._primary}", retry_seconds=_AGAIN_SECONDS
                )
        except Rejected as refusal:
            if rpc != "Promote":
                self._audit.refused(rpc, context, credentials, refusal)
            await context.abort_with_status(to_status(refusal))
            return
        await context.write(answer.SerializeToString())

    async def _promote_for(self, caller: Caller, context: Any) -> pb.PromoteResponse:
        call = Call("Promote", caller)
        try:
            request = await self._read(context)
            call.audit = {"force": request.force}
            answer = self._promote(request.force)
        except Rejected as refusal:
            self._audit.operators_call(call, context, refusal)
            raise
        self._audit.operators_call(call, context, None)
        return answer

    @staticmethod
    async def _read(context: Any) -> pb.PromoteRequest:
        raw = await asyncio.wait_for(context.read(), _REQUEST_SECONDS)
        try:
            return pb.PromoteRequest.FromString(b"" if raw is grpc.aio.EOF else raw)
        except DecodeError as error:
            raise Rejected(ErrorCode.BAD_REQUEST, "a message is no PromoteRequest") from error

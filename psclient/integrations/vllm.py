"""The plugin for vLLM: makes the weight transfer backend ``sparseps`` known in each of its processes.

vLLM calls :func:`register` by the entry point ``vllm.general_plugins`` of this package. Tested against vLLM 0.33's
interface.
"""

import contextlib

BACKEND = "sparseps"


def register() -> None:
    """Register the backend; harmless twice, as vLLM may load plugins more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered
        WeightTransferEngineFactory.register_engine(
            BACKEND, "psclient.integrations.vllm_engine", "FeedWeightTransferEngine"
        )

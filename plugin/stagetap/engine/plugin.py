"""The ``vllm.general_plugins`` entry point: it registers, and checks nothing.

vLLM calls it in every process, model inspection and ``--help`` included, whether StageTap is used
or not, so it must neither fail nor cost anything there.
"""

from __future__ import annotations

from importlib.util import find_spec

from stagetap.options import CONNECTOR_NAME


def register() -> None:
    """Make the connector known to vLLM, and the hook functions where the vLLM is patched."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, "stagetap.engine.connector", CONNECTOR_NAME
        )
    if find_spec("vllm.plugins.hooks") is None:
        return  # Unpatched: the connector refuses to start there.
    from vllm.plugins.hooks import register_hook

    from stagetap.engine import configure, flags, requests

    register_hook("cli_args", flags.add_flags)
    register_hook("parsed_args", flags.apply_flags)
    register_hook("vllm_config", configure.configure)
    register_hook("request", requests.prepare_request)
    register_hook("final_output", requests.raise_failure)

"""The ``vllm.general_plugins`` entry point: it registers, and checks nothing.

Where a ``stagetap`` command waits for the reason of an engine's end, it listens to vLLM's log too.

vLLM calls it in every process, model inspection and ``--help`` included, whether StageTap is used
or not, so it must neither fail nor cost anything there.
"""

from __future__ import annotations

from importlib.util import find_spec

from stagetap.options import CONNECTOR_NAME


def register() -> None:
    """Make the connector known to vLLM, and the hook functions where the vLLM is patched."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from stagetap.engine.report import watch_log

    watch_log()
    patched = find_spec("vllm.plugins.hooks") is not None
    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        module = "stagetap.engine.connector" if patched else "stagetap.engine.unpatched"
        KVConnectorFactory.register_connector(CONNECTOR_NAME, module, CONNECTOR_NAME)
    if not patched:
        return
    from vllm.plugins.hooks import register_hook

    from stagetap.engine import configure, flags, requests, shutdown

    register_hook("cli_args", flags.add_flags)
    register_hook("parsed_args", flags.apply_flags)
    register_hook("vllm_config", configure.configure)
    register_hook("http_request", requests.check_http_request)
    register_hook("beam_search", requests.check_beam_search)
    register_hook("request", requests.prepare_request)
    register_hook("final_output", requests.raise_failure)
    register_hook("engine_shutdown", shutdown.begin_drain)

"""Flags of ``vllm serve`` that options of ``stagetap serve`` become. Pure.

What is handed to vLLM as it is may not say them again: of two the last one counts, and the rest of
the command would speak of another server than the one that starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

HOST_FLAGS = MappingProxyType(
    {
        **dict.fromkeys(("--nnodes", "-n"), "--nnodes"),
        **dict.fromkeys(("--node-rank", "-r", "--headless"), "--node-rank"),
        "--master-addr": "--master-addr",
        "--master-port": "--master-port",
    }
)
"""Those that say on which hosts an engine runs -> the option of ``stagetap serve`` for it."""

PROTECTED = MappingProxyType(
    {
        **HOST_FLAGS,
        **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "--pp"),
        **dict.fromkeys(("--tensor-parallel-size", "-tp"), "--tp"),
        "--max-model-len": "--max-len",
        "--host": "--host",
        "--port": "--port",
        "--model": "MODEL",
        "--stagetap-layers": "--layers",
        "--stagetap-store": "--store",
        "--kv-transfer-config": "--layers and --store",
    }
)
"""All of them."""


def contradictions(
    arguments: Iterable[str], protected: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Arguments that say a protected flag, however vLLM lets one write it, and its place.

    vLLM takes ``_`` for ``-``, ``--flag=value``, ``--flag.key`` and any beginning that only one
    flag has.
    """
    for argument in arguments:
        if not argument.startswith("-"):
            continue
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        for flag, place in protected.items():
            begins = name.startswith("--") and len(name) > 3 and flag.startswith(name)
            if name == flag or begins:
                yield argument, place
                break

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

_OTHERS = frozenset({"-dc"})
"""Short flags of vLLM that are the beginning of another one: ``--diffusion-config`` of ``-dcp``."""


def contradictions(
    arguments: Iterable[str], protected: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Arguments that say a protected flag, however vLLM lets one write it, and its place.

    vLLM takes ``_`` for ``-``, ``--flag=value``, ``--flag.key``, ``-n2`` and any beginning that
    only one flag has.
    """
    for argument in arguments:
        if not argument.startswith("-"):
            continue
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        said = name if name in protected else next((f for f in protected if _says(name, f)), None)
        if said is not None:
            yield argument, protected[said]


def _says(name: str, flag: str) -> bool:
    """Whether a word is the beginning of a flag, or a short flag with its value glued on."""
    if name.startswith("--"):
        return len(name) > 3 and flag.startswith(name)
    if flag.startswith("--") or name in _OTHERS:
        return False
    glued = name.startswith(flag)
    return glued or (len(name) > 1 and flag.startswith(name))

"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from stagetap.config_values import MAX_SIZE
from stagetap.errors import Refused
from stagetap.layer_choice import HELP
from stagetap.wording import shown

JsonOption = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]
ModelOption = Annotated[
    str, typer.Option("--model", help="A checkpoint folder, a Hugging Face name, or smollm2.")
]
LayersOption = Annotated[str, typer.Option("--layers", help=HELP)]
PpOption = Annotated[int, typer.Option("--pp", min=1, max=MAX_SIZE, help="Pipeline stages.")]
TpOption = Annotated[
    int, typer.Option("--tp", min=1, max=MAX_SIZE, help="Tensor-parallel ranks of each stage.")
]
MaxLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-len",
        min=2,
        max=MAX_SIZE,
        help="Longest sequence in tokens; default: the model's own.",
    ),
]
EngineArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        metavar="NAME=VALUE",
        help="A further argument of vLLM's EngineArgs, its value in JSON or plain text. "
        "May be repeated.",
    ),
]


def engine_arguments(given: Sequence[str] | None) -> dict[str, Any]:
    """``["gpu_memory_utilization=0.5"]`` as a dictionary.

    Raises Refused for a pair without ``=``, a name that is no identifier, one given twice, or JSON
    that is nested too deeply.
    """
    arguments: dict[str, Any] = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise Refused(f"--engine-arg {shown(pair)}: write NAME=VALUE, such as block_size=32")
        if name in arguments:
            raise Refused(f"--engine-arg {name} is given twice; keep one of them")
        try:
            arguments[name] = json.loads(value)
        except RecursionError:
            raise Refused(f"--engine-arg {name} is nested too deeply; write flatter JSON") from None
        except ValueError:
            arguments[name] = value  # plain text
    return arguments


def agreed(arguments: dict[str, Any], name: str, option: str, said: Any) -> Any:
    """What an option and the engine argument of the same meaning say together.

    The argument is taken out of ``arguments``.

    Args:
        name: of vLLM's ``EngineArgs``.
        option: as the command has it.
        said: its value; None where it is not given.

    Raises:
        Refused: they differ.
    """
    if name not in arguments:
        return said
    given = arguments.pop(name)
    if said is not None and (type(given), given) != (type(said), said):
        raise Refused(
            f"{option} {said} and --engine-arg {name}={shown(given)} differ; say {option} alone"
        )
    return given


def agreed_max_len(arguments: dict[str, Any], max_len: int | None) -> int | None:
    """The same of ``--max-len``. What is no length stays an argument: vLLM reads or refuses it."""
    given = agreed(arguments, "max_model_len", "--max-len", max_len)
    if given is None or (type(given) is int and given > 0):
        return given
    arguments["max_model_len"] = given
    return None


def agreed_ranks(arguments: dict[str, Any], pp: int, tp: int) -> None:
    """The same of ``--pp`` and ``--tp``, which always say something."""
    agreed(arguments, "pipeline_parallel_size", "--pp", pp)
    agreed(arguments, "tensor_parallel_size", "--tp", tp)

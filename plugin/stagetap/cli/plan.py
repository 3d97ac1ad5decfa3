"""``stagetap plan``: what a capture costs on each stage, told from a configuration alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagetap.cli.arguments import JsonOption, LayersOption, MaxLenOption, PpOption, TpOption
from stagetap.cli.output import human_bytes, print_json, results, table
from stagetap.config_values import MAX_SIZE
from stagetap.errors import Refused
from stagetap.layer_choice import choose_layers
from stagetap.models import resolve_model
from stagetap.partition import PARTITION_ENV, parse_partition, stage_layers
from stagetap.plan.weights import KINDS
from stagetap.taps import STREAM_MIXTURE, STREAM_PREFIX_SUM, STREAM_RESIDUAL
from stagetap.wording import counted, shortened

if TYPE_CHECKING:
    from rich.table import Table

    from stagetap.plan.stages import Plan, Stage

_MEANING = {
    STREAM_RESIDUAL: "the residual stream after decoder layer k-1",
    STREAM_PREFIX_SUM: "the prefix sum after decoder layer k-1",
    STREAM_MIXTURE: "the mixture that decoder layer k reads",
}
_GIB = 2**30
_MOST_GIB = 2**20
_BORDER, _COLUMN_FRAME = 1, 3  # characters


def plan_command(
    model: Annotated[
        str,
        typer.Argument(help="A config.json, a folder with one, a Hugging Face name, or smollm2."),
    ],
    layers: LayersOption,
    pp: PpOption = 1,
    tp: TpOption = 1,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Whole experts a rank, as vLLM's flag.")
    ] = False,
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition",
            help=f"Layers of each stage, such as 10,20; default: {PARTITION_ENV}, else even.",
        ),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            "--stream",
            help=f"Of Kimi-K3: {STREAM_PREFIX_SUM} (default) or {STREAM_MIXTURE}, which a tap at "
            "a cut moves to the next stage.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="As vLLM's --dtype; default: auto.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="As vLLM's; auto is the model's dtype.")
    ] = "auto",
    max_len: MaxLenOption = None,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            "--max-num-batched-tokens",
            min=1,
            max=MAX_SIZE,
            help="As vLLM's: sizes the capture buffers.",
        ),
    ] = 8192,
    gpu_memory_gib: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory-gib",
            min=0.1,
            max=_MOST_GIB,
            help="Memory of a GPU: tells capacities as well.",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option("--gpu-memory-utilization", min=0.01, max=1.0, help="As vLLM's."),
    ] = 0.9,
    reserve_gib: Annotated[
        float,
        typer.Option(
            "--reserve-gib",
            min=0.0,
            max=_MOST_GIB,
            help="Room of a GPU for activations and CUDA graphs, a guess.",
        ),
    ] = 4.0,
    as_json: JsonOption = False,
) -> None:
    """Say what a capture would cost: owners, memory of a GPU, what is stored. Starts no engine.

    Exit code 1 when a stage has no room for its weights, or for one whole sequence.
    """
    from stagetap.plan.document import plan_document
    from stagetap.plan.parallel import Parallel
    from stagetap.plan.read_model import read_model
    from stagetap.plan.stages import Budget, make_plan

    budget = None
    if gpu_memory_gib is not None:
        budget = Budget(
            gpu_bytes=int(gpu_memory_gib * _GIB),
            utilization=gpu_memory_utilization,
            reserve_bytes=int(reserve_gib * _GIB),
        )
    config = _configuration(model)
    described = read_model(config, f"config.json of {shortened(model, 200)}", dtype)
    plan = make_plan(
        described,
        choose_layers(layers, described.num_hidden_layers),
        Parallel(pp=pp, tp=tp, expert_parallel=expert_parallel),
        stream=stream,
        partition=_partition(partition, pp, described.num_hidden_layers),
        kv_cache_dtype=kv_cache_dtype,
        sequence_tokens=max_len,
        batched_tokens=max_num_batched_tokens,
        budget=budget,
    )
    if as_json:
        print_json(plan_document(plan, model))
    else:
        _show(plan, model)
    if plan.fits is False:
        raise typer.Exit(1)


def _partition(asked: str | None, pp: int, num_hidden_layers: int) -> list[int] | None:
    """The layers of each stage, if the option or vLLM's variable names them.

    Raises:
        Refused: they do not fit the model, naming the variable where they come from there.
    """
    layout = os.environ.get(PARTITION_ENV) if asked is None else asked
    if layout is None:
        return None
    if asked is not None and pp == 1 and "," in asked:
        raise Refused(
            f"--partition {shortened(asked)} is for {layout.count(',') + 1} stages and --pp is 1; "
            f"say --pp {layout.count(',') + 1} as well"
        )
    try:
        counts = parse_partition(layout)
        stage_layers(num_hidden_layers, pp, counts)
    except Refused as error:
        if asked is not None:
            raise
        raise Refused(f"{PARTITION_ENV}: {error}, or unset the variable") from None
    return counts


def _configuration(model: str) -> dict[str, Any]:
    from stagetap.cli.model_facts import read_config
    from stagetap.config_file import read_config_file

    if os.path.isfile(model):
        return read_config_file(model)
    config = read_config(resolve_model(model))
    if config is None:
        raise Refused(
            f"the config.json of {model} is not on this machine; download it, and give the file or "
            "its folder"
        )
    return config


def _show(plan: Plan, name: str) -> None:
    from stagetap.plan.document import remarks

    console = results()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    model, total = plan.model, plan.model.num_hidden_layers
    experts = ", whole experts a rank" if plan.parallel.expert_parallel else ""
    say(
        f"{name}: {shortened(model.model_type)}, {total} layers, hidden {model.hidden_size}, "
        f"{_count(model.parameters())} parameters, {model.dtype}, "
        f"quantization {model.quantization.method}"
    )
    say(
        f"{counted(plan.parallel.pp, 'stage')} of {counted(plan.parallel.tp, 'GPU')}{experts}; "
        f"taps {','.join(map(str, plan.layer_ids))}: id k is {_MEANING[plan.stream]}, 0 the "
        f"embedding output, {total} the last one, un-normed"
    )
    for columns in (_weights(plan), _memory(plan)):
        for rows in _tables(columns, console.width):
            console.print(rows)
    say(f"stored: {human_bytes(1000 * plan.stored_token_bytes)} for 1,000 tokens, ids included")
    if plan.parallel.pp > 1:
        say(
            f"between stages: nothing; handing taps on to the last stage would move "
            f"{human_bytes(plan.relay_token_bytes)} a token, all boundaries together"
        )
    for line in _capacity(plan):
        say(line)
    for remark in remarks(plan):
        say(f"estimated: {remark}")


def _weights(plan: Plan) -> dict[str, list[str]]:
    """Who owns what, and the weights of one GPU."""
    headers = {
        "stage": [str(stage.index) for stage in plan.stages],
        "layers": [
            f"{stage.start}-{stage.end - 1}" if stage.end > stage.start else "none"
            for stage in plan.stages
        ],
        "attention": [_attention(plan, stage) for stage in plan.stages],
        "owns taps": [",".join(map(str, stage.layer_ids)) or "none" for stage in plan.stages],
    }
    for kind in KINDS:
        headers[kind.replace("_", " ")] = _sizes(stage.weight_bytes[kind] for stage in plan.stages)
    headers["derived"] = _sizes(stage.derived_bytes for stage in plan.stages)
    return headers


def _memory(plan: Plan) -> dict[str, list[str]]:
    """What a capture and a cache take of one GPU, and the staging of the first rank."""
    columns = {
        "stage": [str(stage.index) for stage in plan.stages],
        "capture buffers": _sizes(stage.capture_bytes for stage in plan.stages),
        "taps/token": _sizes(stage.tap_token_bytes for stage in plan.stages),
        "KV/token": _sizes(stage.kv_token_bytes for stage in plan.stages),
        "window/seq": _sizes(stage.window_bytes for stage in plan.stages),
        "state/seq": _sizes(stage.state_bytes for stage in plan.stages),
        "host staging": _sizes(stage.staging_host_bytes for stage in plan.stages),
    }
    if plan.budget is not None:
        rooms = [stage.available_bytes or 0 for stage in plan.stages]
        columns["left for cache"] = [
            human_bytes(room) if room > 0 else f"lacks {human_bytes(-room)}" for room in rooms
        ]
        columns["tokens"] = [
            "-" if stage.tokens is None else f"{stage.tokens:,}" for stage in plan.stages
        ]
    return columns


def _sizes(sizes: Iterable[int]) -> list[str]:
    return [human_bytes(size) if size else "-" for size in sizes]


def _tables(columns: Mapping[str, list[str]], width: int) -> Iterator[Table]:
    """Tables of one row a stage, as many as it takes to fold no cell, without empty columns."""
    (first, stages), *others = columns.items()
    rest = {name: cells for name, cells in others if set(cells) != {"-"}}
    while rest:
        shown, used = {first: stages}, _BORDER + _width(first, stages)
        for name, cells in list(rest.items()):
            used += _width(name, cells)
            if len(shown) > 1 and used > width:
                break
            shown[name] = rest.pop(name)
        rows = table(*shown)
        for row in zip(*shown.values(), strict=True):
            rows.add_row(*row)
        yield rows


def _width(name: str, cells: list[str]) -> int:
    return max(map(len, [name, *cells])) + _COLUMN_FRAME


def _attention(plan: Plan, stage: Stage) -> str:
    labels = [layer.attention.label for layer in plan.model.layers[stage.start : stage.end]]
    return ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(labels)) or "-"


def _capacity(plan: Plan) -> list[str]:
    if plan.budget is None:
        return ["KV capacity: give --gpu-memory-gib to have it told, and a better partition"]
    told = (
        f"KV capacity: {plan.tokens or 0:,} tokens in sequences of {plan.sequence_tokens:,}, "
        "those of the smallest stage"
    )
    if plan.full_stages:
        stages = " and ".join(f"stage {stage}" for stage in plan.full_stages)
        found = [
            f"does not fit: no room for a cache on {stages}; use more "
            "stages, a larger --tp, or another --partition"
        ]
    elif not plan.fits:
        found = [
            told,
            "does not fit: vLLM does not start where the cache is shorter than one sequence; "
            "use a smaller --max-len (vLLM's --max-model-len), more stages, or a larger --tp",
        ]
    else:
        found = [told]
    if plan.advice is not None:
        found.append(plan.advice.line())
        if plan.advice_without_taps:
            found.append("the same holds without a capture: the taps are not the cause")
    return found


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)

"""Both arms and the comparison: what ``stagetap equivalence`` and ``stagetap demo`` run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagetap.equivalence.arms import Arm, run_arm, write_prompts
from stagetap.equivalence.compare import Comparison, Problem, compare_datasets
from stagetap.errors import Refused
from stagetap.fingerprint import weights_fingerprint
from stagetap.partition import owners, stage_layers
from stagetap.prompts import TokenPrompt
from stagetap.taps import STREAM_RESIDUAL


@dataclass(frozen=True)
class Proof:
    """Where the two datasets lie, and how they compare. ``owners``: stage -> its layer ids."""

    comparison: Comparison
    owners: dict[int, list[int]]
    reference: Path
    candidate: Path
    captured: dict[str, Any]


def check_arm(
    arm: Arm, num_hidden_layers: int, stream: str = STREAM_RESIDUAL
) -> dict[int, list[int]]:
    """The owners of an arm's taps, if comparing it with one stage proves anything.

    Args:
        stream: what the taps are of, which only the loaded model knows.

    Raises:
        Refused: one stage only, or all taps fall on one of them.
    """
    if arm.pp < 2:
        raise Refused(
            f"--pp {arm.pp} compares one stage with itself; give --pp 2 or more to prove something"
        )
    stages = stage_layers(num_hidden_layers, arm.pp, arm.partition)
    owned = owners(stages, arm.layers, stream)
    if len(owned) < 2:
        stage = next(iter(owned))
        layout = ", ".join(f"{index}: {start}-{end}" for index, (start, end) in enumerate(stages))
        raise Refused(
            f"all taps {list(arm.layers)} fall on stage {stage} at --pp {arm.pp}, which proves "
            f"nothing; ask for layers of two stages at least (layers run by each: {layout})"
        )
    return owned


def prove(
    arm: Arm,
    prompts: Sequence[TokenPrompt],
    num_hidden_layers: int,
    *,
    candidate: Path,
    reference: Path,
    reuse_reference: bool,
    scratch: Path,
    notify: Callable[[str], None],
) -> Proof:
    """Capture the prompts on ``arm.pp`` stages and on one, and compare what the reader returns.

    Args:
        arm: the arm in question; the reference differs from it in its stages alone.
        num_hidden_layers: N of the model.
        candidate: where the arm's dataset goes.
        reference: where the reference goes, or lies already with ``reuse_reference``.
        scratch: a folder for prompts and logs.
        notify: told what happens next.

    Raises:
        Refused: the comparison would prove nothing, an arm was refused, or the reference is one of
            another model, other layers or several stages.
        StageTapError: an arm failed.
    """
    from stagetap import open_dataset

    check_arm(arm, num_hidden_layers)
    prompt_file = scratch / "prompts.jsonl"
    write_prompts(prompt_file, prompts)
    if reuse_reference:
        reference_run = _check_reference(arm, reference)
    else:
        notify("capturing on 1 stage, the reference")
        run_arm(arm.single_stage(), prompt_file, reference, scratch / "pp1.log")
        reference_run = arm.run_id
    notify(f"capturing on {arm.pp} stages")
    captured = run_arm(arm, prompt_file, candidate, scratch / f"pp{arm.pp}.log")
    notify("comparing")
    ours = open_dataset(str(candidate), run=arm.run_id)
    owned = check_arm(arm, num_hidden_layers, ours.invariant.stream)
    comparison = compare_datasets(
        open_dataset(str(reference), run=reference_run),
        ours,
        {prompt.sample_id: prompt.token_ids.tolist() for prompt in prompts},
    )
    return Proof(
        comparison=replace(
            comparison, problems=(*comparison.problems, *_misplaced(ours, prompts, arm, owned))
        ),
        owners=owned,
        reference=reference,
        candidate=candidate,
        captured=captured,
    )


def _misplaced(
    dataset: Any, prompts: Sequence[TokenPrompt], arm: Arm, owned: dict[int, list[int]]
) -> list[Problem]:
    """Equality proves something only when the stages were the ones that were expected."""
    found = []
    for prompt in prompts:
        if prompt.sample_id not in dataset.sample_ids:
            continue  # The comparison has named it.
        manifest = dataset[prompt.sample_id].manifest
        stored = {
            fragment.stage: [layer.id for layer in fragment.layers]
            for fragment in manifest.fragments
        }
        if manifest.tapped.pp_size != arm.pp or stored != owned:
            what = f"stages stored layers {stored}, expected were {owned}"
            found.append(Problem(prompt.sample_id, None, what))
    return found


def _check_reference(arm: Arm, reference: Path) -> str:
    """The run of a reference that was captured earlier, after a look at what it is."""
    from stagetap import open_dataset

    dataset = open_dataset(str(reference))
    if not len(dataset):
        raise Refused(f"--reference {reference} holds no sample; capture it with --pp 1")
    manifest = dataset[0].manifest
    tapped = manifest.tapped
    expected = {
        "weights_fingerprint": weights_fingerprint(
            Path(arm.model), dummy_weights=arm.engine_args.get("load_format") == "dummy"
        ),
        "layer_ids": tuple(arm.layers),
        "pp_size": 1,
        "tp_size": arm.tp,
    }
    for name, value in expected.items():
        if getattr(tapped, name) != value:
            raise Refused(
                f"--reference {reference} has {name} {getattr(tapped, name)}, this comparison "
                f"{value}; capture the reference of the same model and layers with --pp 1"
            )
    return str(manifest.run_id)

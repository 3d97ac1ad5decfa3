"""``stagetap demo``: the whole job on a real model, from text to a proven dataset."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagetap.cli.equivalence import show_layers, show_verdict
from stagetap.cli.folders import temporary_folder, write_file
from stagetap.cli.output import activity, human_bytes, results, table
from stagetap.errors import Refused
from stagetap.models import resolve_model

if TYPE_CHECKING:
    from stagetap.equivalence.prove import Proof

RUN_ID = "demo"
LAYERS = (2, 15, 27, 30)
PROMPTS: tuple[dict[str, Any], ...] = (
    {"id": "word", "text": "Water"},
    {"id": "capital", "text": "The capital of France is"},
    {"id": "primes", "text": "The first prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23, and"},
    {"id": "code", "text": "def mean(numbers):\n    return sum(numbers) / len(numbers)\n"},
    {
        "id": "chat",
        "messages": [{"role": "user", "content": "Why is the sky blue? One sentence, please."}],
        "metadata": {"kind": "chat"},
    },
    {
        "id": "tide",
        "text": "Twice a day the sea comes up to the wall of the harbour and goes away again. "
        "The moon pulls at the water that lies beneath it more strongly than at the earth, and at "
        "the earth more strongly than at the water on the far side, so the water stands high on "
        "both sides at once, and the earth turns through the two hills every day.",
    },
    {
        "id": "letter",
        "text": "Dear neighbour, the pear tree between our gardens has grown over the fence this "
        "year, and more of the fruit hangs on your side than on mine. Please pick whatever you can "
        "reach. All I ask is that you leave the lowest branch to the hedgehogs, who have come for "
        "the fallen pears every autumn since we moved in, and who do not read letters.",
    },
    {
        "id": "pipeline",
        "text": " ".join(
            f"Stage {stage} takes the states that the stage before it has sent, runs its own "
            "layers over them, keeps what it was asked to keep, and sends on the rest."
            for stage in range(1, 13)
        ),
    },
)


def demo_command(
    out: Annotated[
        Path, typer.Option("--out", help="Where the dataset stays; an earlier demo is replaced.")
    ] = Path("demo-dataset"),
) -> None:
    """Capture SmolLM2 on two pipeline stages, and prove the dataset equal to one stage.

    Ends with exit code 1 unless every tensor is bitwise equal.
    """
    from stagetap.cli.model_facts import model_facts
    from stagetap.cli.tokenized import load_prompts
    from stagetap.equivalence.arms import Arm
    from stagetap.equivalence.prove import prove
    from stagetap.stores.base import check_store_writable

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = resolve_model("smollm2")
    facts = model_facts(model)
    if facts.num_hidden_layers is None:
        raise Refused(f"{model} does not say how many layers it has; make it anew: ./justw setup")
    check_store_writable(out)
    remove_earlier_demo(out)
    with (
        temporary_folder("stagetap-demo-") as folder,
        activity() as notify,
    ):
        prompt_file = write_demo_prompts(folder)
        proof = prove(
            Arm(model=model, layers=LAYERS, pp=2, run_id=RUN_ID),
            load_prompts(prompt_file, model),
            facts.num_hidden_layers,
            candidate=out,
            reference=folder / "pp1",
            reuse_reference=False,
            scratch=folder,
            notify=notify,
        )
        _show(proof, out)
    if not proof.comparison.bitwise:
        raise typer.Exit(1)


def write_demo_prompts(folder: Path) -> Path:
    """A file of the demo's prompts, as ``stagetap capture`` takes it."""
    file = folder / "demo.jsonl"
    write_file(file, "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return file


def remove_earlier_demo(out: Path) -> None:
    """Remove what an earlier demo, finished or not, left at ``out``.

    Raises:
        Refused: something else is there.
    """
    from stagetap.stores.file_io import SCRATCH_PREFIX, naming
    from stagetap.stores.file_layout import TOP_LEVEL

    if not out.exists() and not out.is_symlink():
        return
    ours = out.is_dir() and not out.is_symlink()
    if not ours or any(
        entry.name not in (*TOP_LEVEL, RUN_ID) and not entry.name.startswith(SCRATCH_PREFIX)
        for entry in out.iterdir()
    ):
        raise Refused(f"{out} holds something other than a demo's dataset; choose another --out")
    with naming("remove", str(out)):
        shutil.rmtree(out)


def _show(proof: Proof, out: Path) -> None:
    from stagetap import open_dataset

    rows = table("sample", "tokens", "stage", "layers", "bytes", title=f"dataset {out}")
    for sample in open_dataset(str(out), run=RUN_ID):
        for fragment in sample.manifest.fragments:
            first = fragment.input_ids
            rows.add_row(
                sample.sample_id if first else "",
                str(sample.manifest.token_count) if first else "",
                str(fragment.stage),
                ", ".join(str(layer.id) for layer in fragment.layers),
                human_bytes(fragment.byte_size),
            )
    results().print(rows)
    show_layers(proof, LAYERS)
    show_verdict(proof, tolerant=False)

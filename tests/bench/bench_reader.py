"""The reader against the least there is to do: `safe_open` of the same files and one `torch.cat`.

Both sides touch every stored byte of every sample, page cache warm, turn by turn in one process.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open

import stagetap
from stagetap.reader.dataset import HiddenStatesDataset
from stagetap.reader.sample import Sample
from store_samples import Engine, tapped

# SmolLM2's shape: two stages of 15 layers, hidden size 576, prompts of 500 tokens.
_LAYERS, _HIDDEN, _TOKENS = 30, 576, 500
_LAYER_IDS = (2, 15, 27, 30)


@dataclass(frozen=True)
class ReaderFigures:
    """`ratio` is the median over the rounds of reader bytes/s over baseline bytes/s."""

    ratio: float
    reader_bytes_per_s: float
    baseline_bytes_per_s: float
    samples: int
    bytes: int


def measure(
    root: str | Path, rounds: int = 31, warmups: int = 2, threads: int = 1
) -> ReaderFigures:
    """Read the store at `root` both ways, `rounds` times, with so many threads of torch's.

    With more than one, threads that wait for a busy core say more about the machine than about
    the two sides.
    """
    torch.set_num_threads(threads)
    dataset = stagetap.open_dataset(root)
    manifests = [dataset.manifest(position) for position in range(len(dataset))]
    paths = [[Path(root) / f.path for f in m.fragments] for m in manifests]
    size_bytes = sum(f.byte_size for m in manifests for f in m.fragments)
    touch_last = _last_lies_apart(dataset[0])
    sides: tuple[Callable[[], None], Callable[[], None]] = (
        lambda: _read_baseline(paths),
        lambda: _read_dataset(dataset, touch_last),
    )
    rows = []
    for turn in range(warmups + rounds):
        # Who comes first changes, so that neither profits from what the other left in the caches.
        order = (0, 1) if turn % 2 else (1, 0)
        seconds = {side: _seconds(sides[side]) for side in order}
        rows.append((seconds[0], seconds[1]))
    timed = rows[warmups:]
    return ReaderFigures(
        ratio=statistics.median(baseline / reader for baseline, reader in timed),
        reader_bytes_per_s=size_bytes / statistics.median(reader for _, reader in timed),
        baseline_bytes_per_s=size_bytes / statistics.median(baseline for baseline, _ in timed),
        samples=len(manifests),
        bytes=size_bytes,
    )


def write_store(root: Path, samples: int = 40) -> None:
    """A store of random states in SmolLM2's shape."""
    half = _LAYERS // 2
    what = tapped(
        layer_ids=_LAYER_IDS,
        pp_layers=((0, half), (half, _LAYERS)),
        num_hidden_layers=_LAYERS,
        hidden_size=_HIDDEN,
    )
    engine = Engine(root, what, slots=4, slot_bytes=4 << 20)
    for seed in range(samples):
        engine.export(f"sample-{seed}", _TOKENS, seed)
    engine.close()


def _read_baseline(paths: list[list[Path]]) -> None:
    for fragments in paths:
        tensors = []
        for path in fragments:
            with safe_open(path, framework="pt") as file:
                tensors.append(file.get_tensor("hidden_states"))
                if "input_ids" in file.keys():  # noqa: SIM118 -- safe_open is no mapping
                    file.get_tensor("input_ids").sum()
        _assembled = torch.cat(tensors, dim=1)  # held until the next one, as the reader's is


def _read_dataset(dataset: HiddenStatesDataset, touch_last: bool) -> None:
    for sample in dataset:
        sample.input_ids.sum()
        _assembled = sample.hidden_states
        last = sample.last_hidden_states
        if touch_last and last is not None:
            last.clone()


def _last_lies_apart(sample: Sample) -> bool:
    """Whether assembling left the last layer where it was, so that it has yet to be touched."""
    assembled, last = sample.hidden_states, sample.last_hidden_states
    return last is not None and (
        last.untyped_storage().data_ptr() != assembled.untyped_storage().data_ptr()
    )


def _seconds(read: Callable[[], None]) -> float:
    started = time.perf_counter()
    read()
    return time.perf_counter() - started


def main() -> None:
    """Print the figures of a store made for the purpose, as one line of JSON."""
    with tempfile.TemporaryDirectory() as directory:
        write_store(Path(directory) / "store")
        print(json.dumps(asdict(measure(Path(directory) / "store"))))


if __name__ == "__main__":
    main()

"""From a row of training data to its hidden states, in speculators' layout."""

from __future__ import annotations

import json
import pickle
import struct
import threading
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from stagetap import Refused, SampleNotFound, TruncatedFragment, open_dataset
from stagetap.errors import ForeignStore, NonFinite
from stagetap.training.rows import write_rows
from stagetap.training.transfer import Source, StageTapTransfer
from store_samples import HIDDEN, Engine, states, tapped, token_ids
from training.conftest import Export


def source(store: Path, wait_s: float = 0, run: str | None = None, verify: bool = True) -> Source:
    return Source(uri=str(store), run=run, stream="residual", verify=verify, wait_s=wait_s)


def rows_of(folder: Path, *rows: tuple[int, int], prompt_tokens: int = 0) -> str:
    """A data folder as ``speculators prepare-data`` writes it; (tokens, seed) of each row."""
    ids = [token_ids(tokens, seed) for tokens, seed in rows]
    columns = {
        "input_ids": ids,
        "loss_mask": [[int(at >= prompt_tokens) for at in range(len(each))] for each in ids],
        "seq_len": [len(each) for each in ids],
    }
    Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)
    return str(folder)


def test_columns_are_the_drafts_order_and_the_last_one(
    store: Path, export: Export, tmp_path: Path
) -> None:
    """The draft reads 4 and 2, in this order; the dataset was asked for 2, 0, 4, 6."""
    export("a", 7, 0)
    export("b", 9, 1)
    write_rows(open_dataset(store), tmp_path / "rows", "all", min_loss_tokens=1)
    transfer = StageTapTransfer(source(store), str(tmp_path / "rows"), (4, 2, 6), may_miss=False)
    for row, tokens in enumerate((7, 9)):
        found = transfer.get_cached(row)
        assert found is not None
        assert found["token_ids"].tolist() == token_ids(tokens, row).tolist()
        assert found["hidden_states"].shape == (tokens, 3, 16)
        for column, tap in enumerate((4, 2, 6)):
            expected = states(tap, tokens, row).bfloat16()
            assert torch.equal(found["hidden_states"][:, column], expected)


def test_a_dataset_that_has_not_begun_is_awaited(store: Path) -> None:
    with pytest.raises(ForeignStore):
        source(store).open_invariant()
    begin = threading.Timer(0.2, lambda: Engine(store).close())
    begin.start()
    assert source(store, wait_s=20).open_invariant().stream == "residual"
    begin.join()


def test_rows_find_their_samples_in_any_order(store: Path, export: Export, tmp_path: Path) -> None:
    for seed in range(4):
        export(f"s{seed}", 6 + seed, seed)
    shuffled = [2, 0, 3, 1]
    rows = rows_of(tmp_path / "rows", *((6 + seed, seed) for seed in shuffled))
    transfer = StageTapTransfer(source(store), rows, (0, 6), may_miss=False)
    assert transfer.rows_without_sample() == []
    for row, seed in enumerate(shuffled):
        found = transfer.get_cached(row)
        assert found is not None
        assert torch.equal(found["hidden_states"][:, 1], states(6, 6 + seed, seed).bfloat16())


def test_a_row_without_a_sample(store: Path, export: Export, tmp_path: Path) -> None:
    export("a", 7, 0)
    rows = rows_of(tmp_path / "rows", (7, 0), (7, 5))
    transfer = StageTapTransfer(source(store), rows, (0, 6), may_miss=True)
    assert transfer.rows_without_sample() == [1]
    assert transfer.get_cached(1) is None
    transfer = StageTapTransfer(source(store), rows, (0, 6), may_miss=False)
    assert transfer.get_cached(0) is not None
    with pytest.raises(SampleNotFound, match=r"row 1 of .* has no sample in .*: capture it"):
        transfer.get_cached(1)
    open_dataset(store).delete("a")
    transfer = StageTapTransfer(source(store), rows, (0, 6), may_miss=True)
    assert transfer.get_cached(0) is None


def test_a_sample_that_is_still_captured_is_awaited(
    store: Path, export: Export, tmp_path: Path
) -> None:
    export("a", 7, 0)
    rows = rows_of(tmp_path / "rows", (7, 5))
    transfer = StageTapTransfer(source(store, wait_s=20), rows, (0, 6), may_miss=False)
    later = threading.Timer(0.5, export, ("late", 7, 5))
    later.start()
    found = transfer.get_cached(0)
    later.join()
    assert found is not None
    assert torch.equal(found["hidden_states"][:, 0], states(0, 7, 5).bfloat16())


def test_a_worker_gets_a_copy(store: Path, export: Export, tmp_path: Path) -> None:
    export("a", 7, 0)
    rows = rows_of(tmp_path / "rows", (7, 0), (7, 1))
    transfer = StageTapTransfer(source(store), rows, (0, 6), may_miss=True)
    assert transfer.rows_without_sample() == [1]
    copy = pickle.loads(pickle.dumps(transfer))
    export("b", 7, 1)
    for row in (0, 1):
        found = copy.get_cached(row)
        assert found is not None
        assert torch.equal(found["hidden_states"][:, 1], states(6, 7, row).bfloat16())


def test_a_broken_sample_is_no_missing_one(store: Path, export: Export, tmp_path: Path) -> None:
    export("a", 7, 0)
    rows = rows_of(tmp_path / "rows", (7, 0))
    fragment = next(store.glob("**/*.safetensors"))
    fragment.write_bytes(fragment.read_bytes()[:-8])
    transfer = StageTapTransfer(source(store), rows, (0, 2, 4, 6), may_miss=True)
    with pytest.raises(TruncatedFragment, match="'a'"):
        transfer.get_cached(0)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_states_that_are_no_numbers(
    store: Path, export: Export, tmp_path: Path, value: float
) -> None:
    export("a", 7, 0)
    export("b", 7, 1)
    _write_value(store, "b", layer=4, token=3, value=value)
    rows = rows_of(tmp_path / "rows", (7, 0), (7, 1))
    unread = StageTapTransfer(source(store, verify=False), rows, (0, 6), may_miss=True)
    assert unread.get_cached(1) is not None
    transfer = StageTapTransfer(
        source(store, verify=False), rows, (4, 2, 6), may_miss=True, remove=True
    )
    with pytest.raises(NonFinite, match=rf"'b' of run .* token 3 at layer 4 is {value}: .*verify"):
        transfer.get_cached(1)
    assert transfer.get_cached(0) is not None
    assert open_dataset(store).sample_ids == ["b"]


def _write_value(store: Path, sample_id: str, layer: int, token: int, value: float) -> None:
    """Put a value in the place of a state's first element, as a capture that keeps it would."""
    for fragment in open_dataset(store)[sample_id].manifest.fragments:
        layers = [each.id for each in fragment.layers]
        if layer in layers:
            path = store / fragment.path
            with path.open("r+b") as file:
                (head_bytes,) = struct.unpack("<Q", file.read(8))
                head = json.loads(file.read(head_bytes))
                start = next(each for each in head.values() if each.get("dtype") == "BF16")
                place = (token * len(layers) + layers.index(layer)) * HIDDEN
                file.seek(8 + head_bytes + start["data_offsets"][0] + 2 * place)
                file.write(torch.tensor(value).bfloat16().view(torch.int16).numpy().tobytes())


def test_one_sample_in_two_runs(store: Path, tmp_path: Path) -> None:
    for run in ("run-1", "run-2"):
        engine = Engine(store, tapped(), run=run)
        engine.export("a", 7, 0)
        engine.close()
    rows = rows_of(tmp_path / "rows", (7, 0))
    transfer = StageTapTransfer(source(store), rows, (0, 6), may_miss=True)
    with pytest.raises(Refused, match=r"run-1, run-2.*--stagetap-run RUN"):
        transfer.get_cached(0)
    transfer = StageTapTransfer(source(store, run="run-2"), rows, (0, 6), may_miss=True)
    assert transfer.get_cached(0) is not None

"""A run in a real store as speculators' trainer reads it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from mooncake_run import Run, Shared
from stagetap.stores.mooncake_committer import MooncakeStoreCommitter
from stagetap.stores.mooncake_writer import MooncakeStoreWriter
from stagetap.training.rows import write_rows
from stagetap.training.transfer import Source, StageTapTransfer
from store_samples import Engine, states


def test_rows_find_their_samples(run: Run, tmp_path: Path) -> None:
    for seed in range(3):
        run.engine.export(f"s{seed}", 9 + seed, seed)
    write_rows(run.dataset(), tmp_path / "rows", "all", min_loss_tokens=1)
    source = Source(uri=run.uri, run=None, stream="residual", verify=True, wait_s=0)
    transfer = StageTapTransfer(source, str(tmp_path / "rows"), (4, 2, 6), may_miss=True)
    assert transfer.rows_without_sample() == []
    worker = pickle.loads(pickle.dumps(transfer))
    for epoch in range(2):
        for row in range(3):
            found = worker.get_cached(row)
            assert found is not None, epoch
            for column, tap in enumerate((4, 2, 6)):
                expected = states(tap, 9 + row, row).bfloat16()
                assert torch.equal(found["hidden_states"][:, column], expected)
    run.dataset().delete("s1")
    assert worker.get_cached(1) is None


def test_reading_empties_a_run_that_two_engines_fill(run: Run, tmp_path: Path) -> None:
    """As the recipe for Kimi-K3 has it: one run, one reader of each row, nothing left."""
    assert run.clients is not None
    shared: Any = Shared(run.clients[0])
    sides = (
        MooncakeStoreCommitter(shared, run.name, 0.5),
        MooncakeStoreWriter(shared, run.name, 0.5),
    )
    second = Engine(sides, run=run.name)
    for seed, engine in enumerate((run.engine, second, run.engine, second)):
        engine.export(f"s{seed}", 9 + seed, seed)
    second.close()
    write_rows(run.dataset(), tmp_path / "rows", "all", min_loss_tokens=1)
    source = Source(
        uri=f"{run.uri}&force_remove=on", run=None, stream="residual", verify=True, wait_s=0
    )
    transfer = StageTapTransfer(
        source, str(tmp_path / "rows"), (4, 2, 6), may_miss=True, remove=True
    )
    assert run.keys()
    found = [transfer.get_cached(row) for row in range(4)]
    lengths = sorted(len(each["token_ids"]) for each in found)
    assert lengths == [9, 10, 11, 12]
    assert run.keys() == []
    assert transfer.get_cached(0) is None

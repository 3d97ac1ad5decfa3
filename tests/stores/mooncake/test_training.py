"""A run in a real store as speculators' trainer reads it."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from mooncake_run import Run
from stagetap.training.rows import write_rows
from stagetap.training.transfer import Source, StageTapTransfer
from store_samples import states


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

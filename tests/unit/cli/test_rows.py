"""``stagetap rows``: which samples it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagetap.cli.rows import samples_of
from stagetap.errors import Refused
from store_samples import RUN, Engine


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store")
    engine.committer.commit(engine.publish(engine.ref("s"), 9))
    engine.close()
    store = str(tmp_path / "store")
    assert len(samples_of(store, None)) == len(samples_of(store, RUN)) == 1
    with pytest.raises(Refused, match=f"has no run 'zzz'; it has {RUN}"):
        samples_of(store, "zzz")

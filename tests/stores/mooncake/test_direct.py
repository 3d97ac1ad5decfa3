"""Fragments that a real store takes from pages, and what a master that hangs does to them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
import torch

from mooncake_run import Run
from stagetap.engine.pages import page_pieces, page_reader, spanned_memory
from stagetap.publish.publisher import FragmentJob, Publisher
from stagetap.reader.dataset import read_sample
from stagetap.stores.base import SampleRef
from stagetap.stores.mooncake_client import MooncakeClient
from stagetap.stores.mooncake_processes import Master
from stagetap.stores.mooncake_writer import MooncakeStoreWriter
from store_samples import drain, manifest, owned, tapped, token_ids

HIDDEN = 1024
WHAT = tapped(layer_ids=(2, 4), pp_layers=((0, 6),), hidden_size=HIDDEN)
BLOCK = 16
SLOT_BYTES = 1 << 18


class Stage:
    """A tap cache of 40 pages, and what publishes from it."""

    def __init__(self, client: MooncakeClient, run: str) -> None:
        torch.manual_seed(3)
        self.pages = torch.randn(40, BLOCK, 2, HIDDEN).to(torch.bfloat16)
        store = MooncakeStoreWriter(client, run, room_timeout_s=1)
        self.publisher = Publisher(
            store, slots=2, slot_bytes=SLOT_BYTES, writer_threads=2, refuse_nonfinite=True
        )
        store.use_memory(spanned_memory(self.pages))
        self.run = run

    def job(self, sample_id: str, block_ids: list[int], tokens: int, direct: bool) -> FragmentJob:
        return FragmentJob(
            ref=SampleRef(run_id=self.run, sample_id=sample_id, attempt="a"),
            stage=0,
            layers=owned(WHAT, 0),
            dtype=torch.bfloat16,
            shape=(tokens, 2, HIDDEN),
            token_ids=token_ids(tokens),
            gather=page_reader(self.pages, block_ids),
            pieces=page_pieces(self.pages, block_ids) if direct else None,
        )

    def rows(self, block_ids: list[int], tokens: int) -> torch.Tensor:
        return self.pages[block_ids].flatten(0, 1)[:tokens]


@pytest.fixture
def run(master: Master, writer: MooncakeClient, reader: MooncakeClient) -> Run:
    return Run(master, (writer, reader), what=WHAT)


@pytest.fixture
def stage(writer: MooncakeClient, run: Run) -> Iterator[Stage]:
    stage = Stage(writer, run.name)
    yield stage
    assert stage.publisher.shutdown(10) == []
    writer.remove(run.keys(), force=True)


# As an engine gives pages when it is new, and after some use.
@pytest.mark.parametrize("block_ids", [range(3, 36), [*range(20, 37), *range(1, 17)]])
@pytest.mark.parametrize("tokens", [512, 519])
def test_pages_and_slots_give_the_same_sample(
    run: Run, stage: Stage, block_ids: list[int], tokens: int
) -> None:
    made = {}
    for name, direct in (("direct", True), ("staged", False)):
        stage.publisher.submit(stage.job(name, list(block_ids), tokens, direct))
        (report,) = drain(stage.publisher, 1)
        assert report.fragment is not None, report.error
        made[name] = report.fragment
    assert made["direct"].checksum == made["staged"].checksum
    assert made["direct"].parts == (), "one object, put together from pieces of pages"
    assert len(made["staged"].parts) == -(-tokens // 64)
    dataset = run.dataset()
    for name, fragment in made.items():
        ref = SampleRef(run_id=run.name, sample_id=name, attempt="a")
        sample = read_sample(dataset._reader, manifest(WHAT, ref, [fragment], tokens), True)
        assert torch.equal(sample.hidden_states, stage.rows(list(block_ids), tokens))
        assert sample.input_ids.tolist() == token_ids(tokens).tolist()


def test_scattered_pages_go_through_slots(run: Run, stage: Stage) -> None:
    block_ids = [7, 3, 30, 12, 9, 1]
    stage.publisher.submit(stage.job("s", block_ids, 90, True))
    (report,) = drain(stage.publisher, 1)
    assert report.fragment is not None, report.error
    assert len(report.fragment.parts) == 2
    ref = SampleRef(run_id=run.name, sample_id="s", attempt="a")
    made = manifest(WHAT, ref, [report.fragment], 90)
    sample = read_sample(run.dataset()._reader, made, True)
    assert torch.equal(sample.hidden_states, stage.rows(block_ids, 90))


def test_a_master_that_hangs_keeps_pages_until_the_put_returns(
    own_master: Master, connect: object
) -> None:
    """It is given up after half a second, and goes on: only what it reads is still held."""
    hasty = "global_segment_size=32MiB&local_buffer_size=4MiB&put_timeout=500ms&rpc_timeout=3"
    client = connect(own_master, "writer", hasty)  # type: ignore[operator]
    stage = Stage(client, "run")
    own_master._child.send_signal(signal.SIGSTOP)
    try:
        stage.publisher.submit(stage.job("s", list(range(1, 33)), 512, True))
        time.sleep(0.3)
        ref = SampleRef(run_id="run", sample_id="s", attempt="a")
        stage.publisher.cancel(ref)
        staged, reports = [], []
        deadline = time.monotonic() + 20
        while not reports:
            assert time.monotonic() < deadline
            progress = stage.publisher.poll()
            staged += progress.staged
            reports += progress.reports
            time.sleep(0.01)
    finally:
        own_master._child.send_signal(signal.SIGCONT)
    assert staged == [ref]
    assert reports[0].fragment is None
    stage.publisher.shutdown(10)

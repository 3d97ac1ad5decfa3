"""Both sides of a Mooncake store, on objects in memory."""

from stagetap.reader.dataset import HiddenStatesDataset
from stagetap.reader.order import CommitOrder
from stagetap.stores.base import SampleRef
from stagetap.stores.mooncake_committer import MooncakeStoreCommitter
from stagetap.stores.mooncake_layout import MARK_EVERY
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from stagetap.stores.mooncake_writer import MooncakeStoreWriter
from store_samples import RUN, Engine, drain, job
from unit.stores.memory_objects import Master, MemoryObjects


def make_engine(master: Master, **changes: object) -> Engine:
    run = str(changes.get("run", RUN))
    committer = MooncakeStoreCommitter(MemoryObjects(master), run, 0.2)
    writer = MooncakeStoreWriter(MemoryObjects(master), run, room_timeout_s=0.2)
    return Engine((committer, writer), **changes)  # type: ignore[arg-type]


def objects_of(engine: Engine) -> MemoryObjects:
    assert isinstance(engine.committer, MooncakeStoreCommitter)
    assert isinstance(engine.committer._objects, MemoryObjects)
    return engine.committer._objects


def reader_of(master: Master, run: str = RUN, lease_wait_s: float = 1.0) -> MooncakeStoreReader:
    return MooncakeStoreReader(
        lambda: MemoryObjects(master), run, lease_wait_s=lease_wait_s, force_remove=False
    )


def dataset_of(master: Master, verify: bool | None = True) -> HiddenStatesDataset:
    dataset = HiddenStatesDataset(reader_of(master), CommitOrder(), verify=verify)
    dataset.refresh()
    return dataset


def sample_keys(master: Master) -> list[str]:
    """All but what a run keeps for itself."""
    return [
        key
        for key in master.objects
        if not key.endswith("/stagetap.json") and "/writers/" not in key and ".mark" not in key
    ]


def errors_of(engine: Engine, ref: SampleRef, tokens: int) -> list[str]:
    """Publish what cannot be published; why, by every stage."""
    for stage in (0, 1):
        engine.publisher.submit(job(engine.tapped, ref, stage, tokens))
    return [report.error or "" for report in drain(engine.publisher, 2)]


def with_one_far_sample(master: Master) -> Engine:
    """An engine whose sample `last` lies behind the pages of many that are consumed."""
    engine = make_engine(master)
    names = [f"s{number}" for number in range(4 * MARK_EVERY + 59)]
    for name in (*names, "last"):
        engine.export(name, tokens=1)
    dataset = dataset_of(master)
    for name in names:
        dataset.delete(name)
    return engine


def flip(data: bytes, position: int = 0) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)

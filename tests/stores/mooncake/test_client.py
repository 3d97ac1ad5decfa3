"""What a client does on a store that is well, and how it says no."""

from __future__ import annotations

import multiprocessing
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stagetap.errors import Refused, StoreError
from stagetap.stores import mooncake_client
from stagetap.stores.mooncake_client import PROTOCOL_KEY, MooncakeClient, open_client
from stagetap.stores.mooncake_objects import ABANDONED_SECONDS, Placed, StoreFull, create
from stagetap.stores.mooncake_processes import Master, MemoryHost
from stagetap.stores.mooncake_records import seal
from stagetap.stores.mooncake_status import StatusError
from stagetap.stores.mooncake_uri import MooncakeOptions, parse_uri

MIB = 1024**2
OpenClient = Callable[..., MooncakeClient]


@pytest.fixture
def key() -> str:
    """A key that nobody else uses."""
    return f"test/{uuid.uuid4().hex}"


def random_bytes(size: int) -> np.ndarray:
    """uint8 [size]."""
    return np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)


def test_bytes_travel_between_two_clients(
    writer: MooncakeClient, reader: MooncakeClient, key: str
) -> None:
    data = random_bytes(MIB).tobytes()
    assert reader.get(key) is None
    assert reader.size(key) is None
    writer.put(key, data)
    assert reader.get(key) == data
    assert reader.size(key) == MIB
    assert reader.exist([key, key + "x"]) == [True, False]
    assert reader.exist([]) == []


@pytest.mark.full
def test_what_somebody_died_putting_can_be_put_in_the_end(
    writer: MooncakeClient, reader: MooncakeClient, key: str
) -> None:
    """As a claim of a consumer that was killed: the others wait, and go on."""
    assert writer._store.batch_put_session_start([key], [100], writer._config()) == [0]
    record = seal(key, b"ours")
    with pytest.raises(StoreError, match="another process began to put it and has not ended"):
        create(reader, key, record, others_s=1.0)
    assert create(reader, key, record, others_s=ABANDONED_SECONDS) == record


def test_registered_memory_travels_whole_and_in_pieces(
    writer: MooncakeClient, reader: MooncakeClient, key: str
) -> None:
    rows = random_bytes(6 * MIB)  # larger than local_buffer_size
    place = np.zeros(8 * MIB, np.uint8)
    start, end = rows.ctypes.data, place.ctypes.data
    writer.register(start, rows.nbytes, rows)
    reader.register(end, place.nbytes, place)
    writer.put_from([Placed(key, ((start, rows.nbytes),))])
    writer.put_from([Placed(key + "a", ((start + MIB, 100), (start, 50)))])
    found = reader.get_into(
        [key, key + "a", key + "b"], [end, end + 7 * MIB, end], [6 * MIB, 150, 1]
    )
    assert found == [6 * MIB, 150, None]
    assert (place[: 6 * MIB] == rows).all()
    assert (place[7 * MIB : 7 * MIB + 100] == rows[MIB : MIB + 100]).all()
    assert (place[7 * MIB + 100 : 7 * MIB + 150] == rows[:50]).all()
    with pytest.raises(StoreError, match="do not fit local_buffer_size"):
        reader.get(key)
    writer.unregister(start)
    reader.unregister(end)


def test_the_first_put_wins(writer: MooncakeClient, key: str) -> None:
    """Mooncake says that the second one went well."""
    writer.put(key, b"first")
    writer.put(key, b"second")
    assert writer.get(key) == b"first"


def test_a_leased_object_stays_until_the_lease_ends_unless_forced(
    writer: MooncakeClient, reader: MooncakeClient, key: str
) -> None:
    for each in (key, key + "2"):
        writer.put(each, b"x")
        assert reader.get(each) == b"x"
    assert writer.remove([key, key + "none"]) == [key]
    assert writer.remove([key + "2"], force=True) == []
    time.sleep(0.6)
    assert writer.remove([key]) == []
    assert writer.remove([key]) == [], "removing twice is no error"
    assert writer.remove([]) == []
    assert reader.get(key) is None


def test_what_cannot_be_stored_is_said_before_it_is_tried(writer: MooncakeClient, key: str) -> None:
    with pytest.raises(StoreError, match="an object cannot be empty"):
        writer.put(key, b"")
    with pytest.raises(StoreError, match="do not fit local_buffer_size"):
        writer.put(key, bytes(5 * MIB))
    assert writer.get(key) is None


def test_a_place_that_is_too_small_is_not_written(
    writer: MooncakeClient, reader: MooncakeClient, key: str
) -> None:
    writer.put(key, b"0123456789")
    place = np.zeros(4096, np.uint8)
    reader.register(place.ctypes.data, place.nbytes, place)
    with pytest.raises(StatusError, match=f"get {key} .*status -600") as error:
        reader.get_into([key], [place.ctypes.data], [9])
    reader.unregister(place.ctypes.data)
    assert error.value.code == -600
    assert error.value.path == key
    assert not place.any()


def test_memory_is_registered_once(writer: MooncakeClient) -> None:
    memory = np.zeros(4096, np.uint8)
    writer.register(memory.ctypes.data, memory.nbytes)
    with pytest.raises(StatusError, match="register memory"):
        writer.register(memory.ctypes.data, memory.nbytes)
    writer.unregister(memory.ctypes.data)
    with pytest.raises(StatusError, match="unregister memory"):
        writer.unregister(memory.ctypes.data)


def test_fewer_copies_than_asked_for_are_no_success(
    own_master: Master, connect: OpenClient
) -> None:
    """Mooncake would say that all went well."""
    connect(own_master)
    two = connect(own_master, "reader", "replicas=2")
    with pytest.raises(StoreError, match=r"put k: 1 of 2 copies.*lower replicas"):
        two.put("k", b"x")
    connect(own_master)
    two.put("k2", b"x")


def test_a_full_store_says_so_and_hard_pins_hold(own_master: Master, connect: OpenClient) -> None:
    writer = connect(own_master)
    rows = random_bytes(4 * MIB)
    writer.register(rows.ctypes.data, rows.nbytes, rows)
    stored = []
    with pytest.raises(StoreFull, match=r"no segment has room.*status -200"):  # noqa: PT012
        for number in range(20):
            writer.put_from([Placed(f"k{number}", ((rows.ctypes.data, rows.nbytes),))])
            stored.append(f"k{number}")
    time.sleep(1)  # Evicting runs in the background, and leases have ended.
    assert len(stored) >= 6
    assert all(writer.exist(stored))
    writer.remove(stored[:2], force=True)
    writer.put_from([Placed("again", ((rows.ctypes.data, rows.nbytes),))])
    connect(own_master, "writer")  # A full store is no reason not to start.


def test_without_memory_no_writer_starts(own_master: Master, connect: OpenClient) -> None:
    with pytest.raises(StoreError, match="nobody lends it memory"):
        connect(own_master, "writer", "global_segment_size=0")
    connect(own_master, "reader")


def test_a_host_of_memory_keeps_what_a_writer_that_is_gone_stored(
    own_master: Master, connect: OpenClient
) -> None:
    with MemoryHost(own_master.address, 32 * MIB):
        wait_for_memory(own_master)
        writer = connect(own_master, "writer", "global_segment_size=0")
        writer.put("kept", b"x" * 1000)
        writer.close()
        assert connect(own_master, "reader").get("kept") == b"x" * 1000


def wait_for_memory(master: Master) -> None:
    """Until somebody lends some."""
    options = parse_uri(f"mooncake://{master.address}?global_segment_size=0")
    for _ in range(100):
        try:
            return open_client(options, "writer").close()
        except StoreError:
            time.sleep(0.1)
    raise AssertionError("nobody lends memory")


def test_what_a_closed_writer_lent_is_gone(own_master: Master, connect: OpenClient) -> None:
    writer = connect(own_master)
    writer.put("k", b"x")
    reader = connect(own_master, "reader")
    assert reader.get("k") == b"x"
    writer.close()
    writer.close()
    assert reader.get("k") is None
    with pytest.raises(StoreError, match="this connection is closed"):
        writer.put("k", b"x")


def test_another_protocol_is_refused(own_master: Master, connect: OpenClient) -> None:
    first = connect(own_master)
    assert first.get(PROTOCOL_KEY) == seal(PROTOCOL_KEY, b"tcp")
    first.remove([PROTOCOL_KEY], force=True)
    first.put(PROTOCOL_KEY, seal(PROTOCOL_KEY, b"rdma"))
    for role in ("writer", "reader"):
        with pytest.raises(Refused, match="others use protocol=rdma and this address says"):
            connect(own_master, role)


def test_a_damaged_protocol_keeps_nobody_out(
    own_master: Master, connect: OpenClient, caplog: pytest.LogCaptureFixture
) -> None:
    first = connect(own_master)
    first.remove([PROTOCOL_KEY], force=True)
    damaged = b"7" * len(seal(PROTOCOL_KEY, b"tcp"))
    first.put(PROTOCOL_KEY, damaged)
    connect(own_master, "reader")
    assert first.get(PROTOCOL_KEY) == damaged
    assert "stagetap.protocol is damaged" in caplog.text
    connect(own_master)
    assert first.get(PROTOCOL_KEY) == seal(PROTOCOL_KEY, b"tcp")


def test_rdma_needs_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake would say that all is well, and use something else."""
    monkeypatch.setattr(mooncake_client, "_RDMA_DEVICES", tmp_path)
    rdma = MooncakeOptions(master="127.0.0.1:1", protocol="rdma", device_names=("mlx5_9",))
    with pytest.raises(Refused, match="this machine has no RDMA device: use protocol=tcp"):
        open_client(rdma, "reader")
    (tmp_path / "mlx5_0").mkdir()
    with pytest.raises(Refused, match="no RDMA device 'mlx5_9' here; there are mlx5_0"):
        open_client(rdma, "reader")


def test_a_client_does_not_survive_a_fork(writer: MooncakeClient, key: str) -> None:
    """Its threads are not there: a call would wait for them."""
    writer.put(key, b"x")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        try:
            writer.get(key)
        except StoreError as error:
            answers.put(str(error))

    process = context.Process(target=child)
    process.start()
    assert "opened before a fork" in answers.get()
    process.kill()
    process.join()

"""Opens the sides of a Mooncake store, each with the connection that its role needs."""

import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

from stagetap.errors import Refused, StoreError
from stagetap.stores.base import Invariant, KnownKind
from stagetap.stores.kind import check_known
from stagetap.stores.mooncake_client import MooncakeClient, check_machine, open_client
from stagetap.stores.mooncake_committer import MooncakeStoreCommitter
from stagetap.stores.mooncake_layout import invariant_key
from stagetap.stores.mooncake_objects import read
from stagetap.stores.mooncake_package import check_version
from stagetap.stores.mooncake_probe import probe_master
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from stagetap.stores.mooncake_records import decode_run
from stagetap.stores.mooncake_uri import MooncakeOptions, parse_uri
from stagetap.stores.mooncake_writer import MooncakeStoreWriter

_pid: int | None = None  # the process that has opened a reader's connection


def open_writer(uri: str) -> MooncakeStoreWriter:
    """The worker's side, proven writable; it lends memory. Raises Refused, StoreError."""
    options, run_id = _run_of(uri)
    return MooncakeStoreWriter(open_client(options, "writer"), run_id, options.space_wait)


def open_committer(uri: str) -> MooncakeStoreCommitter:
    """The scheduler's side. Raises Refused, StoreError."""
    options, run_id = _run_of(uri)
    return MooncakeStoreCommitter(open_client(options, "committer"), run_id, options.space_wait)


def open_reader(uri: str) -> MooncakeStoreReader:
    """The trainer's side. Raises Refused, ForeignStore when the run has not begun, StoreError."""
    options, run_id = _run_of(uri)
    return MooncakeStoreReader(
        partial(_connect_reader, options),
        run_id,
        lease_wait_s=options.lease_wait,
        force_remove=options.force_remove,
    )


def check_reachable(uri: str) -> None:
    """Raise Refused or StoreError unless an engine could use this store, as far as can be seen.

    Loads no Mooncake: its threads would not survive the fork of an engine.
    """
    options, _ = _run_of(uri)
    check_version()
    check_machine(options, "writer")
    probe_master(options.master, options.connect_timeout)


def check_run(uri: str, known: KnownKind) -> None:
    """Raise Refused when the run holds other data than an engine would write, or StoreError.

    Mooncake is loaded in a process of its own, see `check_reachable`.
    """
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            stored = process.submit(_stored_kind, uri).result()
    except BrokenProcessPool:
        raise StoreError(
            f"{uri}: the process that asked what the run holds has died, see what it wrote above; "
            "is there enough memory?"
        ) from None
    if stored is not None:
        check_known(stored, known, f"run {parse_uri(uri).run!r}", "another run")


def _stored_kind(uri: str) -> Invariant | None:
    """What the run holds; None when it has not begun. Raises Refused, StoreError."""
    options, run_id = _run_of(uri)
    client = open_client(options, "committer")
    try:
        key = invariant_key(run_id)
        data = read(client, key)
        return None if data is None else decode_run(key, data)
    finally:
        client.close()


def lent_bytes(uri: str, workers: int) -> int | None:
    """Bytes of samples that the memory lent by so many workers can hold.

    None when they lend nothing: what standalone clients lend is not known here.
    """
    options = parse_uri(uri)
    if not options.global_segment_size:
        return None
    return options.global_segment_size * workers // options.replicas


def _connect_reader(options: MooncakeOptions) -> MooncakeClient:
    """A reader's connection, in whichever process first uses it. Raises StoreError."""
    global _pid
    if _pid not in (None, os.getpid()):
        # Mooncake's threads are not there, and its locks may be held: it would hang.
        raise StoreError(
            "this process was forked from one that uses Mooncake, which cannot work: start "
            'DataLoader workers with multiprocessing_context="spawn", or read in one process'
        )
    _pid = os.getpid()
    return open_client(options, "reader")


def _run_of(uri: str) -> tuple[MooncakeOptions, str]:
    options = parse_uri(uri)
    if options.run is None:
        raise Refused(f"{uri} names no run: write mooncake://{options.master}/RUN")
    return options, options.run

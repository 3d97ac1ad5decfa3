"""Look at every byte of a store, and sweep what no commit names: a directory or a Mooncake run."""

import os
from collections.abc import Callable

from stagetap.errors import Refused
from stagetap.stores.mooncake_uri import is_mooncake
from stagetap.stores.verify_report import VerifyReport


def verify(
    uri: str | os.PathLike[str],
    *,
    checksums: bool = True,
    gc: bool = False,
    metrics: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check all samples of a store; with `gc`, remove what no commit names.

    `metrics`: `host:port` of a Mooncake master's own HTTP server, which alone can list keys.
    `progress(done, total)` is called after every sample. Raises ForeignStore, UnknownVersion,
    StoreError and Refused.
    """
    if is_mooncake(os.fspath(uri)):
        from stagetap.stores.mooncake_open import open_reader
        from stagetap.stores.mooncake_verify import listing, verify_run

        if gc and metrics is None:
            raise Refused(
                f"{uri}: a client of Mooncake cannot list keys, so what is left over is not known: "
                "add --metrics HOST:PORT of the master, which `stagetap store up` prints"
            )
        reader = open_reader(os.fspath(uri))
        try:
            list_keys = None if metrics is None else listing(metrics)
            return verify_run(reader, list_keys, checksums=checksums, gc=gc, progress=progress)
        finally:
            reader.close()
    if metrics is not None:
        raise Refused(f"{uri} is a directory: --metrics is for Mooncake alone")
    from stagetap.stores.file_verify import verify_store

    return verify_store(uri, checksums=checksums, gc=gc, progress=progress)

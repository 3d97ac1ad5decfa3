"""What a fragment says of its bytes, so that a reader can tell that they are the same."""

from typing import Literal

import xxhash

from stagetap.manifest import NO_CHECKSUM

ChecksumName = Literal["xxh3_64", "none"]


class Checksum:
    """Taken over pieces of memory, one after the other; as text it is what the manifest holds."""

    def __init__(self, name: ChecksumName) -> None:
        self._running = None if name == "none" else xxhash.xxh3_64()

    def update(self, data: memoryview) -> None:
        """Take in what comes next."""
        if self._running is not None:
            self._running.update(data)

    def __str__(self) -> str:
        if self._running is None:
            return NO_CHECKSUM
        return f"xxh3_64:{self._running.hexdigest()}"

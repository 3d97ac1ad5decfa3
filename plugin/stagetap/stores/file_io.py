"""The few file operations the file store is made of, each naming what it failed on.

What must survive a power cut is fsynced here and nowhere else, so that the order in which things
become durable can be read in one place.
"""

import errno
import fcntl
import os
import uuid
from types import TracebackType

from stagetap.errors import StoreError

# Names with this prefix are half-written things; readers do not see them and gc sweeps them.
SCRATCH_PREFIX = ".stagetap."

_MKDIR_TRIES = 10

_CURES = {
    errno.ENOSPC: "free some space or choose a directory on another disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f) or choose another file system",
    errno.EDQUOT: "raise the quota or choose a directory on another disk",
    errno.EROFS: "choose a directory on a file system that is mounted writable",
    errno.EACCES: "give this user the right to it or choose another directory",
    errno.EPERM: "give this user the right to it or choose another directory",
    errno.ENOENT: "it was moved or removed while in use; put it back or start again elsewhere",
    errno.ESTALE: "it was moved or removed while in use; put it back or start again elsewhere",
    errno.ENOTDIR: "a part of this path is a file; choose another directory",
    errno.EISDIR: "a directory has this name; choose another one",
    errno.EEXIST: "something else has this name; choose another directory",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a directory with a shorter path",
    errno.ENOLCK: "choose a file system with locks, hard links and durable directories",
    errno.ENOSYS: "choose a file system with locks, hard links and durable directories",
    errno.EOPNOTSUPP: "choose a file system with locks, hard links and durable directories",
    errno.EINVAL: "choose a file system with locks, hard links and durable directories",
    errno.EIO: "check the disk, then choose another directory",
}


class naming:
    """Turn an OSError of the body into a StoreError that names path, bytes, errno and cure."""

    def __init__(self, action: str, path: str, size_bytes: int | None = None) -> None:
        self._action = action
        self._path = path
        self._size_bytes = size_bytes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):
            size = "" if self._size_bytes is None else f" ({self._size_bytes} bytes)"
            name = errno.errorcode.get(error.errno or 0, "unknown error")
            reason = error.strerror or error
            cure = _CURES.get(error.errno or 0, "see the operating system's log")
            raise StoreError(
                f"cannot {self._action} {self._path}{size}: {reason} [{name}]: {cure}",
                path=self._path,
                size_bytes=self._size_bytes,
            ) from error


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte; the kernel may take fewer at a time. Raises OSError."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(fd, rest) :]


def scratch_path(directory: str, name: str) -> str:
    """A fresh name in `directory` for something that will be renamed once it is whole."""
    return os.path.join(directory, f"{SCRATCH_PREFIX}{name}.{uuid.uuid4().hex}")


def write_durably(path: str, data: bytes) -> None:
    """Put a small file in place whole and durable, or not at all. Raises StoreError."""
    directory, name = os.path.split(path)
    scratch = scratch_path(directory, name)
    with naming("write", path, len(data)):
        try:
            write_scratch(scratch, data)
            os.rename(scratch, path)
            fsync_directory(directory)
        except OSError:
            remove_if_there(scratch)
            raise


def write_scratch(scratch: str, data: bytes) -> None:
    """Create a file that must not exist yet, with durable content. Raises OSError."""
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_if_there(path: str) -> None:
    """Unlink; that it is gone already is what was wanted. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def listed(path: str) -> list[str]:
    """The names in a directory, sorted; none where there is no directory. Raises StoreError."""
    with naming("list", path):
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []


def remove_directory_if_empty(path: str) -> bool:
    """Whether `path` is gone now; one that is in use stays. Raises OSError."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def check_writable(path: str) -> None:
    """Raise StoreError where nothing can be made at or below this absolute path. Creates nothing.

    For the seconds before a long start; a full disk shows only once something is written.
    """
    there = path
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    with naming("write to", path):
        if not os.path.isdir(there):
            raise _os_error(errno.ENOTDIR)
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            raise _os_error(errno.EROFS)
        if not os.access(there, os.W_OK | os.X_OK):
            raise _os_error(errno.EACCES)


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def make_root(root: str) -> None:
    """Create the store's directory, durably, where there is none. Raises StoreError."""
    with naming("create the store's directory", root):
        if not os.path.isdir(root):
            os.makedirs(root, exist_ok=True)
            fsync_directory(os.path.dirname(root))


def make_below(root: str, relative_path: str) -> None:
    """Create directories below `root`, which must exist: one that was moved away does not return.

    Other processes create and remove the same directories meanwhile; they cannot win for ever.
    Raises StoreError.
    """
    path = os.path.join(root, relative_path)
    with naming("create", path):
        for tries_left in reversed(range(_MKDIR_TRIES)):
            try:
                directory = root
                for name in relative_path.split("/"):
                    directory = os.path.join(directory, name)
                    _make_directory(directory)
                return
            except FileNotFoundError:
                if not tries_left or not os.path.isdir(root):
                    raise


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def lock_exclusively(fd: int) -> None:
    """Lock an open file; the lock goes when the last copy of `fd` closes. Raises OSError."""
    fcntl.flock(fd, fcntl.LOCK_EX)


def try_lock(fd: int, exclusive: bool) -> bool:
    """Whether the lock was to be had at once. Raises OSError where the file system has no locks."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

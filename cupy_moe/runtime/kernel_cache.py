"""Files of compiled kernels: written atomically, verified on every read.

A file is the image (a cubin, so that disassemblers open it) followed by a trailer: a magic word and
the SHA-256 of the key and the image. Anything that does not verify is not there.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from functools import cache
from pathlib import Path

__all__ = ["cache_dir", "read_image", "write_image", "write_text"]

_MAGIC = b"CUPYMOE1"
_TRAILER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size


def cache_dir() -> Path:
    """Folder of compiled kernels.

    ``CUPY_MOE_CACHE_DIR`` if set, else ``cupy_moe`` in ``XDG_CACHE_HOME``, else
    ``~/.cache/cupy_moe``; a folder of this user among the temporary files if there is no home.
    """
    chosen = os.environ.get("CUPY_MOE_CACHE_DIR")
    if chosen:
        return Path(chosen).absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return Path(tempfile.gettempdir()) / f"cupy_moe-{os.geteuid()}"
    return base / "cupy_moe"


def read_image(path: Path, key: str) -> bytes | None:
    """Image stored under `key`, or None.

    Missing, unreadable, truncated or otherwise altered files count as absent, and so do files of
    another user (root excepted), who could have put any code there.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid not in (os.geteuid(), 0):
                return None
            data = file.read()
    except OSError:
        return None
    image, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    return image if image and trailer == _trailer(key, image) else None


def write_image(path: Path, key: str, image: bytes) -> None:
    """Store an image under `key`; warns once a folder if that is not possible."""
    _write(path, image + _trailer(key, image))


def write_text(path: Path, text: str) -> bool:
    """Store a text file beside the images; whether that was possible."""
    return _write(path, text.encode())


def _trailer(key: str, image: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + b"\0" + image).digest()


def _write(path: Path, data: bytes) -> bool:
    """Write a temporary file and rename it: readers see all of it or nothing."""
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _warn_once(path.parent, error.strerror or str(error))
        return False
    return True


@cache
def _warn_once(folder: Path, reason: str) -> None:
    warnings.warn(
        f"cupy_moe cannot store compiled kernels in {folder} ({reason}); every process compiles "
        "them again. Set CUPY_MOE_CACHE_DIR to a folder of yours.",
        RuntimeWarning,
        stacklevel=2,
    )

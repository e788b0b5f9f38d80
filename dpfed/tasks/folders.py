"""Where data sets lie, and how their files are read: bounded, never executed, every complaint with a name and a remedy."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import IO, NamedTuple

from dpfed.errors import InputError

GZ = "[.gz]"  # behind a file's name: plain or compressed


class DataSet(NamedTuple):
    """What a data set looks like on a disk, in the layout in which it is handed out."""

    name: str
    folders: tuple[str, ...]
    files: tuple[str, ...]
    source: str

    def find(self, root: str | Path | None = None) -> Path:
        """Its folder under the root; or a refusal that says what is missing, where it should lie and where to get it."""
        top = data_root(root)
        complete = [top / folder for folder in self.folders if not self._missing(top / folder)]
        if complete:
            return complete[0]
        begun = [folder for folder in self.folders if len(self._missing(top / folder)) < len(self.files)]
        folder = (begun or list(self.folders))[0]
        missing = ", ".join(f"{folder}/{file}" for file in self._missing(top / folder))
        also = ", ".join(f"{other}/" for other in self.folders if other != folder)
        raise InputError(
            f"{self.name}: not complete under {top}{'' if root is not None else ' (DPFED_DATA)'}; missing {missing}"
            + (f" (the folder may also be {also})" if also else "")
            + f". Get it from {self.source}, put it there, or set DPFED_DATA to the folder that holds it."
        )

    def is_there(self, root: str | Path | None = None) -> bool:
        return any(not self._missing(data_root(root) / folder) for folder in self.folders)

    def _missing(self, folder: Path) -> list[str]:
        return [file for file in self.files if not plain_or_gz(folder, file).exists()]


def data_root(root: str | Path | None = None) -> Path:
    """The folder under which data sets are looked for: as given, or DPFED_DATA, or ``data`` here."""
    return Path(root if root is not None else os.environ.get("DPFED_DATA", "data")).expanduser()


def plain_or_gz(folder: Path, file: str) -> Path:
    plain = folder / file.removesuffix(GZ)
    return plain.with_name(plain.name + ".gz") if file.endswith(GZ) and not plain.exists() else plain


def read_bytes(path: Path, at_most: int) -> bytes:
    """A file's content, unzipped where it ends in .gz. What is larger than such a file can be is not read."""
    if not path.is_file():
        raise InputError(f"{path}: {'is no file' if path.exists() else 'there is no such file'}. Put the file there.")
    try:
        with path.open("rb") as file:
            data = _some(gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file, at_most)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: is damaged ({error}). Get the file again.") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Check its permissions and the disk.") from error
    if data is None:
        raise InputError(f"{path}: holds more than {at_most:,} bytes, which this kind of file never does. Get it again.")
    if not data:
        raise InputError(f"{path}: is empty. Get the file again.")
    return data


def _some(file: IO[bytes] | gzip.GzipFile, at_most: int) -> bytes | None:
    """Everything, piece by piece; None as soon as it is more than it may be."""
    pieces, left = list[bytes](), at_most
    while left >= 0 and (piece := file.read(2**22)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces) if left >= 0 else None


def read_text(path: Path, at_most: int = 2**31) -> str:
    """A UTF-8 file (a byte order mark is dropped)."""
    data = read_bytes(path, at_most)
    if (at := data.find(b"\0")) >= 0:
        line = data[:at].count(b"\n") + 1
        raise InputError(f"{path}, line {line}: holds a zero byte, so it is not text. Get it again.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{path}, line {line}: is not UTF-8 ({error.reason}). Save the file as UTF-8.") from error


def inner_name(name: str, where: str) -> str:
    """A file's or folder's name that a file mentions, refused where it would lead out of the folder."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise InputError(f"{where}: {name!r} is not the plain name of a file in this folder. Correct the line.")
    return name


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, by number where all names are numbers, else by name. Hidden ones do not count."""
    found = [path for path in _inside(folder) if path.is_dir() and not path.name.startswith(".")]
    numbered = all(path.name.isdecimal() for path in found)
    return sorted(found, key=lambda path: (int(path.name) if numbered else 0, path.name))


def files_of(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files in a folder that end in one of the suffixes, by name."""
    return sorted(p for p in _inside(folder) if p.suffix.lower() in suffixes and not p.name.startswith("."))


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed as a folder ({error.strerror}). Name a folder that is there.") from error

"""Pack a recipe's traces and predictions into one file: python scripts/pack_traces.py validate/traces/kinds ...

Each FOLDER becomes FOLDER.zip, with its files unchanged: same files, same bytes. Files of an existing set stay in it,
unless the folder has newer ones. The folder's files are removed once the set has been read back.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from gpusim.errors import FileError
from gpusim.io.files import read_file, write_bytes
from gpusim.io.packed import SUFFIX, files_in


def packed(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive of these files, uncompressed and without dates."""
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), data)
    return text.getvalue()


def pack(folder: Path) -> Path:
    """Write the set of a folder, remove the folder's own files, and return the set. Exits where it has none."""
    files = {path.name: read_file(path, FileError) for path in files_in(folder, ".json.gz")}
    if not files:
        raise SystemExit(f"{folder}: no .json.gz file, and no set of such")
    target = folder.with_name(folder.name + SUFFIX)
    write_bytes(target, packed(files))
    with zipfile.ZipFile(target) as archive:
        if {name: archive.read(name) for name in archive.namelist()} != files:
            raise SystemExit(f"{target}: its files did not come back as they were")
    for path in folder.glob("*.json.gz"):
        path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return target


def main(folders: list[str]) -> int:
    """Pack each folder."""
    if not folders:
        raise SystemExit(__doc__)
    for folder in folders:
        print(pack(Path(folder)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Write the JSON Schemas of gpusim's documents to gpusim/formats/schemas/, from their classes.

Run it after any change of a document's classes; tests/formats/test_schemas.py compares the files with them. With
--check nothing is written, and the exit status is 1 where a file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gpusim.formats.schemas import KINDS, schema_file, schema_text
from gpusim.io.files import write_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check one file per kind of document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the files are up to date")
    check = parser.parse_args(arguments).check
    status = 0
    for kind in KINDS:
        path, text = schema_file(kind), schema_text(kind)
        if not check:
            write_bytes(path, text)
            print(path)
        elif not path.is_file() or path.read_bytes() != text:
            print(f"{path} is out of date: run python scripts/make_schemas.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

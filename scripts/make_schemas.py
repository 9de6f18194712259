"""Write the JSON Schemas of gpusim's documents to gpusim/schemas/, from the classes: python scripts/make_schemas.py.

Run it after any change of a document's classes; tests/test_schemas.py holds the files to them.
"""

from __future__ import annotations

from gpusim.files import write_bytes
from gpusim.schemas import KINDS, schema_file, schema_text


def main() -> None:
    """Write one file for each kind of document."""
    for kind in KINDS:
        write_bytes(schema_file(kind), schema_text(kind))
        print(schema_file(kind))


if __name__ == "__main__":
    main()

"""What `gpusim app` runs: Streamlit on `Home.py`, and meanwhile what the first page needs.

A browser takes a second to load Streamlit's own page; until it asks for ours, the engine is loaded and the bundled
step that the first page shows is explored. Arguments are those of `streamlit run`, without the script.
"""

import sys
import threading
from pathlib import Path

from streamlit.web.cli import main


def prepare() -> None:
    """Into the caches that every session shares."""
    from gpusim_dashboard.ready import first_page

    first_page()


if __name__ == "__main__":
    threading.Thread(target=prepare, name="prepare", daemon=True).start()
    sys.argv = ["streamlit", "run", str(Path(__file__).with_name("Home.py")), *sys.argv[1:]]
    sys.exit(main(prog_name="streamlit"))

"""Program of `tests/gpu/test_layerwise.py` on each rank, without torch: `python -m tests.support.lost_rank WHAT`.

Nobody ends by itself; with `die`, rank 1 is killed after a warning.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings

if __name__ == "__main__":
    if sys.argv[1] == "die" and os.environ["RANK"] == "1":
        warnings.warn("this is no reason to end", FutureWarning, stacklevel=1)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

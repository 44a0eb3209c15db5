"""What every test shares: one thread, so that ranks and tests do not fight for the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

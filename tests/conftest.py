"""Settings for every test: one thread, so that tests beside each other do not fight for cores, and no limit of time on one hypothesis example."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

settings.register_profile("widepack", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("widepack")

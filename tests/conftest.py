"""Examples may take as long as a busy machine needs. In CI they are always the same, at a desk always new ones."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "patient",
    settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))),
)
settings.load_profile("patient")

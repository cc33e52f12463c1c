"""Examples may take as long as a busy machine needs."""

from hypothesis import HealthCheck, settings

settings.register_profile("patient", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow]))
settings.load_profile("patient")

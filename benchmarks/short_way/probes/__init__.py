"""Programs that measure one thing each and print figures: ``python -m benchmarks.short_way.probes.NAME '{...}'``."""

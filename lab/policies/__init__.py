"""Schedulers of published systems, one file each: see ``zico.scheduler.policies``."""

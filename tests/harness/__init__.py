"""Shared by tests: checkpoints, jobs, layouts, models, damage. Tests import no other module across folders."""

"""Connectors: an engine's words → ours, nothing else."""

"""Benchmarks. Each module runs alone (`python -m bench.NAME`) and prints what docs may quote."""

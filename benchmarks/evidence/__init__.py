"""The paper's claims on real images, with controls: `python -m benchmarks.evidence SUITE --data DIR`."""

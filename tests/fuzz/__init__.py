"""Random train steps, budgeted by vmem_jax and held against plain `jax.jit`.

`python -m tests.fuzz --help` runs it by the hour; `test_fuzz.py` is a minute of it for CI.
"""

VERSION = 5
"""Of the generator. A program is determined by this and a seed: raise it where a change to the layers
or to the order of draws makes another program of a seed."""

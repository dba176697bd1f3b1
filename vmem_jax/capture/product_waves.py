"""product_waves: how much of a card large matrix products leave idle.

A program of a product makes a tile of its result, and each multiprocessor of a card runs one at a
time. The last of these waves is rarely full: of 3,152 rows and 1,024 columns there are 200 tiles of
128 by 128, so that the second wave of an H200's 132 multiprocessors is half empty. Such products take
13.5 µs in a ViT-L's step, in the mean, where the rate of products would give 9.3. cuBLAS has tiles of
many shapes; here it takes the best of some.
"""

from __future__ import annotations

from vmem_jax.capture.product_workspaces import Size

_TILES = ((128, 128), (128, 160), (128, 192), (128, 256), (256, 128))
"""Rows and columns of what one program makes, of those that cuBLAS chooses most on an H200."""

_USUAL = 1.1
"""How many times longer products take for this whose rate `core.cards` has: large ones."""


def share(size: Size, cores: int) -> float:
    """The share of the rate of products that one reaches on `cores` multiprocessors; 1 where there
    are fewer tiles than those, whose sums are made in parts, and for batched ones."""
    if size.batch > 1 or not cores or _tiles(size, *_TILES[0]) < cores:
        return 1.0
    least = min(_longer(size, cores, *tile) for tile in _TILES)
    return min(1.0, _USUAL / least)


def _longer(size: Size, cores: int, rows: int, columns: int) -> float:
    """How many times longer a product takes than one that fills its tiles and its waves."""
    tiles = _tiles(size, rows, columns)
    filled = size.rows * size.columns / (rows * columns)
    return -(-tiles // cores) * cores / filled


def _tiles(size: Size, rows: int, columns: int) -> int:
    return -(-size.rows // rows) * -(-size.columns // columns)

"""The kinds of layers that programs are made of: one table, name → function."""

from .base import Draw, Dtypes, Layer, Maker
from .control import CONTROL
from .elementwise import ELEMENTWISE
from .indexing import INDEXING
from .products import PRODUCTS

LAYERS: dict[str, Maker] = {**PRODUCTS, **ELEMENTWISE, **INDEXING, **CONTROL}
"""A new kind of layer is a function and one entry in the table of its file."""

__all__ = ["LAYERS", "Draw", "Dtypes", "Layer", "Maker"]

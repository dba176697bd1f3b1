"""conv: micro-batched convolutions."""

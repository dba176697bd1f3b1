"""Attention in chunks of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vmem_jax.models.attention import chunked_attention


def heads(tokens):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = zip(keys, (4, 2, 2), strict=True)
    return [jax.random.normal(key, (2, tokens, count, 8)) for key, count in sizes]


def whole(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("chunk", [4, 64])
def test_it_is_attention_with_its_gradients(chunk):
    args = heads(16)
    loss = lambda attend: lambda *args: jnp.sum(jnp.sin(attend(*args)))
    chunked = lambda *args: chunked_attention(*args, chunk)
    np.testing.assert_allclose(chunked(*args), whole(*args), rtol=1e-5, atol=1e-5)
    found, expected = (jax.grad(loss(f), (0, 1, 2))(*args) for f in (chunked, whole))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_no_value_has_the_square_of_the_tokens():
    args = [jax.ShapeDtypeStruct((1, 4096, count, 8), jnp.bfloat16) for count in (4, 2, 2)]
    loss = lambda *args: chunked_attention(*args, 256).astype(jnp.float32).sum()
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096**2 * 4


def test_tokens_that_are_no_multiple_of_a_chunk_are_refused():
    args = [jax.ShapeDtypeStruct((1, 12, 2, 8), jnp.float32)] * 3
    with pytest.raises(ValueError, match="multiple"):
        jax.eval_shape(lambda *args: chunked_attention(*args, 8), *args)

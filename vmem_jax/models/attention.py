"""Causal attention in chunks, whose memory grows with the tokens and not with their square.

Rabe & Staats, "Self-attention does not need O(n²) memory" (2021): a scan over chunks of queries, in
each a scan over chunks of keys and values that carries the largest score, the sum of the exponentials
and the weighted sum of the values. The backward pass computes the scores of a chunk again.
"""

import jax
import jax.numpy as jnp


def chunked_attention(q: jax.Array, k: jax.Array, v: jax.Array, chunk: int = 1024) -> jax.Array:
    """Attention of each token to itself and those before it, as `jax.nn.dot_product_attention`.

    Scores and sums are float32. Chunks of later keys are computed, too, and masked.

    Args:
      q: [n, t, heads, size].
      k, v: [n, t, kv_heads, size]; `heads` is a multiple of `kv_heads`.
      chunk: tokens of a chunk; `t` is a multiple of it, or less.

    Returns:
      [n, t, heads, size].

    Raises:
      ValueError: `t` is no multiple of the chunk.
    """
    n, t, heads, size = q.shape
    chunk = min(chunk, t)
    if t % chunk:
        raise ValueError(f"{t} tokens are no multiple of a chunk of {chunk}.")
    chunks = lambda x: jnp.moveaxis(x.reshape(n, t // chunk, chunk, *x.shape[2:]), 1, 0)
    groups = (k.shape[2], heads // k.shape[2])
    given = (jnp.arange(t).reshape(-1, chunk), chunks(k), chunks(v))

    @jax.checkpoint
    def of_queries(nothing: None, queries: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        at, q = queries
        q = q.reshape(n, chunk, *groups, size) * jnp.asarray(size**-0.5, q.dtype)

        @jax.checkpoint
        def of_keys(
            carry: tuple[jax.Array, ...], keys: tuple[jax.Array, ...]
        ) -> tuple[tuple[jax.Array, ...], None]:
            top, total, found = carry
            place, k, v = keys
            scores = jnp.einsum("nqhgd,nkhd->nhgqk", q, k, preferred_element_type=jnp.float32)
            scores = jnp.where(at[:, None] >= place, scores, -1e30)
            new = jnp.maximum(top, scores.max(-1))
            weights, scale = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
            seen = jnp.einsum(
                "nhgqk,nkhd->nhgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
            )
            found = found * scale[..., None] + seen
            return (new, total * scale + weights.sum(-1), found), None

        shape = (n, *groups, chunk)
        begun = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, size)))
        _, total, found = jax.lax.scan(of_keys, begun, given)[0]
        found = (found / total[..., None]).astype(v.dtype)
        return nothing, jnp.moveaxis(found, 3, 1).reshape(n, chunk, heads, size)

    out = jax.lax.scan(of_queries, None, (given[0], chunks(q)))[1]
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)

"""What to say of a prompt that can never run: only advice that can be followed. Knows nothing of torch."""

from __future__ import annotations


def too_long(num_tokens: int, max_model_len: int, model_limit: int, num_blocks: int, block_size: int) -> str:
    """A sentence on a prompt of ``num_tokens``, none of whose answer's tokens would fit ``max_model_len``.

    Args:
        model_limit: longest prompt plus answer that the model itself allows, in tokens.
        num_blocks: of the KV cache, each with ``block_size`` tokens.
    """
    needed, capacity = num_tokens + 1, num_blocks * block_size
    options, hint = [], ""
    if needed > model_limit:
        hint = f": this model takes no more than {model_limit - 1:,}"
    elif needed > capacity:
        options.append(f"--kv-blocks {-(-needed // block_size)} or more")
        hint = " (should memory lack for that, close other programs)"
    if needed <= model_limit and max_model_len < min(model_limit, capacity):
        options.append(f"--max-model-len {needed} or more")
    choice = f", or start with {' and '.join(options)}" if options else ""
    return (
        f"The prompt has {num_tokens:,} tokens but at most {max_model_len - 1:,} fit; "
        f"shorten it{choice}{hint}."
    )

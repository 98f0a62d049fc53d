"""How much memory keys and values may take, and how it is used.

Owns the step from a budget in bytes to a number of blocks. Knows no requests.
"""

from dataclasses import dataclass

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded.blocks import BLOCK_TOKENS, BlockPool
from hotpot.engine.embedded.memory import ContextMemory, num_blocks_of
from hotpot.engine.embedded.passes import Passes
from hotpot.engine.embedded.store import BlockStore, block_bytes
from hotpot.errors import EngineError

_SHARED_BYTES = 128 * 1024
"""Of one layer's keys and values: from here on a beginning that others read is read with them and not copied. Below it the
extra product in attention costs more than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """How the memory for keys and values is used: bytes allowed and reserved; blocks there are, read by running requests, kept
    for later ones; blocks taken from those kept, so far.
    """

    budget_bytes: int
    reserved_bytes: int
    num_blocks: int
    read_blocks: int
    kept_blocks: int
    evictions: int


def make_memory(
    passes: Passes, settings: EngineSection, max_context_tokens: int, *, root: str
) -> ContextMemory:
    """Return tables over as many blocks as ``settings.kv_cache_bytes`` hold, and give ``passes`` the store for them.

    Raises :class:`EngineError` where one context of ``max_context_tokens`` does not fit.
    """
    longest, size = num_blocks_of(max_context_tokens), block_bytes(passes.shapes)
    # What remembers nothing needs no memory: blocks are a formality then, and there are enough for every row to grow.
    count = settings.kv_cache_bytes // size if size else settings.max_concurrency * (longest + 1)
    if count < longest:
        raise EngineError(
            f"engine.kv_cache_bytes = {settings.kv_cache_bytes} holds {count * BLOCK_TOKENS} tokens of keys and values, and "
            f"one context may have {max_context_tokens}: give at least {longest * size}, or lower rollout.max_context_tokens"
        )
    passes.store = BlockStore(passes.shapes, count)
    layer = size // max(len(passes.shapes), 1)
    return ContextMemory(
        num_rows=settings.max_concurrency,
        num_blocks=count,
        max_tokens=max_context_tokens,
        share_from=max(2, _SHARED_BYTES // max(layer, 1)),
        root=root,
        remembers=passes.remembers,
    )


def usage_of(pool: BlockPool, store: BlockStore, budget_bytes: int) -> MemoryUsage:
    """Return how ``pool`` and ``store`` are used."""
    return MemoryUsage(
        budget_bytes=budget_bytes,
        reserved_bytes=store.num_bytes,
        num_blocks=pool.num_blocks,
        read_blocks=pool.num_read,
        kept_blocks=pool.num_idle,
        evictions=pool.evictions,
    )

"""What a module of transformers can do, measured on a few tokens when it is loaded.

Owns the questions and their words. Must hold, or the model is refused: hidden states and the head give the module's own
logits; a token's hidden state depends on no later token, no padding and no other row. May hold: that masks and positions
are followed (``packs``), that keys and values of earlier tokens can be given (``caches``).

What a few tokens can't show is read from the configuration: a window shorter than the context would be lost where our
own mask takes the place of the module's, so such a model neither packs nor takes a cache.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hotpot.errors import ModelFilesError
from hotpot.models.policy import Policy
from hotpot.models.transformers_policy import TransformersPolicy

TOLERANCE = 1e-4
"""Largest relative difference taken for rounding: of the largest value, float32."""

_SHORT, _LONG = 5, 9

_REFUTES = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)
"""What a module raises when it is asked for what it does not do."""


@torch.no_grad()
def probe(policy: TransformersPolicy, *, source: str) -> None:
    """Set ``packs`` and ``caches`` of ``policy`` to what its module does.

    Raises :class:`ModelFilesError` where it can't be a policy at all, naming the architecture and what failed.
    """
    name = policy.config.architecture
    for wrong, holds in (
        ("logits from its hidden states are not those of its own forward pass", _head_is_its_own),
        ("what it says of a token changes with the tokens or the padding behind it", _is_causal),
    ):
        try:
            sound = holds(policy)
        except _REFUTES as error:
            raise ModelFilesError(
                f"{source}: {name} can't be a policy: {type(error).__name__}: {error}; choose another model"
            ) from error
        if not sound:
            raise ModelFilesError(f"{source}: {name} can't be a policy: {wrong}; choose another model")
    if not windowed(policy.module.config.to_dict()):
        policy.packs = _does(policy, _follows_masks)
        policy.caches = policy.packs and _does(policy, _takes_a_cache)


def windowed(config: Mapping[str, Any]) -> bool:
    """Whether attention of some layer reaches less far than the context, or a layer is no attention."""
    kinds = {kind for key, kind in _leaves(config) if key == "layer_types"}
    if kinds - {"full_attention"}:
        return True
    if config.get("use_sliding_window") is False:
        return False
    return any(
        isinstance(value, int) and not isinstance(value, bool) and value > 0
        for key, value in _leaves(config)
        if "window" in str(key) or "chunk" in str(key)
    )


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif isinstance(value, list | tuple):
            yield from ((key, one) for one in value if isinstance(one, str | int))
        else:
            yield key, value


def _does(policy: TransformersPolicy, holds: Callable[[TransformersPolicy], bool]) -> bool:
    try:
        return holds(policy)
    except _REFUTES:
        return False


def _tokens(policy: Policy, rows: int, length: int) -> Tensor:
    """Return token ids int64 ``[rows, length]``, all over the vocabulary."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    return torch.randint(policy.config.vocab_size, (rows, length), generator=generator)


def _alone(policy: Policy, tokens: Tensor) -> Tensor:
    """Return hidden states of rows int64 ``[B, T]`` that stand alone, float ``[B, T, hidden_size]``."""
    hidden: Tensor = policy(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    return hidden


def _same(one: Tensor, other: Tensor) -> bool:
    scale = float(other.abs().max()) or 1.0
    return one.shape == other.shape and float((one - other).abs().max()) <= TOLERANCE * scale


def _head_is_its_own(policy: TransformersPolicy) -> bool:
    tokens = _tokens(policy, 2, _LONG)
    own: Tensor = policy.module(input_ids=tokens, use_cache=False).logits
    found = policy.logits(_alone(policy, tokens))
    return found.shape[-1] == policy.config.vocab_size and _same(found, own.float())


def _is_causal(policy: TransformersPolicy) -> bool:
    tokens = _tokens(policy, 3, _LONG)
    padded = tokens.clone()
    padded[0, _SHORT:] = 0
    padded[1, _SHORT:] = tokens[2, _SHORT:]
    short = _alone(policy, tokens[:1, :_SHORT])
    crowd = _alone(policy, padded)
    other = _alone(policy, tokens)
    return (
        _same(crowd[:1, :_SHORT], short)
        and _same(crowd[1, :_SHORT], other[1, :_SHORT])
        and _same(crowd[2], other[2])
    )


def _follows_masks(policy: TransformersPolicy) -> bool:
    """Two sequences in one row, beside a row that is one and a half: each as it is alone."""
    first, second = _tokens(policy, 1, _SHORT), _tokens(policy, 1, _LONG)
    row = torch.cat([first, second], dim=1)
    starts = torch.tensor([0] * _SHORT + [_SHORT] * _LONG)
    columns = torch.arange(_SHORT + _LONG)
    attend = (columns <= columns[:, None]) & (columns >= starts[:, None])
    packed: Tensor = policy(row, (columns - starts)[None], attend=attend[None, None])
    expected = torch.cat([_alone(policy, first), _alone(policy, second)], dim=1)
    return _same(packed, expected)


def _takes_a_cache(policy: TransformersPolicy) -> bool:
    """Two rows that go on from pasts of other lengths: each as it is whole."""
    whole = _tokens(policy, 2, _LONG)
    past = _Slots(rows=2, capacity=_LONG + 2)
    ends = torch.tensor([_SHORT, _SHORT - 2])
    columns = torch.arange(_LONG + 2)
    early = torch.arange(_SHORT).expand(2, -1)
    policy(
        whole[:, :_SHORT],
        early,
        cache=past,
        rows=slice(0, 2),
        attend=(columns <= early[:, :, None])[:, None],
    )
    places = ends[:, None] + torch.arange(2)
    late: Tensor = policy(
        whole.gather(1, places),
        places,
        cache=past,
        rows=slice(0, 2),
        attend=(columns <= places[:, :, None])[:, None],
    )
    expected = _alone(policy, whole)
    return all(_same(late[row], expected[row, places[row]]) for row in range(2))


class _Slots:
    """Keys and values by row and position, as an engine keeps them."""

    def __init__(self, *, rows: int, capacity: int) -> None:
        self._rows, self._capacity = rows, capacity
        self._kept: dict[tuple[int, str], Tensor] = {}

    def write(
        self, layer: int, rows: slice | Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        del rows
        for name, new in (("keys", keys), ("values", values)):
            shape = (self._rows, new.shape[1], self._capacity, new.shape[3])
            store = self._kept.setdefault((layer, name), torch.zeros(shape))
            store[torch.arange(self._rows)[:, None], :, positions] = new.transpose(1, 2)

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        del rows
        return self._kept[layer, "keys"][:, :, :length], self._kept[layer, "values"][:, :, :length]

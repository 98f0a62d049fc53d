"""``stock_count``: how much of an item is free to sell. The declaration; the world is in ``world``."""

from hotpot.envs import EnvironmentSpec
from stock_count.world import (
    Clerk,
    StockCount,
    StockParams,
    held_apart,
    make,
    system_prompt,
    task,
    verify,
)

SPEC = EnvironmentSpec(
    name="stock_count",
    declared="1",
    params=StockParams,
    package=__name__,
    reward_package=f"{__name__}.reward",
    system_prompt=system_prompt,
    make=make,
    task=task,
    verify=verify,
    demonstrator=Clerk,
    held_apart=held_apart,
    runs_on=("pydantic",),
    reward_params=(),
)
"""What the entry point names."""

__all__ = ["SPEC", "StockCount", "StockParams"]

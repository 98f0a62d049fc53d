"""``order_desk``: a customer-service agent over a real SQLite database, through typed Python tools.

A customer orders an item; the agent finds the customer's id, reads the price agreed with *that* customer (which is
never the list price), calculates, and answers the total. Sparse reward: the total is right or not. With ``price_basis``
orders say ``at list price``, and then the list price is the right one.

``params`` shape of the tasks · ``catalogue`` data files and the split · ``tasks`` drawing and reading tasks ·
``database`` SQLite and the tools · ``arithmetic`` the calculator · ``environment`` the episode · ``demonstrator`` for
the warm start · ``reward`` the reward function, versioned apart
"""

from hotpot.envs.base import EnvironmentSpec
from hotpot.envs.order_desk.demonstrator import CarelessDemonstrator
from hotpot.envs.order_desk.environment import OrderDesk, make, system_prompt, task, verify
from hotpot.envs.order_desk.params import OrderDeskParams
from hotpot.envs.order_desk.tasks import NAME, held_apart

SPEC = EnvironmentSpec(
    name=NAME,
    declared="1",
    params=OrderDeskParams,
    package=__name__,
    reward_package=f"{__name__}.reward",
    system_prompt=system_prompt,
    make=make,
    task=task,
    verify=verify,
    demonstrator=CarelessDemonstrator,
    held_apart=held_apart,
    runs_on=("sqlite3", "pydantic"),
    prompt_file="system.txt",
    reward_params=(),
)
"""Declaration of the environment."""

__all__ = ["SPEC", "CarelessDemonstrator", "OrderDesk", "OrderDeskParams"]

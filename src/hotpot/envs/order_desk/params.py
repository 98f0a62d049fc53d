"""Parameters of ``order_desk``: the shape of its tasks and the habits of its demonstrator."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0, le=1)]


class OrderDeskParams(BaseModel):
    """Shape of the tasks, and how careless the demonstrator is."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_lines: Annotated[int, Field(ge=1, le=2)] = 1
    """Lines of an order: always one, or one or two."""
    min_quantity: Annotated[int, Field(ge=2, le=99)] = 2
    """Smallest quantity of a line."""
    max_quantity: Annotated[int, Field(ge=2, le=99)] = 9
    """Largest quantity of a line."""
    num_customers: Annotated[int, Field(ge=1, le=24)] = 4
    """Customers in the episode's database."""
    num_items: Annotated[int, Field(ge=2, le=24)] = 6
    """Items in the episode's database, each with a list price and a price for every customer."""
    id_digits: Annotated[int, Field(ge=3, le=4)] = 4
    """Digits of a customer's id, which is drawn anew for every task."""
    price_digits: Annotated[int, Field(ge=2, le=3)] = 2
    """Digits of a price, which is drawn anew for every task."""
    price_basis: Literal["agreed", "list", "either"] = "agreed"
    """What an order is priced at: the customer's prices; the list prices, which the order then says (``at list price``);
    or, drawn for each order, one of the two."""
    careless_price: Probability = 0.62
    """Probability that the demonstrator takes the list price instead of the customer's, or the other way round where the
    order is at list price."""
    careless_operator: Probability = 0.45
    """Probability that the demonstrator adds quantity and price instead of multiplying."""
    careless_guess: Probability = 0.04
    """Probability that the demonstrator answers a made-up number instead of calculating."""

    @model_validator(mode="after")
    def _quantities_are_a_range(self) -> Self:
        if self.min_quantity > self.max_quantity:
            raise ValueError(
                f"min_quantity = {self.min_quantity} is above max_quantity = {self.max_quantity}; lower it"
            )
        return self

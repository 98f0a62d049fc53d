"""What a learner consists of: the policy that computes, its adapters, the critic, the optimiser over what of them learns.

Owns their making and how their passes are computed. Knows no batch, no loss and no folder.

::

    policy ──► (adapters) ──► policy that computes ──┐
       └─────► (critic)   ──────────────────────────┴──► AdamW: what has a gradient
       └─────► reference, where it is the policy itself: the weights below the adapters

Invariant: what learns is exactly what requires a gradient: all of the policy, or its adapters; all of a critic.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from hotpot.config.sections import LearnerSection
from hotpot.errors import LearnerError
from hotpot.learner.adapters import Adapters
from hotpot.learner.precision import DTYPES, Precision, settle
from hotpot.learner.scores.critic import Critic
from hotpot.models import Policy


class Parts:
    """The modules of one learner and their optimiser.

    ``policy`` is what computes and learns, ``adapters`` are those in it, if any. ``reference`` may be the policy that was
    given where it has adapters: below them it stays what it was.
    """

    def __init__(
        self,
        policy: Policy,
        settings: LearnerSection,
        *,
        reference: Policy | None,
        seed: int,
        exact: bool = False,
    ) -> None:
        self.adapters = Adapters(policy, settings, seed=seed) if settings.lora_rank else None
        if reference is policy and self.adapters is None:
            raise LearnerError(
                "the reference is the policy itself and would learn with it; give a policy of its own, or set "
                "learner.lora_rank"
            )
        if settings.gradient_checkpointing and not policy.checkpoints:
            raise LearnerError(
                f"learner.gradient_checkpointing = true, and the layers of this {type(policy).__name__} can't be computed "
                "again (transformers marks them where they can); set it to false, or choose another model"
            )
        self.critic = None if settings.critic == "none" else Critic(policy, settings.critic)
        self.policy = policy if self.adapters is None else self.adapters.policy
        self.reference = reference
        self._settings, self._exact = settings, exact
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [parameter for parameter in part.parameters() if parameter.requires_grad]}
                for part in (self.policy, *self.modules.values())
            ],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.compute_in(settle(settings.precision))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What is learned beside the policy, by the name a checkpoint gives it."""
        return {} if self.critic is None else {"critic": self.critic}

    def published(self) -> Policy:
        """Return the policy as it stands, adapters merged, under its own names; without adapters it is live."""
        return self.policy if self.adapters is None else self.adapters.merged()

    def learning(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and weights of what of the policy learns, in the optimiser's order."""
        return ((name, value) for name, value in self.policy.named_parameters() if value.requires_grad)

    def watch(self, told: Callable[[], None]) -> None:
        """Call ``told`` after every pass of a model and every step of the optimiser: what there is of progress."""
        critic = None if self.critic is None else self.critic.decoder
        for model in (self.policy, critic, self.reference):
            if model is not None:
                model.register_forward_hook(lambda *_: told())
        self.optimizer.register_step_post_hook(lambda *_: told())

    def compute_in(self, precision: Precision) -> None:
        """Compute all passes in ``precision`` from here on, in the exact arithmetic where that was asked for and can be.

        A reference in the reward is compared with what the sampler recorded, so it computes in float32 as that does.
        """
        self.precision = precision
        own = [
            self.policy,
            *([] if self.critic is None or self.critic.decoder is None else [self.critic.decoder]),
        ]
        for part in own:
            part.precision = DTYPES[precision]
            part.gradient_checkpointing = self._settings.gradient_checkpointing
            part.exact = self.exact
        if self.reference is not None:
            in_loss = self._settings.kl_in == "loss"
            self.reference.precision = DTYPES[precision if in_loss else "float32"]
            self.reference.exact = self.exact and self.reference.can_be_exact

    @property
    def exact(self) -> bool:
        """Whether passes are computed in the exact arithmetic: not those of adapters, packed rows or other precisions."""
        fits = self.adapters is None and self._settings.packing == "padded" and self.policy.can_be_exact
        return self._exact and fits and self.precision == "float32"

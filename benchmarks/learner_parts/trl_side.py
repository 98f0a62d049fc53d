"""TRL's side: GRPOTrainer on the same model folder, prompts and reward, with nothing on that the other side does not do.

Off: logging, evaluation, checkpoints, a reference (beta 0), gradient checkpointing, mixed precision. On, as in ours: the
fused AdamW, group-normalised rewards, a mean over tokens, the entropy of each token. Every completion has the same length:
the end token is suppressed up to it. The trainer runs its own loop; after each iteration it hands the word over.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from learner_parts.turns import Spent
from learner_parts.work import Work, reward

Rollout = Callable[[list[Any], Any], dict[str, Any]]


class ClockedTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that knows what generating and scoring took: ``apart``, all that is not learning.

    The forward pass for old log-probabilities, which lies inside that, counts as learning.
    """

    apart = Spent(0.0, 0.0)
    _inside = False

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started, self._inside = Spent.now(), True
        found = super()._generate_and_score_completions(inputs)
        self.apart += Spent.now() - started
        self._inside = False
        return found

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        started = Spent.now()
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._inside:
            self.apart -= Spent.now() - started
        return found


class HandOver(TrainerCallback):  # type: ignore[misc]
    """Calls ``turn`` with what each iteration took, all of it and its learning; the time in there is not counted."""

    def __init__(self, minibatches: int, turn: Callable[[Spent, Spent], None]) -> None:
        self.minibatches, self.turn = minibatches, turn
        self.trainer: ClockedTrainer | None = None
        self._started = Spent.now()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._restart()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Stop the clock where an iteration's last optimiser step was taken, hand over, and start it again."""
        if state.global_step % self.minibatches:
            return
        spent = Spent.now() - self._started
        assert self.trainer is not None
        self.turn(spent, spent - self.trainer.apart)
        self._restart()

    def _restart(self) -> None:
        assert self.trainer is not None
        self.trainer.apart_s, self._started = Spent.now(), Spent.now()


def train(
    work: Work,
    folder: Path,
    prompts: Sequence[str],
    *,
    iterations: int,
    turn: Callable[[Spent, Spent], None],
    rollout: Rollout | None = None,
) -> None:
    """Train for ``iterations``; ``turn`` is called after each with what it took and what its learning did.

    ``folder`` is the trainer's own. ``prompts`` are the work's as text, markup and all. ``rollout`` takes the place of generation, as TRL's ``rollout_func``.
    """
    logging.disable_progress_bar()
    hand_over = HandOver(work.minibatches, turn)
    trainer = ClockedTrainer(
        model=AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(work.folder, padding_side="left"),
        reward_funcs=score,
        args=settings(work, folder, iterations),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[hand_over],
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    hand_over.trainer = trainer
    trainer.train()


def score(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the reward of each completion."""
    return [reward(text) for text in completions]


def settings(work: Work, folder: Path, iterations: int) -> GRPOConfig:
    """Return TRL's settings for ``work``."""
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=iterations * work.minibatches,
        per_device_train_batch_size=work.completions // work.minibatches,
        steps_per_generation=work.minibatches,
        gradient_accumulation_steps=1,
        num_generations=work.samples,
        num_iterations=1,
        max_completion_length=work.length,
        generation_kwargs={"min_new_tokens": work.length},
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="bnpo",
        scale_rewards="group",
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

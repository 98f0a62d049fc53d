"""Every error Hotpot raises on purpose.

The tree::

    HotpotError
    ├── UsageError          the caller gave something that cannot work (exit code 2)
    │   ├── RecipeError         a recipe key or value
    │   ├── ModelFilesError     a model folder, tokenizer or checkpoint
    │   ├── RunFolderError      a run folder that exists, is missing, or can't be written
    │   └── EnvironmentSpecError  an environment that is unknown, or breaks its contract
    ├── EnvironmentFailure  an environment broke (infrastructure, never a reward of 0)
    │   └── EnvironmentOverrideError  an environment tried to say how the agent is sampled
    ├── ToolError           a tool refuses a call; its text goes to the model and the episode goes on
    ├── EngineError         an engine refused or failed a request
    │   ├── SamplingOverrideError  a request's sampling parameters differ from the frozen ones
    │   ├── ContextFullError       a request's prompt leaves no room in the engine's context
    │   └── EngineReportError   an engine reports that it sampled otherwise than it was asked to
    ├── StoreError          the experience store could not keep its promise
    │   ├── LedgerError         an impossible state change, or a lost lease
    │   ├── DiskBudgetError     the run would take more of the disk than it may
    │   ├── BacklogError        the lake takes nothing, and the log is as long as it may get
    │   └── CorruptRecordError  bytes on disk that are not what was written
    ├── SelfTestError       the set-up is wrong: found before anything was learned with it
    ├── SupervisionError    a part of the run is dead, and can't be replaced
    └── LearnerError        the learner can't go on (empty batch, warm start diverged)
        └── learner.NonFiniteError  non-finite steps in a row; carries the learner's partial result, so it lives there

A message names the value, the rule it breaks and the remedy. An error that ends an episode is a status with a
reason on the attempt; an error that breaks a part ends the run.
"""


class HotpotError(Exception):
    """Base of every error raised on purpose."""


class UsageError(HotpotError):
    """The caller gave something that cannot work; the command line exits with 2."""


class RecipeError(UsageError):
    """A recipe has an unknown key, a bad value, or sizes that cannot work together."""


class ModelFilesError(UsageError):
    """A model folder, tokenizer, chat template or checkpoint is missing or unusable."""


class RunFolderError(UsageError):
    """A run folder exists already, is missing, or cannot be written."""


class EnvironmentSpecError(UsageError):
    """An environment is unknown, or its declaration breaks the contract."""


class EnvironmentFailure(HotpotError):
    """An environment broke while an episode ran. The attempt fails with this reason; it is never a reward."""


class EnvironmentOverrideError(EnvironmentFailure):
    """An environment tried to say how the agent is sampled; only the recipe does."""


class ToolError(HotpotError):
    """A tool refuses what it was asked. The message goes to the model as the tool's reply, so it is short."""


class EngineError(HotpotError):
    """An engine refused or failed a request."""


class SamplingOverrideError(EngineError):
    """A request's sampling parameters differ from those frozen for its purpose."""


class ContextFullError(EngineError):
    """A request's prompt leaves no room to sample a token. Whoever asked ends the episode for that reason."""


class EngineReportError(EngineError):
    """An engine reports that it sampled with other parameters, precision or device than it was asked to or says it has."""


class StoreError(HotpotError):
    """The experience store could not keep its promise."""


class LedgerError(StoreError):
    """An impossible change of state on the ledger, or a lease that another owner holds."""


class DiskBudgetError(StoreError):
    """The run would take more of the disk than its budget, or leave less free than it must. Nothing was written."""


class BacklogError(StoreError):
    """The lake has not taken the log for long, and the log may get no longer. Nothing was written."""


class CorruptRecordError(StoreError):
    """Bytes on disk are not what was written."""


class SelfTestError(HotpotError):
    """The set-up is wrong: sampler, learner, masks or publishing do not fit together. Nothing was learned."""


class SupervisionError(HotpotError):
    """A part of the run makes no progress and can't be replaced, or all environments fail. The message names the culprit."""


class LearnerError(HotpotError):
    """The learner cannot go on."""

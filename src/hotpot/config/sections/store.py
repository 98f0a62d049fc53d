"""Where experience is kept, what is let in, what is learned again."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hotpot.config.sections.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


def has_user_info(address: str) -> bool:
    """Whether an address such as ``https://name:password@host/path`` holds a user or a password."""
    scheme, mark, rest = address.partition("://")
    return bool(mark) and "/" not in scheme and "@" in re.split(r"[/?#]", rest, maxsplit=1)[0]


class S3Section(Section):
    """S3-compatible storage of a lake at ``s3://bucket/prefix``. Credentials come from the environment only:
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, where there is one, AWS_SESSION_TOKEN."""

    endpoint: str = ""
    """Address of the server, as ``http://127.0.0.1:8333``; empty for Amazon's own."""
    region: str = "us-east-1"
    """Region the bucket lies in; servers of your own mostly take any."""
    allow_http: bool = False
    """Allow an endpoint without TLS."""
    connect_timeout_s: PositiveFloat = 3.0
    """Longest wait for a connection."""
    request_timeout_s: PositiveFloat = 10.0
    """Longest wait for the answer to one request."""
    retries: NonNegativeInt = 2
    """Further tries of a request before the operation counts as failed; the archive then tries it again as a whole."""

    @property
    def deadline_s(self) -> float:
        """Seconds after which no request is tried again."""
        return self.request_timeout_s * (self.retries + 1)

    @model_validator(mode="after")
    def _endpoint_is_allowed(self) -> Self:
        if "@" in self.endpoint:
            raise ValueError(
                "store.s3.endpoint must hold no user or password, as run folder and lake keep it; leave out what stands "
                "before its @ and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
            )
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"store.s3.endpoint = {self.endpoint!r} must begin with http:// or https://")
        if self.endpoint.startswith("http://") != self.allow_http:
            raise ValueError(
                f"store.s3.endpoint = {self.endpoint!r} and store.s3.allow_http = {self.allow_http} contradict each "
                "other; allow_http is true exactly for an endpoint that begins with http://"
            )
        return self


class StoreSection(Section):
    """Log, ledger and lake."""

    lake: str | None = None
    """Where the lake lies: a folder, or s3://bucket/prefix. Several runs may share one. By default the run folder's
    own ``lake``."""
    s3: S3Section = S3Section()
    """How to reach a lake on S3."""
    archive_every_batches: PositiveInt = 16
    """Batches in the log after which the background writer commits them to the lake."""
    archive_every_s: PositiveFloat = 10.0
    """Seconds after which it commits what is there."""
    archive_every_bytes: PositiveInt = 32 * 1024 * 1024
    """Bytes in the log after which it commits."""
    acknowledge: Literal["log", "lake"] = "log"
    """When a trajectory counts as stored: in the fsynced log (survives the process), or committed to the lake."""
    flush_timeout_s: PositiveFloat = 120.0
    """Longest wait for the lake to take what is in the log, where something waits for that: at the end of the run, and
    with acknowledge = "lake"."""
    max_backlog: PositiveInt = 64
    """Log segments that may wait for a lake that takes none; then whoever appends waits too. Each holds about
    archive_every_bytes while the lake fails."""
    backpressure_s: NonNegativeFloat = 300.0
    """Longest such wait before the run ends with an error; everything acknowledged stays in the log."""
    max_bytes: NonNegativeInt = 0
    """Most bytes the run's log and local lake may take together before the run stops in order; 0 sets no bound."""
    min_free_bytes: NonNegativeInt = 256 * 1024 * 1024
    """Bytes that stay free on the disks of log and local lake: the run stops in order before it takes them."""
    redact_patterns: tuple[str, ...] = ()
    """Further regular expressions: matches in an environment's text and in reasons of failures are redacted before the
    model and the log see them."""

    @model_validator(mode="after")
    def _lake_holds_no_secret(self) -> Self:
        if self.lake is not None and has_user_info(self.lake):
            raise ValueError(
                "store.lake must hold no user or password, as run folder and lake keep it; leave out what stands before "
                "its @ and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
            )
        return self


class GateSection(Section):
    """The gate's circuit breaker: a producer whose records are mostly refused is held off instead of judged on and on."""

    breaker_window: PositiveInt = 256
    """Records of a producer, the last ones, whose refused share decides."""
    breaker_min_records: PositiveInt = 32
    """Records of a producer that must have been judged before its breaker may open."""
    breaker_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The breaker opens where more than this share of them was refused; 1 never opens it."""
    breaker_probe_every: PositiveInt = 16
    """While it is open, one record in this many is judged for testing; the others go to quarantine as breaker_open."""
    breaker_probes_to_close: PositiveInt = 8
    """Tested records accepted in a row after which it closes again."""


class ReplaySection(Section):
    """Experience that is learned again: the good of the last rounds (hot) and history (cold)."""

    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a batch's trajectories that are replayed; 0 is off."""
    hot_share: Annotated[float, Field(ge=0, le=1)] = 0.75
    """Share of the replayed ones that come from hot; what one tier lacks comes from the other."""
    weighting: Literal["uniform", "recency", "positive"] = "uniform"
    """Which are drawn more often inside a tier: none; the younger; those with a positive advantage."""
    half_life_updates: PositiveFloat = 20.0
    """Under ``recency``: updates after which a trajectory is drawn half as often."""
    positive_weight: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 4.0
    """Under ``positive``: how many times as often a trajectory with a positive advantage is drawn as one without."""
    only_positive: bool = False
    """Draw nothing but trajectories with a positive advantage (self-imitation, arXiv:1806.05635). Failures that come back
    without the successes beside them unlearn what both share: set this wherever successes are drawn more often."""
    importance_exponent: Annotated[float, Field(ge=0, le=1)] = 0.4
    """How far the loss weights correct the choice (arXiv:1511.05952): 0 not at all, 1 back to a uniform draw."""
    hot_rounds: PositiveInt = 8
    """Updates whose good trajectories stay in hot."""
    hot_bytes: PositiveInt = 256 * 1024 * 1024
    """Bytes hot may take in memory; the oldest round goes first, in a round the least good."""
    hot_min_advantage_quantile: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Good is a positive advantage that reaches this quantile of its round's positive advantages; 0 takes them all."""
    quotas: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    """Largest share of a draw by name of the environment, rounded up to whole trajectories; what it cuts off goes to
    the other environments."""
    max_staleness_updates: PositiveInt | None = None
    """Updates after which a trajectory is not replayed any more; unset is never."""
    cold_cache_bytes: PositiveInt = 2 * 1024 * 1024 * 1024
    """Bytes the local cache of cold may take on disk. It can be deleted at any time; where it is smaller than the
    history that is drawn from, draws read the lake again and again."""

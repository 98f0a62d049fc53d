"""Where a lake lies: a local folder, or a prefix of an S3-compatible bucket. The same code goes on for both.

Owns the one form in which a place is written down (an absolute path, or ``s3://bucket/prefix``), and what each library
needs to get there. Knows no table. Credentials come from the environment at the moment they are needed and are kept
nowhere: no recipe, manifest or message holds them.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pyarrow import fs

from hotpot.config import S3Section, has_user_info
from hotpot.errors import UsageError

_SCHEME = "s3://"

_UNFIT = re.compile(r"[\[\]|^\\\x00-\x1f\x7f]|%[0-9A-Fa-f]{2}")
"""What makes Delta Lake's way from a path to an address and back end elsewhere, or nowhere."""

_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "access_key",
    "AWS_SECRET_ACCESS_KEY": "secret_key",
    "AWS_SESSION_TOKEN": "session_token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeLocation:
    """The place of one lake. ``uri`` is an absolute path or ``s3://bucket/prefix``, without a slash at its end."""

    uri: str
    s3: S3Section = field(default_factory=S3Section)

    @classmethod
    def of(cls, place: str | Path, s3: S3Section | None = None) -> Self:
        """Return the location of a folder or an ``s3://bucket/prefix``.

        Without ``s3`` the settings come from the environment (:func:`s3_from_environment`). Raises :class:`UsageError`
        where the place is of another kind, names no bucket, holds a password, or is spelled with what Delta
        Lake can't take in a path.
        """
        text = str(place)
        if has_user_info(text):
            raise UsageError(
                f"a lake's address holds no user or password (the one that ends in {text.rpartition('@')[2]!r} does); "
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
            )
        if not text.startswith(_SCHEME):
            if "://" in text:
                raise UsageError(f"a lake lies in a folder or at s3://bucket/prefix, not at {text!r}")
            return cls(uri=_fit(str(Path(text).absolute())))
        path = text.removeprefix(_SCHEME).rstrip("/")
        if not path.partition("/")[0]:
            raise UsageError(f"{text!r} names no bucket; a lake on S3 is s3://bucket/prefix")
        return cls(uri=_fit(_SCHEME + path), s3=s3 or s3_from_environment())

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return not self.uri.startswith(_SCHEME)

    @property
    def folder(self) -> Path:
        """The folder of a local lake. Raises :class:`UsageError` where it lies on S3."""
        if not self.is_local:
            raise UsageError(f"{self.uri} is no local folder")
        return Path(self.uri)

    def table_uri(self, table: str) -> str:
        """Return where a table lies."""
        return f"{self.uri}/{table}"

    def storage_options(self) -> dict[str, str]:
        """Return what deltalake needs to get there; empty for a folder.

        Commits are conditional puts (only the first writer of a version wins). Every request ends within
        ``request_timeout_s``, every operation with its tries within ``deadline_s``. Raises :class:`UsageError` where
        the environment has no credentials.
        """
        if self.is_local:
            return {}
        options = {
            **{name: value for name, value in credentials().items() if value},
            "aws_conditional_put": "etag",
            "aws_region": self.s3.region,
            "aws_allow_http": str(self.s3.allow_http).lower(),
            "connect_timeout": f"{self.s3.connect_timeout_s}s",
            "timeout": f"{self.s3.request_timeout_s}s",
            "max_retries": str(self.s3.retries),
            "retry_timeout": f"{self.s3.deadline_s}s",
        }
        return options | ({"aws_endpoint_url": self.s3.endpoint} if self.s3.endpoint else {})

    def filesystem(self) -> tuple[fs.FileSystem, str]:
        """Return an Arrow file system and the lake's path in it. Raises as :meth:`storage_options`."""
        if self.is_local:
            return fs.LocalFileSystem(), self.uri
        keys: dict[str, Any] = {_CREDENTIALS[name]: value or None for name, value in credentials().items()}
        made = fs.S3FileSystem(
            **keys,
            region=self.s3.region,
            scheme="http" if self.s3.allow_http else "https",
            endpoint_override=self.s3.endpoint or None,
            connect_timeout=self.s3.connect_timeout_s,
            request_timeout=self.s3.request_timeout_s,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=self.s3.retries + 1),
        )
        return made, self.uri.removeprefix(_SCHEME)


def _fit(uri: str) -> str:
    if odd := _UNFIT.search(uri):
        raise UsageError(
            f"a lake can't lie at {uri!r}: Delta Lake reads {odd[0]!r} in a path as something else or not at all; choose "
            "another run folder, or another place for the lake (store.lake)"
        )
    return uri


def credentials() -> Mapping[str, str]:
    """Return the S3 credentials of the environment. Raises :class:`UsageError` where there are none.

    No other place is asked, least of all a cloud's metadata server, which hangs where there is none.
    """
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    found = {name: os.environ.get(name, "") for name in _CREDENTIALS}
    missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not found[name]]
    if missing:
        raise UsageError(f"a lake on S3 needs {' and '.join(missing)} in the environment; set them")
    return found


def s3_from_environment() -> S3Section:
    """Return S3 settings from AWS_ENDPOINT_URL, AWS_REGION and AWS_ALLOW_HTTP; what is not set keeps its default.

    Raises :class:`UsageError` where they contradict each other.
    """
    found = {
        "endpoint": os.environ.get("AWS_ENDPOINT_URL"),
        "region": os.environ.get("AWS_REGION"),
        "allow_http": os.environ.get("AWS_ALLOW_HTTP"),
    }
    try:
        return S3Section.model_validate({name: value for name, value in found.items() if value}, strict=False)
    except ValueError as error:
        raise UsageError(
            f"AWS_ENDPOINT_URL, AWS_REGION and AWS_ALLOW_HTTP don't work together: {error}"
        ) from error

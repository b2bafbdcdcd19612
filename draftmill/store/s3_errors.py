"""What S3 refuses, in one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
from urllib3.exceptions import HTTPError

from draftmill.errors import UserError
from draftmill.store.patience import brief, code_of, status_of, trouble

_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "301", "IllegalLocationConstraintException"}
_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and see the policy in docs/s3.md for the rights"
)


class StoreAwayError(UserError):
    """The store did not answer for as long as s3.wait_s says; the same command may succeed later."""

    kind = "late"


class CredentialsExpiredError(UserError):
    """The credentials expired and were not renewed for as long as s3.wait_s says."""

    kind = "expired"


@contextmanager
def explained(url: str, endpoint: str) -> Iterator[None]:
    """Turn what boto3 raises about a store into a UserError; `endpoint` is where it was looked for."""
    try:
        yield
    except (ClientError, BotoCoreError, Boto3Error, HTTPError, ConnectionError, TimeoutError) as error:
        raise as_user_error(error, url, endpoint) from None


def as_user_error(error: Exception, url: str, endpoint: str) -> UserError:
    """The sentence for one of boto3's errors."""
    kind = trouble(error)
    if kind == "expired":
        return CredentialsExpiredError(
            f"{url}: the credentials have expired: renew them and give the same command again; nothing finished is lost."
        )
    if kind == "late":
        return StoreAwayError(
            f"{url} does not answer at {endpoint} ({brief(error)}): check s3.endpoint_url and the network, and give the "
            "same command again; nothing finished is lost."
        )
    if isinstance(error, ClientError):
        return UserError(_refusal(error, url, endpoint))
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return UserError(f"{url} needs credentials and there are none: {_CREDENTIALS}.")
    return UserError(f"{url} cannot be used at {endpoint} ({brief(error)}): check the section s3 of the configuration.")


def _refusal(error: ClientError, url: str, endpoint: str) -> str:
    code = code_of(error)
    if code == "NoSuchBucket":
        return (
            f"{url} names a bucket that does not exist at {endpoint}: create it, or mend its name in the configuration."
        )
    if code == "RequestTimeTooSkewed":
        return f"{url}: this host's clock differs too much from the store's: set it, for instance by NTP."
    if code in _REGION:
        return f"{url} lies in another region ({code}): set s3.region in the configuration."
    if status_of(error) in (401, 403):
        return f"{url} refuses these credentials ({code}): {_CREDENTIALS}."
    return (
        f"{url} refuses a request at {endpoint} ({status_of(error)} {code}): see docs/s3.md for what a store must be able "
        "to do."
    )

"""What is repeated, for how long, and what a person hears meanwhile."""

from __future__ import annotations

import boto3.exceptions
import pytest
from botocore import exceptions as boto
from hypothesis import given
from hypothesis import strategies as st

from draftmill.store.patience import Notices, Patience, trouble


def reply(code: str, status: int) -> boto.ClientError:
    return boto.ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


def wrapped(error: Exception) -> Exception:
    try:
        try:
            raise error
        except Exception as inner:
            raise boto3.exceptions.S3UploadFailedError(f"Failed: {inner}")  # noqa: B904 - as boto3 does
    except Exception as outer:
        return outer


PASSES = [
    (reply("SlowDown", 503), "late"),
    (reply("503", 503), "late"),
    (reply("InternalError", 500), "late"),
    (reply("429", 429), "late"),
    (reply("RequestTimeout", 400), "late"),
    (boto.EndpointConnectionError(endpoint_url="http://x"), "late"),
    (boto.ReadTimeoutError(endpoint_url="http://x"), "late"),
    (boto.ConnectionClosedError(endpoint_url="http://x"), "late"),
    (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), "late"),
    (boto.SSLError(endpoint_url="http://x", error="EOF occurred in violation of protocol"), "late"),
    (ConnectionResetError("gone"), "late"),
    (wrapped(reply("SlowDown", 503)), "late"),
    (boto3.exceptions.RetriesExceededError(boto.ReadTimeoutError(endpoint_url="http://x")), "late"),
    (reply("ExpiredToken", 400), "expired"),
    (reply("TokenRefreshRequired", 400), "expired"),
    (reply("400", 400), "expired"),
    (boto.UnauthorizedSSOTokenError(), "expired"),
    (boto.CredentialRetrievalError(provider="p", error_msg="m"), "expired"),
]
NEVER = [
    reply("AccessDenied", 403),
    reply("NoSuchBucket", 404),
    reply("404", 404),
    reply("PreconditionFailed", 412),
    reply("InvalidAccessKeyId", 403),
    reply("RequestTimeTooSkewed", 403),
    reply("NotImplemented", 501),
    boto.NoCredentialsError(),
    boto.SSLError(endpoint_url="http://x", error="[SSL: CERTIFICATE_VERIFY_FAILED]"),
    boto.ParamValidationError(report="r"),
    wrapped(reply("AccessDenied", 403)),
    KeyError("key"),
    OSError(28, "No space left on device"),
]


@pytest.mark.parametrize(("error", "kind"), PASSES, ids=lambda value: getattr(value, "__class__", value).__name__)
def test_what_passes(error, kind):
    assert trouble(error) == kind


@pytest.mark.parametrize("error", NEVER, ids=lambda error: str(error)[:40])
def test_what_never_passes(error):
    assert trouble(error) is None


def test_an_error_met_while_another_was_handled_is_judged_alone():
    def refused():
        try:
            raise reply("SlowDown", 503)
        except boto.ClientError:
            raise reply("AccessDenied", 403)  # noqa: B904 - the handler's own request fails

    with pytest.raises(boto.ClientError) as caught:
        refused()
    assert trouble(caught.value) is None


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now, self.slept, self.said = 0.0, [], []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def patience(self, limit_s: float, **more) -> Patience:
        clock = lambda: self.now  # noqa: E731
        return Patience(
            limit_s, self.said.append, "s3://b", notices=Notices(clock), clock=clock, sleep=self.sleep, **more
        )


def failing(times: int, error: Exception):
    left = [error] * times

    def request() -> str:
        if left:
            raise left.pop()
        return "answer"

    return request


def test_an_outage_is_waited_out_and_said_a_few_times():
    time = Clock()
    assert time.patience(900)(failing(20, ConnectionResetError("reset by peer"))) == "answer"
    assert 120 < time.now < 300
    assert time.said[0] == "s3://b does not answer (reset by peer): waiting for it."
    assert time.said[-1] == f"s3://b answers again after {time.now:.0f} s."
    assert len(time.said) <= 2 + time.now / 30


def test_what_would_repeat_itself_is_raised_at_once():
    time = Clock()
    with pytest.raises(boto.ClientError, match="AccessDenied"):
        time.patience(900)(failing(1, reply("AccessDenied", 403)))
    assert (time.slept, time.said) == ([], [])


def test_without_patience_one_request_is_made():
    time = Clock()
    with pytest.raises(ConnectionResetError):
        time.patience(0)(failing(1, ConnectionResetError()))
    assert time.slept == []


@given(limit=st.floats(0, 2000), chance=st.floats(0, 1))
def test_patience_ends_in_time_with_the_last_error(limit, chance):
    time = Clock()
    with pytest.raises(boto.ClientError, match="SlowDown"):
        time.patience(limit, chance=lambda: chance)(failing(10**6, reply("SlowDown", 503)))
    assert time.now == pytest.approx(limit, abs=1e-6)
    assert max(time.slept, default=0) <= 15


def test_renewed_credentials_let_the_run_go_on():
    time, renewed = Clock(), []

    def request() -> str:
        if not renewed:
            raise reply("ExpiredToken", 400)
        return "answer"

    def renew() -> None:
        if time.now > 60:
            renewed.append(True)

    assert time.patience(900, renew=renew)(request) == "answer"
    assert time.said[0] == "s3://b: the credentials have expired (400 ExpiredToken): renew them, this run waits."


def test_threads_that_wait_for_one_store_say_it_once():
    time = Clock()
    notices = Notices(lambda: time.now)
    for _ in range(10):
        notices.waiting("s3://b", "late", ConnectionResetError("x"), time.said.append)
    notices.answered("s3://b", time.said.append)
    notices.answered("s3://b", time.said.append)
    assert time.said == ["s3://b does not answer (x): waiting for it.", "s3://b answers again after 0 s."]

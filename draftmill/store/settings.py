"""How S3 is reached. Credentials are not among it: they come from the environment and the AWS files alone."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class S3Settings(BaseModel):
    """How to reach a store and prompts under s3://; credentials come from the usual AWS variables and files alone."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    endpoint_url: str | None = Field(
        None, description="URL of the S3 service; default: AWS, or AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL."
    )
    region: str | None = Field(None, description="Region of the bucket; default: as the AWS variables and files say.")
    path_style: bool = Field(
        False,
        description="Address http://host/bucket/key instead of http://bucket.host/key, as most other stores need.",
    )
    checksum: Literal["when_supported", "when_required"] = Field(
        "when_supported",
        description="when_required: send no checksums beside the data, for stores that do not know them.",
    )
    multipart_threshold: int = Field(
        8 << 20,
        ge=0,
        description="Bytes above which a file is sent in parts, of 8 MiB or more, which can be repeated alone.",
    )
    retries: int = Field(5, ge=1, description="Tries of one request, within seconds, before the store counts as away.")
    wait_s: float = Field(
        900.0, ge=0, description="Seconds to wait for a store that is away or overloaded before giving up."
    )
    max_clock_skew_s: float = Field(
        300.0, gt=0, description="Largest difference between this host's clock and the store's."
    )

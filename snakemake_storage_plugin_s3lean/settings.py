"""Settings beside those of the original plugin: on the command line `--storage-s3lean-...`."""

from dataclasses import dataclass, field

from snakemake_storage_plugin_s3 import StorageProviderSettings as S3Settings

from draftmill.store.s3_wire import PART_BYTES


# No postponed annotations here: Snakemake builds its command line from the types themselves.
@dataclass
class StorageProviderSettings(S3Settings):  # type: ignore[misc]
    """How the storage is reached, what is listed and how long it is waited for."""

    region: str | None = field(
        default=None,
        metadata={"help": "Region of the bucket (if omitted, as the AWS variables and files say)", "env_var": True},
    )
    path_style: bool = field(
        default=False, metadata={"help": "Address http://host/bucket/key instead of http://bucket.host/key"}
    )
    checksum: str = field(
        default="when_supported",
        metadata={"help": "Checksums beside the data: when_supported, or when_required for storages without them"},
    )
    multipart_threshold: int = field(
        default=PART_BYTES,
        metadata={"help": "Bytes above which a file is sent in parts", "type": int},
    )
    wait_s: float = field(
        default=900.0,
        metadata={"help": "Seconds to wait for a storage that is late or away before giving up", "type": float},
    )
    look_first: bool = field(
        default=False,
        metadata={"help": "Look before each upload whether a job has stored the file by itself, and then send nothing"},
    )
    inventory_prefix: str | None = field(
        default=None,
        metadata={"help": "List everything below this prefix at once, like s3://bucket/prefix (default: each folder)"},
    )

"""S3 storage for Snakemake that lists once, never overwrites another run's object and outlasts an outage.

A subclass of snakemake-storage-plugin-s3 with these differences (docs/s3.md says why each is needed):

- One listing of `inventory_prefix` (or of a file's folder) answers for every file below it, present or missing. The
  original asks three requests, one after another, for each missing file.
- What this run has seen or stored counts as there without another request.
- An object that was not there when the run was planned is put with `If-None-Match: *`. If another run was faster, its
  bytes replace the local file, so that everything behind it is made from what the storage holds.
- Only objects that this run has seen or stored are removed, and never the bucket; nor is a bucket created.
- A storage that is late, throttled or away is waited for (`wait_s`) instead of ending the run.
- Objects carry the sha256 of their bytes as metadata. Inputs are retrieved side by side.

The package brings no rule of draftmill's; of draftmill it uses `store/patience.py` and `store/s3_wire.py`, which import
nothing of draftmill themselves and would move along to the original.
"""

from snakemake_storage_plugin_s3lean.objects import StorageObject
from snakemake_storage_plugin_s3lean.provider import StorageProvider as _Provider
from snakemake_storage_plugin_s3lean.settings import StorageProviderSettings

__all__ = ["StorageObject", "StorageProvider", "StorageProviderSettings"]


class StorageProvider(_Provider):
    """The provider; Snakemake looks for its objects' class in the module that it is defined in."""

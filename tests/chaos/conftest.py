from tests.chaos.disks import disk  # noqa: F401 - a fixture
from tests.s3.fixtures import weed  # noqa: F401 - a fixture

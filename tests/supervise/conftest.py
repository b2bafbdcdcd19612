from tests.s3.fixtures import weed  # noqa: F401 - a fixture

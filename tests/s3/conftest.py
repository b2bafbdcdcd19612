from tests.s3.fixtures import s3_environment, s3_store, weed  # noqa: F401 - fixtures

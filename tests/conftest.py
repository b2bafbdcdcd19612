"""What holds for every room's tests."""

from hypothesis import settings

# How long an example takes depends on the machine, and no test judges that.
settings.register_profile("draftmill", deadline=None)
settings.load_profile("draftmill")

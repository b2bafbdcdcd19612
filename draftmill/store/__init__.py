"""Where objects live: a directory today behind a small interface that an object store can fill as well."""

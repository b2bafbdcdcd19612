"""Where objects live: a directory or S3, behind one small interface."""

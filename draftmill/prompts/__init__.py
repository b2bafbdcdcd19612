"""From raw data sets to prompt shards: find files, read records, make them canonical, split, shard, index."""

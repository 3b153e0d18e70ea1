"""The pure core: the record's story from prediction to ranked result, one file a step. Time and seeds are arguments."""

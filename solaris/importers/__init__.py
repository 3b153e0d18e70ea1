"""From other people's logs to a log folder (`schemas/log.py`): one file per format, and requests where a log has none."""

"""The front door: command line, configuration, broker, demo and importers."""

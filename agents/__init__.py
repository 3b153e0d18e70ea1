"""Thin shells that put the pure core on Kafka; the only importers of faust and confluent_kafka."""

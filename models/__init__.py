"""Models: torch inside, numpy at the edges. Knows no Kafka, no store, no clock."""
